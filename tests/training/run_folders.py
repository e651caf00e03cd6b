"""Trainings in this process, and what is in their folders."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from small_run import command_line

from dsgpt.training.command import train as train_here

# 12 steps over epochs of 5, saved inside the epochs
LONG = {"max_train_steps": 12, "save_every": 3, "keep_checkpoints": 9, "eval_every": 4, "steps_per_print": 5}


def record(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "training_metrics.json").read_text())


def resume(run_dir: Path, folder: Path, **changes: Any) -> int:
    """Resume the run in ``run_dir``, which was started with the data and recipe in ``folder``."""
    return train_here(command_line(folder, **LONG | {"checkpoint_path": run_dir, "resume": True} | changes))


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]


def checkpoints(run_dir: Path) -> list[int]:
    """The steps that have a folder named like a checkpoint, in order."""
    return sorted(int(path.name[5:]) for path in run_dir.glob("step-*") if path.name[5:].isdecimal())


def rewrite(checkpoint: Path, file: Path, data: bytes) -> None:
    """Replace a file of a checkpoint, and its size and hash in the manifest."""
    file.write_bytes(data)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    facts = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest["files"][file.relative_to(checkpoint).as_posix()] = facts
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def damage(file: Path) -> None:
    """Flip one bit in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""

    @classmethod
    def now(cls, *args: Any, **kwargs: Any) -> None:
        raise cls
