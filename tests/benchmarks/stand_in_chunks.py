"""Stands in for the chunks of the proof on GPUs: each ends at once, in one of the ways in which a chunk can end."""

import os
import signal
import time
from pathlib import Path

from dsgpt.benchmarks.gpu_chunks import Found, Proof

STARTS = "starts.txt"
"""Beside the work of all chunks: a line for each start of one."""


def _started(proof: Proof) -> None:
    with (proof.folder.parent / STARTS).open("a", encoding="utf-8") as file:
        file.write(f"{proof.folder.name}\n")


def passes(proof: Proof) -> Found:
    """Nothing is wrong.

    Nothing can be.
    """
    _started(proof)
    return Found(lines=["* a figure is 0.5"], findings=["it is slow"], headline={"mfu of small": 0.4})


def fails(proof: Proof) -> Found:
    """Something is wrong.

    No loss is off.
    """
    _started(proof)
    return Found(lines=[], failures=["a loss is off by 1.0e+00"])


def is_killed(proof: Proof) -> Found:
    """The system kills it.

    It lives.
    """
    _started(proof)
    (proof.folder / "half.json").write_text("{")
    if (proof.folder.parent / "memory").exists():
        return passes(proof)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def lasts(proof: Proof) -> Found:
    """It works until it is ended.

    It ends.
    """
    _started(proof)
    (proof.folder.parent / "lasting.txt").write_text(str(os.getpid()))
    time.sleep(60)
    return Found(lines=[])


def started_chunks(into: Path) -> list[str]:
    """The names of the chunks that were started, in order."""
    return (into / STARTS).read_text(encoding="utf-8").split() if (into / STARTS).exists() else []
