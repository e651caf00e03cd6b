"""What ``--resume`` goes on from: the newest checkpoint that is whole, if this run may go on from it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsgpt.checkpointing import store
from dsgpt.checkpointing.manifest import Manifest, parse_manifest, read_manifest, require_files, require_resumable
from dsgpt.checkpointing.random_state import check_random_states
from dsgpt.checkpointing.run_state import STATE_FILE, read_run_state
from dsgpt.checkpointing.training_state import COUNTERS, MOMENTS, StateReader
from dsgpt.common.errors import UserError
from dsgpt.common.json_files import clipped
from dsgpt.common.problems import Problems
from dsgpt.config.run_config import RunConfig
from dsgpt.telemetry.record import COMPLETE_FILE
from dsgpt.training.earlier_record import missing_newest, why_nothing_was_saved
from dsgpt.training.run_description import CHANGEABLE, EXECUTED_BY


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
    """What changed now and at earlier resumes, as in ``RunState``."""
    run_id: str | None = None
    """Of the run to go on with."""
    validates_anew: bool = False
    """On something else than the checkpoint's run did: its validation losses say nothing about this one's."""
    same_ranks: bool = True
    """The checkpoint was made by as many ranks, each with the same part in the work, whose random streams go on."""


def plan_resume(config: RunConfig, *, fixed: dict[str, Any], problems: Problems) -> Start:
    """Choose the checkpoint to go on from, and compare what made it with this run; changes nothing.

    Args:
        config: the run.
        fixed: what must not change without ``--allow_changed``, of this run.
        problems: takes what did.

    Raises:
        UserError: there are checkpoints, but none is whole; or there were some, and they are gone.
    """
    if store.was_overwritten(config.run_dir):
        return Start(messages=(f"--resume: an --overwrite of {config.run_dir} was cut off; starting fresh",))
    if (config.run_dir / COMPLETE_FILE).exists():
        finished = _plan_finished(config, fixed=fixed, problems=problems)
        if finished is not None:
            return finished
    checkpoint, refused = _newest_whole(config)
    if checkpoint is None:
        return Start(messages=(f"--resume: {why_nothing_was_saved(config.run_dir)}; starting fresh",))
    manifest, state = parse_manifest(checkpoint), read_run_state(checkpoint)
    moved, same_ranks = _moved(config, manifest), _has_same_ranks(config, manifest)
    changes = _compare(config, manifest.fixed, fixed, made="the checkpoint", problems=problems)
    if state.step > config.total_steps:
        problems.add(
            f"--resume: {checkpoint} is {state.step} steps on, and this run ends after {config.total_steps}: give "
            "more --max_train_steps or --epochs",
            differs=True,
        )
    validates_anew = any(one["name"] in store.VALIDATED_ON for one in changes)
    return Start(
        checkpoint=checkpoint,
        refused=tuple(path for path, _ in refused),
        messages=(
            *(f"--resume: {path.name} is refused: {reason}" for path, reason in refused),
            *_newest_is_gone(config.run_dir),
            _taken_up(config, checkpoint, moved, same_ranks=same_ranks),
            *(f"--allow_changed: {one['name']} was {one['before']} and is {one['after']}" for one in changes),
            *(["validation changed: the best validation loss begins anew"] if validates_anew else []),
        ),
        changes=(*map(asdict, state.changes), *({"step": state.step, **one} for one in [*moved, *changes])),
        run_id=manifest.run_id,
        validates_anew=validates_anew,
        same_ranks=same_ranks,
    )


def _newest_is_gone(run_dir: Path) -> list[str]:
    """The warning that the newest checkpoint is not there, so that its steps are taken again."""
    name = missing_newest(run_dir)
    if not name:
        return []
    return [f"--resume: {run_dir / store.LATEST} names {name}, which is not there; the newest that is there is taken"]


def _has_same_ranks(config: RunConfig, manifest: Manifest) -> bool:
    """Whether every rank of this run has the part in the work that the rank of its number had in the checkpoint's."""
    same_split = manifest.topology.sizes == asdict(config.topology.sizes)
    same_number = manifest.topology.world_size == config.topology.world_size
    return same_split and same_number and manifest.device == config.device


def _moved(config: RunConfig, manifest: Manifest) -> list[dict[str, Any]]:
    """The change of who executes the run, if it is one; its figures are then those of both."""
    before = _by(manifest.strategy, manifest.topology.world_size)
    after = _by(config.strategy_name, config.topology.world_size)
    return [{"name": EXECUTED_BY, "before": before, "after": after}] if before != after else []


def _taken_up(config: RunConfig, checkpoint: Path, moved: list[dict[str, Any]], *, same_ranks: bool) -> str:
    """``resuming from run/step-00000200 (zero2 on 4 ranks) as ddp on 2 ranks``, in short where nothing changed."""
    line = f"resuming from {checkpoint}"
    for change in moved:
        line += f" ({change['before']}) as {change['after']}"
    if not same_ranks and config.model.dropout > 0:
        line += "; dropout draws other masks than it would have there"
    return line


def _by(strategy: str, ranks: int) -> str:
    return f"{strategy} on {ranks} rank{'s' * (ranks != 1)}"


def _plan_finished(config: RunConfig, *, fixed: dict[str, Any], problems: Problems) -> Start | None:
    """Nothing to do; None where this run may be longer than the finished one, or its checkpoints are gone.

    Nothing will be loaded, so the files of the checkpoint are not verified.
    """
    available = [path for path in store.checkpoints(config.run_dir) if _is_readable(path)]
    if not available:
        return None
    manifest = parse_manifest(available[0])
    if config.total_steps > manifest.step and "total steps" in _allowed(config):
        return None
    _compare(config, manifest.fixed, fixed, made="the finished run", problems=problems)
    return Start(
        checkpoint=available[0],
        finished=True,
        messages=(f"{config.run_dir} holds a finished run; nothing to do",),
    )


def _is_readable(checkpoint: Path) -> bool:
    """Whether the manifest says what made the checkpoint."""
    try:
        require_resumable(checkpoint, parse_manifest(checkpoint))
    except UserError:
        return False
    return True


def _newest_whole(config: RunConfig) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest checkpoint whose files are all as they were written, and the newer ones with what is wrong.

    Raises:
        UserError: there are some, and none is whole.
    """
    refused, run_dir = [], config.run_dir
    for checkpoint in store.candidates(run_dir):
        try:
            _require_whole(checkpoint, config)
        except UserError as error:
            refused.append((checkpoint, str(error)))
        else:
            return checkpoint, refused
    if refused:
        raise UserError(
            f"--resume: none of the checkpoints in {run_dir} is whole: bring one back, or start again with --overwrite",
            *(f"--resume: {path.name} is refused: {reason}" for path, reason in refused),
        )
    if damaged := store.marked_damaged(run_dir):
        raise UserError(
            f"--resume: {run_dir} holds no checkpoint but {', '.join(path.name for path in damaged)}, refused before: "
            "bring one back, or start again with --overwrite"
        )
    return None, refused


def _require_whole(checkpoint: Path, config: RunConfig) -> None:
    """Read and compare every file of a checkpoint that a resume reads.

    Raises:
        UserError: one is missing, damaged, not named in the manifest or not what it must be.
    """
    manifest = read_manifest(checkpoint)
    require_resumable(checkpoint, manifest)
    moments = [MOMENTS] if (checkpoint / MOMENTS).exists() else []
    require_files(checkpoint, manifest, (store.WEIGHTS, store.MODEL, COUNTERS, STATE_FILE, *moments))
    state = read_run_state(checkpoint)
    if (checkpoint.name, manifest.step) != (store.folder_name(state.step), state.step):
        raise UserError(
            f"{checkpoint}: is of step {state.step}, and its manifest says {manifest.step}: one was renamed"
        )
    StateReader(checkpoint)
    if _has_same_ranks(config, manifest):
        check_random_states(checkpoint, named=manifest.files, ranks=config.topology.world_size, device=config.device)


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
        now, then = clipped(value, width=400), clipped(before, width=400)
        problems.add(
            f"--resume: {name} is {now} but {made} in {config.run_dir} was made with {then}: {way_out}repeat the "
            "original command, or start a new run in another folder",
            differs=True,
        )
    return changes


def _allowed(config: RunConfig) -> set[str]:
    return {name for group in config.options.allow_changed for name in CHANGEABLE[group]}
