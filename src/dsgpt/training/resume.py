"""What ``--resume`` goes on from: the newest checkpoint that is whole, if this run may go on from it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgpt.checkpointing import store
from dsgpt.checkpointing.run_state import read_run_state
from dsgpt.config import RunConfig
from dsgpt.errors import UserError
from dsgpt.problems import Problems
from dsgpt.telemetry.record import COMPLETE_FILE
from dsgpt.training.facts import CHANGEABLE


@dataclass(frozen=True, kw_only=True)
class Start:
    """How a run begins."""

    checkpoint: Path | None = None
    """Where it goes on from; None for a fresh start."""
    finished: bool = False
    """Nothing is left to do."""
    refused: tuple[Path, ...] = ()
    """Newer checkpoints that are damaged."""
    messages: tuple[str, ...] = ()
    """The same in words; none for an ordinary fresh start."""
    changes: tuple[dict[str, Any], ...] = ()
    """What ``--allow_changed`` let through now and at earlier resumes, as in ``RunState``."""
    run_id: str | None = None
    """Of the run to go on with."""


def plan_resume(config: RunConfig, *, fixed: dict[str, Any], problems: Problems) -> Start:
    """Choose the checkpoint to go on from, and compare what made it with this run; changes nothing.

    Args:
        config: the run.
        fixed: what must not change without ``--allow_changed``, of this run.
        problems: takes what did.

    Raises:
        UserError: there are checkpoints, but none is whole.
    """
    if (config.run_dir / COMPLETE_FILE).exists():
        finished = _plan_finished(config, fixed=fixed, problems=problems)
        if finished is not None:
            return finished
    checkpoint, refused = _newest_whole(config.run_dir)
    if checkpoint is None:
        return Start(messages=(f"--resume: {config.run_dir} holds no checkpoint yet; starting fresh",))
    manifest, state = store.parse_manifest(checkpoint), read_run_state(checkpoint)
    changes = _compare(config, store.fixed_in(manifest, checkpoint), fixed, made="the checkpoint", problems=problems)
    if state.step > config.total_steps:
        problems.add(
            f"--resume: {checkpoint} is {state.step} steps on, and this run ends after {config.total_steps}: give "
            "more --max_train_steps or --epochs"
        )
    return Start(
        checkpoint=checkpoint,
        refused=tuple(path for path, _ in refused),
        messages=(
            *(f"--resume: {path.name} is refused: {reason}" for path, reason in refused),
            f"resuming from {checkpoint}",
            *(f"--allow_changed: {one['name']} was {one['before']} and is {one['after']}" for one in changes),
        ),
        changes=(*state.changes, *({"step": state.step, **one} for one in changes)),
        run_id=manifest.get("run_id"),
    )


def _plan_finished(config: RunConfig, *, fixed: dict[str, Any], problems: Problems) -> Start | None:
    """Nothing to do, unless this run was allowed to be longer than the finished one; then None.

    Nothing will be loaded, so the files of the checkpoint are not verified.
    """
    available = store.checkpoints(config.run_dir)
    if available:
        manifest = store.parse_manifest(available[0])
        saved = store.fixed_in(manifest, available[0])
        longer = config.total_steps > manifest.get("step", config.total_steps)
        if longer and "total steps" in _allowed(config):
            return None
        _compare(config, saved, fixed, made="the finished run", problems=problems)
    return Start(
        checkpoint=available[0] if available else None,
        finished=True,
        messages=(f"{config.run_dir} holds a finished run; nothing to do",),
    )


def _newest_whole(run_dir: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest checkpoint whose files are all as they were written, and the newer ones with what is wrong.

    Raises:
        UserError: there are some, and none is whole.
    """
    refused = []
    for checkpoint in store.candidates(run_dir):
        try:
            store.fixed_in(store.read_manifest(checkpoint), checkpoint)
            read_run_state(checkpoint)
        except UserError as error:
            refused.append((checkpoint, str(error)))
        else:
            return checkpoint, refused
    if refused:
        raise UserError(
            f"--resume: none of the checkpoints in {run_dir} is whole: bring one back, or start again with --overwrite",
            *(f"--resume: {path.name} is refused: {reason}" for path, reason in refused),
        )
    return None, refused


def _compare(
    config: RunConfig, saved: dict[str, Any], fixed: dict[str, Any], *, made: str, problems: Problems
) -> list[dict[str, Any]]:
    """What differs and may; what differs and may not goes to ``problems``."""
    changes = []
    for name, value in fixed.items():
        before = saved.get(name)
        if before == value:
            continue
        if name in _allowed(config):
            changes.append({"name": name, "before": before, "after": value})
            continue
        group = next((group for group, names in CHANGEABLE.items() if name in names), None)
        way_out = f"add --allow_changed {group} to go on all the same, " if group else ""
        problems.add(
            f"--resume: {name} is {value} but {made} in {config.run_dir} was made with {before}: {way_out}repeat the "
            "original command, or start a new run in another folder"
        )
    return changes


def _allowed(config: RunConfig) -> set[str]:
    return {name for group in config.options.allow_changed for name in CHANGEABLE[group]}
