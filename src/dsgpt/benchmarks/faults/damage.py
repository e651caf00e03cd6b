"""Damage to the files of a killed run, and what ``--resume`` prints and does about it."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dsgpt.benchmarks.faults.outcome import Outcome, all_wrong
from dsgpt.benchmarks.faults.plan import SAVE_EVERY, STEPS
from dsgpt.benchmarks.faults.runs import Runs
from dsgpt.checkpointing import store
from dsgpt.checkpointing.manifest import MANIFEST
from dsgpt.checkpointing.training_state import MOMENTS

RUN = "zero1"
NEWEST = STEPS - SAVE_EVERY
"""Step of the newest checkpoint of a run that was rolled back; the one before it is ``SAVE_EVERY`` older."""


def _truncate(checkpoint: Path) -> None:
    file = checkpoint / MOMENTS
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def _flip(checkpoint: Path) -> None:
    file = checkpoint / store.WEIGHTS
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _delete(checkpoint: Path) -> None:
    (checkpoint / store.WEIGHTS).unlink()


def _delete_manifest(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()


def _delete_latest(checkpoint: Path) -> None:
    (checkpoint.parent / store.LATEST).unlink()


def _leave_partial(checkpoint: Path) -> None:
    shutil.copytree(checkpoint, store.partial_folder(checkpoint.parent, STEPS - 1))


def _tear_log(checkpoint: Path) -> None:
    with (checkpoint.parent / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 23, "los')


@dataclass(frozen=True, kw_only=True)
class Damage:
    """Damage to the newest checkpoint, or to a file next to it."""

    name: str
    harm: Callable[[Path], None]
    resumed_from: int
    """The step that the run must resume from."""
    words: str = "resuming from"
    """What the run must print."""


BEFORE = NEWEST - SAVE_EVERY
DAMAGES = (
    Damage(name="truncated shard", harm=_truncate, resumed_from=BEFORE, words=f"{MOMENTS}: is damaged: it has"),
    Damage(name="flipped bit", harm=_flip, resumed_from=BEFORE, words=f"{store.WEIGHTS}: is damaged: its sha256"),
    Damage(
        name="deleted shard", harm=_delete, resumed_from=BEFORE, words=f"{store.WEIGHTS}: is damaged: it is missing"
    ),
    Damage(name="deleted manifest", harm=_delete_manifest, resumed_from=BEFORE, words="the checkpoint is incomplete"),
    Damage(name="deleted `latest`", harm=_delete_latest, resumed_from=NEWEST),
    Damage(name="stale temporary folder", harm=_leave_partial, resumed_from=NEWEST),
    Damage(name="torn log", harm=_tear_log, resumed_from=NEWEST),
)


def try_damage(runs: Runs, plan: Damage) -> Outcome:
    """Damage a rolled-back copy of the undisturbed run, resume it and compare.

    Raises:
        Missed: the run did not end.
    """
    started = time.perf_counter()
    run_dir = runs.rolled_back(RUN, plan.name)
    plan.harm(run_dir / store.folder_name(NEWEST))
    resumed = runs.resume(RUN, run_dir)
    lines = [line for line in resumed.output.splitlines() if "is refused" in line or "resuming from" in line]
    wrong = all_wrong(
        (resumed.resumed_from != plan.resumed_from, f"it resumed from step {resumed.resumed_from}"),
        (plan.words not in resumed.output, f"it did not print: {plan.words}"),
        (bool(list(run_dir.glob(".partial-*"))), "temporary folders are left"),
        (bool(resumed.wrong), resumed.wrong),
    )
    return Outcome(
        kind="damage",
        name=f"{RUN}: {plan.name}",
        wrong=wrong,
        seconds=time.perf_counter() - started,
        measured={"resumed_from": resumed.resumed_from},
        said=tuple(line.replace(f"{run_dir.parent}/", "") for line in lines),
    )
