"""Copies of weights in huge pages."""

import re
from pathlib import Path

import pytest
import torch

from dsgpt.machine.device import CHUNK_BYTES, HUGE_PAGE_BYTES, HugePages, huge_page_setting

SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")


def flags_of(address: int) -> str:
    """The flags of the memory area at ``address``, of Linux: ``rd wr mr mw me ac hg``."""
    for area in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]:
        start, end = (int(word, 16) for word in area.split(maxsplit=1)[0].split("-"))
        if start <= address < end:
            return re.search(r"VmFlags: (.*)", area)[1]
    raise ValueError(f"nothing is at {address:x}")


def test_copies_are_contiguous_equal_and_apart_also_when_their_owner_is_gone():
    memory, weights = HugePages(), [torch.randn(rows, 301) for rows in (7, 3, 2000, CHUNK_BYTES // 301 // 4 + 1, 5)]
    copies = [memory.copy(weight.t()) for weight in weights]
    del memory
    for copy, weight in zip(copies, weights, strict=True):
        assert copy.is_contiguous()
        assert copy.data_ptr() % 64 == 0
        assert torch.equal(copy, weight.t())
    for number, copy in enumerate(copies):
        copy.fill_(number)
    assert all((copy == number).all() for number, copy in enumerate(copies))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64])
def test_any_type_of_number_is_copied(dtype):
    weight = torch.arange(-60, 60).to(dtype).view(8, 15)
    copy = HugePages().copy(weight)
    assert copy.dtype == dtype
    assert torch.equal(copy, weight)


@pytest.mark.skipif("VmFlags" not in Path("/proc/self/smaps").read_text(), reason="this kernel does not show flags")
def test_the_system_is_asked_for_huge_pages_from_a_boundary_on():
    copy = HugePages().copy(torch.ones(HUGE_PAGE_BYTES))
    assert copy.data_ptr() % HUGE_PAGE_BYTES == 0
    assert ("hg" in flags_of(copy.data_ptr()).split()) == SYSTEM.is_dir()


@pytest.mark.parametrize(
    ("text", "setting"),
    [("always [madvise] never\n", "madvise"), ("[always] madvise never\n", "always"), (None, None)],
)
def test_the_setting_of_the_system(tmp_path, monkeypatch, text, setting):
    monkeypatch.setattr("dsgpt.machine.device.SETTING", tmp_path / "enabled")
    if text:
        (tmp_path / "enabled").write_text(text)
    assert huge_page_setting() == setting
