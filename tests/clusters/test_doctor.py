"""``dsgpt doctor``: this machine, two that are not fit together, and every finding by made-up facts."""

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_script
from small_run import REPOSITORY, write_data

from dsgpt.training import doctor
from dsgpt.training.doctor import (
    DoctorOptions,
    findings_of_cluster,
    findings_of_links,
    findings_of_machine,
)

DOCTOR = REPOSITORY / "src" / "doctor.py"
GPU = {"name": "A100", "driver": "580", "memory_bytes": 80e9, "used_bytes": 1e9, "uncorrected_errors": 0}
HEALTHY: dict[str, Any] = {
    "host": "a",
    "versions": {"python_version": "3.11.7", "torch_version": "2.13.0", "deepspeed_version": "0.19.8"},
    "cpus": 64,
    "gpus": [GPU, GPU],
    "free_bytes": 1e12,
    "writable": True,
    "shared_memory_bytes": 8e9,
    "open_files": 65536,
    "compiler": "g++",
    "ninja": True,
    "cuda_toolkit": True,
    "libaio": "",
    "port_taken": False,
    "data": [{"path": "train.bin", "problem": None, "sha256": "1", "size": 2}],
}
OPTIONS = DoctorOptions()
OFFLOAD = DoctorOptions(deepspeed_config=REPOSITORY / "ds_configs" / "zero3_nvme.json")


def test_healthy_machines_have_no_findings():
    assert [*findings_of_machine(HEALTHY, OPTIONS), *findings_of_machine(HEALTHY, OFFLOAD)] == []
    assert list(findings_of_cluster([HEALTHY, HEALTHY | {"host": "b"}])) == []


@pytest.mark.parametrize(
    ("options", "change", "what"),
    [
        (OPTIONS, {"writable": False}, "checkpoint cannot be written"),
        (OPTIONS, {"free_bytes": 4e9}, "4.0 GB are free at checkpoint, and checkpoints take 4.5 GB"),
        (OPTIONS, {"shared_memory_bytes": 64 << 20}, "/dev/shm has 67 MB free"),
        (OPTIONS, {"open_files": 1024}, "a process may open 1024 files"),
        (OPTIONS, {"gpus": [GPU, GPU | {"uncorrected_errors": 3}]}, "GPU 1 has 3 uncorrected memory errors"),
        (OPTIONS, {"gpus": [GPU | {"used_bytes": 20e9}]}, "GPU 0 has 20.0 GB in use"),
        (OPTIONS, {"data": [{"problem": "train.bin: cannot be read"}]}, "train.bin: cannot be read"),
        (OPTIONS, {"port_taken": True}, "port 29500, at which launchers let ranks meet, is in use"),
        (OFFLOAD, {"versions": {"deepspeed_version": "0.18.2"}}, "DeepSpeed 0.18.2 trains wrong (ZeRO 0, 1, 2, 3 with"),
        (OFFLOAD, {"compiler": None}, "needs a C++ compiler"),
        (OFFLOAD, {"ninja": False}, "needs ninja"),
        (OFFLOAD, {"cuda_toolkit": False}, "needs the CUDA toolkit"),
        (OFFLOAD, {"libaio": "finds no libaio"}, "needs asynchronous I/O"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_each_finding_of_a_machine(options, change, what):
    (finding,) = findings_of_machine(HEALTHY | change, options)
    assert finding.where == "a"
    assert what in finding.what
    assert finding.cure


def test_a_port_in_use_is_seen(monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with socket.socket() as one:
        one.bind(("", 0))
        one.listen()
        monkeypatch.setattr(doctor, "DEFAULT_PORT", one.getsockname()[1])
        assert doctor.machine_facts(OPTIONS)["port_taken"]
    assert not doctor.machine_facts(OPTIONS)["port_taken"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"versions": HEALTHY["versions"] | {"torch_version": "2.12"}}, "torch_version differ: a 2.13.0; b 2.12"),
        ({"gpus": [GPU, GPU | {"driver": "570"}]}, "GPUs differ"),
        ({"data": [{"problem": None, "sha256": "2"}]}, "train.bin is not the same file on every machine"),
        ({"clock_offset_sec": -3600.0}, "its clock is -3600.0 s off that of a"),
    ],
)
def test_each_finding_between_machines(change, what):
    (finding,) = findings_of_cluster([HEALTHY, HEALTHY | {"host": "b"} | change])
    assert what in finding.what


def test_a_link_that_is_much_slower_than_the_others_is_a_finding():
    links = [{"from": one, "to": "b", "bytes_per_sec": speed} for one, speed in (("a", 9e9), ("c", 4e9), ("d", 1e10))]
    (finding,) = findings_of_links(links, None)
    assert (finding.where, finding.what) == ("c", "32.00 Gbit/s to b, others have 72.00")


def test_this_machine_is_examined(tmp_path):
    folder = write_data(tmp_path)
    words = ["--train_data_path", folder / "train.bin", "--checkpoint_path", tmp_path / "new" / "run", "--json"]
    done = run_script(DOCTOR, [*words, "--verify_data", "--model_size", "demo"], cwd=tmp_path)
    examined = json.loads(done.stdout)
    assert done.returncode == (1 if examined["findings"] else 0)
    (machine,) = examined["machines"]
    assert machine["versions"]["torch_version"]
    assert machine["data"][0]["problem"] is None
    assert not (tmp_path / "new").exists()
    assert examined["seconds"] < 20


APART = """
import json, os, runpy, sys
from dsgpt.training import doctor
os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
doctor.SEEN_SEC = 0.5
script, flags = sys.argv[1:]
sys.argv = [script, *json.loads(flags)[int(os.environ["RANK"])]]
runpy.run_path(script, run_name="__main__")
"""
"""The doctor of a rank that is alone on its machine, with flags of its own."""


def together(folder: Path, *flags: list[str]) -> "subprocess.CompletedProcess[str]":
    """The doctor on as many machines as there are lists of flags; each is a process here."""
    (folder / "apart.py").write_text(APART)
    words = [str(DOCTOR), json.dumps(flags)]
    return run_script(folder / "apart.py", words, ranks=len(flags), cwd=folder)


def test_machines_that_share_nothing_are_told_so_and_nothing_is_left(tmp_path):
    one, other = write_data(tmp_path / "one"), write_data(tmp_path / "other")
    flags = [
        ["--checkpoint_path", f"{folder}/runs", "--train_data_path", f"{folder}/{name}.bin", "--json"]
        for folder, name in ((one, "train"), (other, "val"))
    ]
    done = together(tmp_path, *flags)
    assert done.returncode == 1, done.stderr
    examined = json.loads(done.stdout)
    found = " ".join(finding["what"] for finding in examined["findings"])
    assert found.count("it is not one shared folder") == 2
    assert "train.bin is not the same file on every machine" in found
    assert len(examined["links"]) == 2
    assert all(link["bytes_per_sec"] > 1e6 and 0 < link["latency_sec"] < 1 for link in examined["links"])
    assert abs(examined["machines"][1]["clock_offset_sec"]) < 1
    assert [*(one / "runs").iterdir(), *(other / "runs").iterdir()] == []


@pytest.mark.long
def test_machines_that_share_a_folder_and_data_are_healthy_together(tmp_path):
    data = write_data(tmp_path / "data") / "train.bin"
    words = ["--checkpoint_path", str(tmp_path / "runs"), "--train_data_path", str(data), "--json"]
    found = [finding["what"] for finding in json.loads(together(tmp_path, words, words).stdout)["findings"]]
    assert not [what for what in found if "shared" in what or "differ" in what or "same file" in what]
