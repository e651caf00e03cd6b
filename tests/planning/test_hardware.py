"""The table of GPUs is complete, dense, and finds what drivers report."""

import pytest

from dsgpt.common.errors import UserError
from dsgpt.planner.hardware import find_gpu, gpus, recognise

MIB = 1 << 20
REPORTED = [
    ("Tesla T4", 15360, "t4"),
    ("Tesla V100-SXM2-16GB", 16160, "v100-16gb"),
    ("Tesla V100-SXM2-32GB", 32510, "v100-32gb"),
    ("NVIDIA A10G", 23028, "a10g"),
    ("NVIDIA L4", 23034, "l4"),
    ("NVIDIA L40S", 46068, "l40s"),
    ("NVIDIA GeForce RTX 3090", 24576, "rtx-3090"),
    ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090"),
    ("A100-SXM4-40GB", 40536, "a100-40gb"),
    ("NVIDIA A100-SXM4-80GB", 81920, "a100-80gb"),
    ("NVIDIA H100 80GB HBM3", 81559, "h100-80gb"),
    ("NVIDIA H100 PCIe", 81559, "h100-pcie"),
    ("NVIDIA H200", 143771, "h200"),
    ("NVIDIA B200", 183359, "b200"),
]
"""Names and MiB as drivers report them."""


@pytest.mark.parametrize(("name", "mebibytes", "key"), REPORTED)
def test_a_gpu_is_known_by_what_its_driver_reports(name, mebibytes, key):
    assert recognise(name, mebibytes * MIB) == find_gpu(key)


def test_every_gpu_is_recognised_by_some_name():
    assert [key for _, _, key in REPORTED] == list(gpus())


@pytest.mark.parametrize(
    ("name", "mebibytes"),
    [
        ("NVIDIA GeForce RTX 3090 Ti", 24564),
        ("NVIDIA L40", 46068),
        ("NVIDIA A10", 23028),
        ("NVIDIA A100-PCIE-40GB", 40536),
        ("NVIDIA H100 NVL", 95830),
        ("NVIDIA H200 NVL", 143771),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40192),
        ("NVIDIA H200", 143771 // 2),
        ("", 0),
    ],
)
def test_no_other_gpu_is_taken_for_one_of_the_table(name, mebibytes):
    assert recognise(name, mebibytes * MIB) is None


def test_peaks_are_dense_and_null_without_units():
    assert find_gpu("h100-80gb").peak("bf16") == 989_400_000_000_000
    assert find_gpu("l4").peak("bf16") == 121_000_000_000_000  # its datasheet prints 242, with sparsity
    assert find_gpu("t4").peak("fp16") == 65_000_000_000_000
    for key in ("t4", "v100-16gb", "v100-32gb"):
        assert find_gpu(key).peak("bf16") is None
        assert find_gpu(key).peak("tf32") is None
    for gpu in gpus().values():
        assert gpu.sources
        assert all(source.url.startswith("https://") for source in gpu.sources)


def test_a_misspelled_gpu_names_the_nearest():
    with pytest.raises(UserError, match=r"no GPU a100-80g in the table \(did you mean a100-80gb\?\): known are t4, "):
        find_gpu("a100-80g")
