"""Memory in pages of 2 MiB, for weights that are read again and again.

A processor remembers where few pages are. Weights of hundreds of megabytes in pages of 4 KiB make it look up an
address for almost every page that it reads. Linux gives huge pages to every process, or only to those that ask
(``/sys/kernel/mm/transparent_hugepage/enabled``); this asks.
"""

import mmap
import re
import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HUGE_PAGE_BYTES = 2 << 20
CHUNK_BYTES = 64 << 20
"""What is asked for at a time; the system gives memory when it is written."""
_BETWEEN = 64
"""Tensors start at multiples of it, as PyTorch's own do."""


class HugePages:
    """Copies tensors one behind the other into huge pages, so that small ones have a share of them, too.

    A chunk of the memory is free again when none of its copies is left, the newest with this object, too.
    """

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of ``tensor``: on a CPU in huge pages where there are any, elsewhere on its device."""
        if tensor.device.type != "cpu" or sys.platform != "linux":
            return tensor.clone(memory_format=torch.contiguous_format)
        if tensor.nbytes > len(self._room):
            self._room = _room_for(max(tensor.nbytes, CHUNK_BYTES))
        copy = self._room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._room = self._room[-(-tensor.nbytes // _BETWEEN) * _BETWEEN :]
        return copy.copy_(tensor)


def huge_page_setting() -> str | None:
    """Who gets huge pages here: ``always``, ``madvise`` (those who ask) or ``never``; None if the system has none."""
    if not SETTING.is_file():
        return None
    chosen = re.search(r"\[(\w+)\]", SETTING.read_text(encoding="utf-8"))
    return chosen and chosen.group(1)


def _room_for(size: int) -> Tensor:
    """At least ``size`` zeros, from a boundary of huge pages to another."""
    size = -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel that was built without huge pages: ordinary pages do
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + size]
