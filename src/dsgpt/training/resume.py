"""Chooses the checkpoint to resume from: the newest undamaged one, if this run matches its settings."""

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
    """The checkpoint to resume from; None for a fresh start."""
    finished: bool = False
    """The run in the folder has finished: nothing is left to do."""
    refused: tuple[Path, ...] = ()
    """Newer checkpoints that are damaged."""
    messages: tuple[str, ...] = ()
    """Lines for the user; none for an ordinary fresh start."""
    changes: tuple[dict[str, Any], ...] = ()
    """What changed at this resume and at earlier ones, as in ``RunState``."""
    run_id: str | None = None
    """The id of the resumed run."""
    validates_anew: bool = False
    """The validation set changed: earlier validation losses cannot be compared with later ones."""
    same_ranks: bool = True
    """Each rank does what the rank of the same number did in the checkpoint's run, and continues its random stream."""


def plan_resume(config: RunConfig, *, settings: dict[str, Any], problems: Problems) -> Start:
    """Choose the checkpoint to resume from, and compare its settings with this run's; changes nothing.

    Args:
        config: the run.
        settings: those of this run that must match, from ``settings_to_match``.
        problems: receives those that do not match.

    Raises:
        UserError: all checkpoints are damaged, or there were checkpoints and all are missing.
    """
    if store.was_overwritten(config.run_dir):
        return Start(messages=(f"--resume: an --overwrite of {config.run_dir} did not finish; starting fresh",))
    if (config.run_dir / COMPLETE_FILE).exists():
        finished = _plan_finished(config, settings=settings, problems=problems)
        if finished is not None:
            return finished
    checkpoint, refused = _newest_whole(config)
    if checkpoint is None:
        return Start(messages=(f"--resume: {why_nothing_was_saved(config.run_dir)}; starting fresh",))
    manifest, state = parse_manifest(checkpoint), read_run_state(checkpoint)
    moved, same_ranks = _execution_change(config, manifest), _has_same_ranks(config, manifest)
    changes = _compare(config, manifest.fixed, settings, made="the checkpoint", problems=problems)
    if state.step > config.total_steps:
        problems.add(
            f"--resume: {checkpoint} is at step {state.step}, but this run ends after step {config.total_steps}: "
            "raise --max_train_steps or --epochs",
            differs=True,
        )
    validates_anew = any(one["name"] in store.VALIDATED_ON for one in changes)
    return Start(
        checkpoint=checkpoint,
        refused=tuple(path for path, _ in refused),
        messages=(
            *(f"--resume: {path.name} is refused: {reason}" for path, reason in refused),
            *_missing_newest_line(config.run_dir),
            _resuming_line(config, checkpoint, moved, same_ranks=same_ranks),
            *_change_lines(changes, validates_anew=validates_anew),
        ),
        changes=(*map(asdict, state.changes), *({"step": state.step, **one} for one in [*moved, *changes])),
        run_id=manifest.run_id,
        validates_anew=validates_anew,
        same_ranks=same_ranks,
    )


def _change_lines(changes: list[dict[str, Any]], *, validates_anew: bool) -> list[str]:
    lines = [f"--allow_changed: {one['name']} was {one['before']} and is {one['after']}" for one in changes]
    return [*lines, *(["validation set changed: the best validation loss starts anew"] if validates_anew else [])]


def _missing_newest_line(run_dir: Path) -> list[str]:
    """A warning if the newest checkpoint is missing: the run repeats its steps."""
    name = missing_newest(run_dir)
    if not name:
        return []
    latest = run_dir / store.LATEST
    return [f"--resume: {latest} names {name}, which does not exist; continuing from the newest one that does"]


def _has_same_ranks(config: RunConfig, manifest: Manifest) -> bool:
    """Whether each rank does what the rank of the same number did in the checkpoint's run."""
    if manifest.topology is None:
        return False
    same_split = manifest.topology.sizes == asdict(config.topology.sizes)
    same_number = manifest.topology.world_size == config.topology.world_size
    return same_split and same_number and manifest.device == config.device


def _execution_change(config: RunConfig, manifest: Manifest) -> list[dict[str, Any]]:
    """The change of strategy or ranks, if there is one. The figures of the run then come from both."""
    assert manifest.strategy is not None and manifest.topology is not None  # by ``require_resumable``
    before = _strategy_on_ranks(manifest.strategy, manifest.topology.world_size)
    after = _strategy_on_ranks(config.strategy_name, config.topology.world_size)
    return [{"name": EXECUTED_BY, "before": before, "after": after}] if before != after else []


def _resuming_line(config: RunConfig, checkpoint: Path, moved: list[dict[str, Any]], *, same_ranks: bool) -> str:
    """``resuming from run/step-00000200 (zero2 on 4 ranks) as ddp on 2 ranks``, shorter if neither changed."""
    line = f"resuming from {checkpoint}"
    for change in moved:
        line += f" ({change['before']}) as {change['after']}"
    if not same_ranks and config.model.dropout > 0:
        line += "; dropout masks differ from those of an uninterrupted run"
    return line


def _strategy_on_ranks(strategy: str, ranks: int) -> str:
    return f"{strategy} on {ranks} rank{'s' * (ranks != 1)}"


def _plan_finished(config: RunConfig, *, settings: dict[str, Any], problems: Problems) -> Start | None:
    """The start of a run that has finished; None if this run may be longer, or the checkpoints are missing.

    The files of the checkpoint are not verified, because none will be loaded.
    """
    available = [path for path in store.checkpoints(config.run_dir) if _is_readable(path)]
    if not available:
        return None
    manifest = parse_manifest(available[0])
    assert manifest.step is not None  # by ``require_resumable``
    if config.total_steps > manifest.step and "total steps" in _allowed(config):
        return None
    _compare(config, manifest.fixed, settings, made="the finished run", problems=problems)
    return Start(
        checkpoint=available[0],
        finished=True,
        messages=(f"{config.run_dir} holds a finished run; nothing to do",),
    )


def _is_readable(checkpoint: Path) -> bool:
    """Whether the manifest can be read and has all that a resume needs."""
    try:
        require_resumable(checkpoint, parse_manifest(checkpoint))
    except UserError:
        return False
    return True


def _newest_whole(config: RunConfig) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest undamaged checkpoint, and the newer ones with what is wrong with each.

    Raises:
        UserError: there are checkpoints, and all are damaged.
    """
    refused: list[tuple[Path, str]] = []
    run_dir = config.run_dir
    for checkpoint in store.candidates(run_dir):
        try:
            _require_whole(checkpoint, config)
        except UserError as error:
            refused.append((checkpoint, str(error)))
        else:
            return checkpoint, refused
    if refused:
        raise UserError(
            f"--resume: no checkpoint in {run_dir} is intact: restore one, or start again with --overwrite",
            *(f"--resume: {path.name} is refused: {reason}" for path, reason in refused),
        )
    if damaged := store.marked_damaged(run_dir):
        raise UserError(
            f"--resume: {run_dir} holds only damaged checkpoints ({', '.join(path.name for path in damaged)}): "
            "restore one, or start again with --overwrite"
        )
    return None, refused


def _require_whole(checkpoint: Path, config: RunConfig) -> None:
    """Verify every file of a checkpoint that a resume reads.

    Raises:
        UserError: a file is missing, damaged, not named in the manifest, or has unusable contents.
    """
    manifest = read_manifest(checkpoint)
    require_resumable(checkpoint, manifest)
    moments = [MOMENTS] if (checkpoint / MOMENTS).exists() else []
    require_files(checkpoint, manifest, (store.WEIGHTS, store.MODEL, COUNTERS, STATE_FILE, *moments))
    state = read_run_state(checkpoint)
    if (checkpoint.name, manifest.step) != (store.folder_name(state.step), state.step):
        raise UserError(
            f"{checkpoint}: its {STATE_FILE} is of step {state.step} and its manifest of step {manifest.step}: a "
            "file or the folder was renamed"
        )
    StateReader(checkpoint)
    if _has_same_ranks(config, manifest):
        check_random_states(checkpoint, named=manifest.files, ranks=config.topology.world_size, device=config.device)


def _compare(
    config: RunConfig, saved: dict[str, Any], settings: dict[str, Any], *, made: str, problems: Problems
) -> list[dict[str, Any]]:
    """The settings that differ and that ``--allow_changed`` allows; others that differ go to ``problems``."""
    changes = []
    for name, value in settings.items():
        before = saved.get(name)
        if before == value:
            continue
        if name in _allowed(config):
            changes.append({"name": name, "before": before, "after": value})
            continue
        group = next((group for group, names in CHANGEABLE.items() if name in names), None)
        way_out = f"add --allow_changed {group} to continue with the change, " if group else ""
        now, then = clipped(value, width=400), clipped(before, width=400)
        problems.add(
            f"--resume: {name} is {now} but {made} in {config.run_dir} was made with {then}: {way_out}repeat the "
            "original command, or start a new run in another folder",
            differs=True,
        )
    return changes


def _allowed(config: RunConfig) -> set[str]:
    return {name for group in config.options.allow_changed for name in CHANGEABLE[group]}
