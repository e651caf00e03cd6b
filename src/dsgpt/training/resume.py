"""Which checkpoint a run resumes from, and what an earlier process left."""

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dsgpt.checkpoints import store
from dsgpt.checkpoints.manifest import (
    STATE_FILE,
    Manifest,
    RunState,
    Segment,
    covers,
    highest_peaks,
    parse_manifest,
    read_manifest,
    read_run_state,
    require_files,
    require_resumable,
)
from dsgpt.checkpoints.training_state import COUNTERS, MOMENTS, StateReader, check_random_states
from dsgpt.common.errors import Problems, UserError
from dsgpt.common.json_files import Count, Finite, JsonError, Seconds, clipped, clipped_text, read_as
from dsgpt.common.text import counted
from dsgpt.config.run_config import RunConfig
from dsgpt.machine.probe import LoadOfOthers
from dsgpt.record.schema import COMPLETE_FILE, RECORD_FILE, STEPS_FILE
from dsgpt.telemetry.meter import StepMeter, throughput
from dsgpt.training.run_description import CHANGEABLE, EXECUTED_BY

# The segments of a run, one for each process that trained a part of it, and the description that all of them share.

NEVER_CHANGES = frozenset({"precision"})
"""Fields of a segment that no resume may change (``settings_to_match``): unrecorded segments had the same values."""


class Segments:
    """The earlier segments, up to the checkpoint that this process resumed from, and the segment of this process.

    Args:
        description: of the run; empty on all ranks but the main one, because the others keep no segments.
        done: optimizer steps of earlier processes.
    """

    def __init__(self, description: dict[str, Any], *, done: int) -> None:
        self._description = description
        self._done = done
        several = description and description["hardware"]["local_world_size"] > 1
        self._load = LoadOfOthers(ranks=bool(several)) if description else None
        self._earlier: list[Segment] = []
        self.all: list[Segment] = []
        """As of the last ``note``."""

    def resume(self, state: RunState) -> None:
        """Continue the segments of a checkpoint. Old checkpoints have none: segments of their steps stay unknown."""
        if state.segments and state.segments[-1].last_step == state.step:
            self._earlier = list(state.segments)

    def note(self, meter: StepMeter, peaks: dict[str, int | None]) -> None:
        """Update the segment of this process."""
        if self._load is None:
            return
        measured = {
            "first_step": self._done + 1,
            "last_step": max(meter.run.steps, self._done),
            "train_time_sec": meter.process.train_sec,
            "wall_time_sec": meter.process_wall_seconds(),
            "mean_tokens_per_sec_global": throughput(meter.process),
            **peaks,
            **self._load.figures(),
        }
        known = {**self._description["training_config"], **self._description, **measured}
        this = Segment(**{field.name: known[field.name] for field in fields(Segment)})
        self.all = [*self._earlier, this]

    def peaks(self, *, since_step: int = 1) -> dict[str, Any]:
        """The memory keys of the summary, or of an epoch that began with ``since_step``."""
        last = self.all[-1].last_step if self.all else 0
        return highest_peaks(self.all, first_step=since_step, last_step=last)

    def common_description(self) -> dict[str, Any]:
        """The description of the run, with None where the segments differ or not all of them are known."""
        if not self.all:
            return self._description
        segments = [asdict(segment) for segment in self.all]
        if not covers(self.all, first_step=1, last_step=self.all[-1].last_step):
            segments.append({})
        top = {key: _common(self._description[key], segments, key) for key in ("git_commit", "host")}
        blocks = {
            block: {key: _common(value, segments, block, key) for key, value in self._description[block].items()}
            for block in ("env", "hardware")
        }
        config = {
            key: _common(value, segments, key) if key in segments[0].keys() - NEVER_CHANGES else value
            for key, value in self._description["training_config"].items()
        }
        return {**self._description, **top, **blocks, "training_config": config}


def _common(value: Any, segments: list[dict[str, Any]], *place: str) -> Any:
    """``value``, that of the last segment, if all segments have it at ``place``, else None."""
    *blocks, key = place
    for segment in segments:
        for block in blocks:
            segment = segment.get(block, {})  # noqa: PLW2901 - the place is inside it
        if segment.get(key) != value:
            return None
    return value


# What an earlier process left in a run folder besides checkpoints: its record, its step lines, the file ``latest``.

MAX_RECORD_BYTES = 64 << 20
"""The record has an entry for every save, so the record of a very long run may be large."""


@dataclass(frozen=True, kw_only=True)
class Save:
    """An entry of the record's ``saves``."""

    step: Count
    mode: str
    save_stall_sec: Seconds
    save_total_sec: Seconds
    bytes: Count


@dataclass(frozen=True, kw_only=True)
class EarlierSummary:
    """The keys of the record's ``summary`` that a resume needs."""

    failed_saves: Count | None = None
    optimizer_steps: Count | None = None
    total_wall_time_sec: Seconds | None = None


@dataclass(frozen=True, kw_only=True)
class EarlierPlan:
    """The key of the record's ``plan`` that a resume needs."""

    spent_usd: Finite | None = None


@dataclass(frozen=True, kw_only=True)
class EarlierRecord:
    """The keys of ``training_metrics.json`` that a resume needs; all others are computed again."""

    schema_version: Any = None
    saves: list[Save] | None = None
    """None in records of older versions, which lack the key."""
    summary: EarlierSummary = field(default_factory=EarlierSummary)
    plan: EarlierPlan | None = None


def read_earlier_record(run_dir: Path) -> EarlierRecord | None:
    """The record in the folder; None where there is none.

    Raises:
        JsonError: the file is not a record.
    """
    path = run_dir / RECORD_FILE
    if not path.exists():
        return None
    return read_as(path, EarlierRecord, unknown_keys=True, max_bytes=MAX_RECORD_BYTES)


def why_nothing_was_saved(run_dir: Path) -> str:
    """The message for a folder that may be started fresh, because its run was killed before the first save.

    Raises:
        UserError: there were checkpoints, or the record cannot show that there were none, because it is damaged, old,
            or missing next to step lines. The checkpoints may have been moved, or their disk is not mounted; a fresh
            start would remove the rest of the run.
    """
    for name in (store.LATEST, store.BEST):
        if named := named_by(run_dir / name):
            raise UserError(_lost(run_dir, f"{name} names {named}, which does not exist"))
    try:
        record = read_earlier_record(run_dir)
    except JsonError as error:
        raise UserError(_lost(run_dir, f"its {RECORD_FILE} is damaged ({error})")) from error
    if record is None:
        lines = run_dir / STEPS_FILE
        if lines.is_file() and lines.stat().st_size:
            raise UserError(_lost(run_dir, f"it has {STEPS_FILE} but no {RECORD_FILE} that lists what was saved"))
    elif record.saves is None:
        raise UserError(_lost(run_dir, f"its {RECORD_FILE} does not list what was saved"))
    elif record.saves:
        steps = ", ".join(store.folder_name(save.step) for save in record.saves[-3:])
        was = "was" if len(record.saves) == 1 else "were"
        raise UserError(_lost(run_dir, f"its {RECORD_FILE} says that {steps} {was} saved"))
    return f"{run_dir} holds no checkpoint yet"


def named_by(path: Path) -> str:
    """The first line of the file ``latest`` or ``best``; empty where there is no such file."""
    try:
        with path.open("rb") as file:
            return clipped_text(file.read(200).decode("utf-8", errors="replace")) or "(nothing)"
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"(unreadable: {error.strerror})"


def _lost(run_dir: Path, why: str) -> str:
    return (
        f"--resume: {run_dir} holds a run but none of its checkpoints: {why}: bring them back (were they moved, or is "
        "their disk not mounted?), or start again with --overwrite"
    )


# Chooses the checkpoint to resume from: the newest undamaged one, if this run matches its settings.


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
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


def plan_resume(config: RunConfig, *, settings: dict[str, Any], problems: Problems) -> ResumePoint:
    """Choose the checkpoint to resume from, and compare its settings with this run's; changes nothing.

    Args:
        config: the run.
        settings: those of this run that must match, from ``settings_to_match``.
        problems: receives those that do not match.

    Raises:
        UserError: all checkpoints are damaged, or there were checkpoints and all are missing.
    """
    if store.was_overwritten(config.run_dir):
        return ResumePoint(messages=(f"--resume: an --overwrite of {config.run_dir} did not finish; starting fresh",))
    if (config.run_dir / COMPLETE_FILE).exists():
        finished = _plan_finished(config, settings=settings, problems=problems)
        if finished is not None:
            return finished
    checkpoint, refused = _newest_whole(config)
    if checkpoint is None:
        return ResumePoint(messages=(f"--resume: {why_nothing_was_saved(config.run_dir)}; starting fresh",))
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
    return ResumePoint(
        checkpoint=checkpoint,
        refused=tuple(path for path, _ in refused),
        messages=(
            *(f"--resume: {path.name} is refused: {reason}" for path, reason in refused),
            *_missing_newest_line(config.run_dir),
            _resuming_line(config, checkpoint, moved, same_ranks=same_ranks),
            *(f"--allow_changed: {one['name']} was {one['before']} and is {one['after']}" for one in changes),
            *(["validation set changed: the best validation loss starts anew"] if validates_anew else []),
        ),
        changes=(*map(asdict, state.changes), *({"step": state.step, **one} for one in [*moved, *changes])),
        run_id=manifest.run_id,
        validates_anew=validates_anew,
        same_ranks=same_ranks,
    )


def _missing_newest_line(run_dir: Path) -> list[str]:
    """A warning if the newest checkpoint is missing: the run repeats its steps."""
    latest = run_dir / store.LATEST
    name = named_by(latest)
    if not name or (store.STEP_FOLDER.fullmatch(name) and (run_dir / name).is_dir()):
        return []
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
    return f"{strategy} on {counted(ranks, 'rank')}"


def _plan_finished(config: RunConfig, *, settings: dict[str, Any], problems: Problems) -> ResumePoint | None:
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
    return ResumePoint(
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
