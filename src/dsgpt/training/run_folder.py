"""The run folder: whether it holds a run, what an earlier process left, and from which checkpoint a run resumes."""

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dsgpt.checkpoints import store
from dsgpt.checkpoints.manifest import STATE_FILE, Goodput, Manifest, parse_manifest, read_manifest, read_run_state
from dsgpt.checkpoints.training_state import COUNTERS, StateReader, check_random_states, state_files
from dsgpt.common.errors import Problems, UserError
from dsgpt.common.files import is_regular_file, remove, sync_directory
from dsgpt.common.json_files import Count, Finite, JsonError, Seconds, clipped, clipped_text, read_as, read_object
from dsgpt.common.text import counted
from dsgpt.config.run_config import RunConfig
from dsgpt.record.schema import COMPLETE_FILE, LOG_FILE, MACHINE_FILE, RECORD_FILE, STEPS_FILE, read_steps
from dsgpt.record.work import EXECUTED_BY
from dsgpt.telemetry.profiles import COMMUNICATION_FILE, PROFILE_FOLDER, is_profile_folder

# What an earlier process left in a run folder besides checkpoints: its record, its step lines, the file ``latest``.

MAX_RECORD_BYTES = 64 << 20
"""The record has an entry for every save, so the record of a very long run may be large."""


@dataclass(frozen=True, kw_only=True)
class Save:
    """An entry of the record's ``saves``."""

    step: Count
    mode: str
    """``sync`` or ``async``."""
    save_stall_sec: Seconds
    """Seconds that training waited for it."""
    save_total_sec: Seconds
    """Seconds from its beginning until it was published."""
    bytes: Count
    """Bytes of its files."""


@dataclass(frozen=True, kw_only=True)
class EarlierSummary:
    """The keys of the record's ``summary`` that a resume needs."""

    failed_saves: Count | None = None
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
    """Saves of the run; None in records of older versions, which lack the key."""
    summary: EarlierSummary = field(default_factory=EarlierSummary)
    plan: EarlierPlan | None = None
    goodput: Goodput | None = None


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
    why, cause = "", None
    try:
        record = read_earlier_record(run_dir)
    except JsonError as error:
        why, cause = f"its {RECORD_FILE} is damaged ({error})", error
    else:
        if record is None:
            lines = run_dir / STEPS_FILE
            if lines.is_file() and lines.stat().st_size:
                why = f"it has {STEPS_FILE} but no {RECORD_FILE} that lists what was saved"
        elif record.saves is None:
            why = f"its {RECORD_FILE} does not list what was saved"
        elif record.saves:
            steps = ", ".join(store.folder_name(save.step) for save in record.saves[-3:])
            why = f"its {RECORD_FILE} says that {steps} {'was' if len(record.saves) == 1 else 'were'} saved"
    for name in (store.BEST, store.LATEST):
        if named := named_by(run_dir / name):
            why = f"{name} names {named}, which does not exist"
    if why:
        cure = "bring them back (were they moved, or is their disk not mounted?), or start again with --overwrite"
        raise UserError(f"--resume: {run_dir} holds a run but none of its checkpoints: {why}: {cure}") from cause
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


# Chooses the checkpoint to resume from: the newest undamaged one, if this run matches its settings.

CHANGEABLE = {
    "data": ("train data", "validation data", "validation windows"),
    "recipe": ("optimizer", "schedule", "gradient clipping", "loss scaling", "total steps"),
}
"""Names for ``--allow_changed``, and the members of ``settings_to_match`` that may then differ.

Model, seed, sequence length and global batch never change, because they define the samples of a step, nor do the
optimizer's type and the precision, because they define its state. Launcher, strategy, ranks, micro batch and
accumulation may always change.
"""

_NUMBERED = re.compile(r"-(\d{5,})\.safetensors$")
"""Matches the name of a file that one of several ranks wrote."""


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The point at which a run begins: a new run, or a checkpoint."""

    checkpoint: Path | None = None
    """The checkpoint to resume from; None for a fresh start."""
    finished: bool = False
    """The run in the folder has finished: nothing is left to do."""
    refused: tuple[Path, ...] = ()
    """Newer checkpoints that are damaged."""
    messages: tuple[str, ...] = ()
    """Lines for the user; none for an ordinary fresh start."""
    changes: tuple[dict[str, Any], ...] = ()
    """Changes at this resume and at earlier ones, as in ``RunState``."""
    run_id: str | None = None
    """The id of the resumed run."""
    validates_anew: bool = False
    """The validation set changed: earlier validation losses cannot be compared with later ones."""
    same_ranks: bool = True
    """Each rank does what the rank of the same number did in the checkpoint's run, and continues its random stream."""


def plan_resume(
    config: RunConfig, *, settings: dict[str, Any], problems: Problems, damage: Callable[[str], str] | None = None
) -> ResumePoint:
    """Choose the checkpoint to resume from, and compare its settings with this run's; changes nothing.

    Args:
        config: the run.
        settings: those of this run that must match, from ``settings_to_match``.
        problems: receives those that do not match.
        damage: what is wrong with a checkpoint, by its name; empty if nothing is. By default this process alone looks.

    Raises:
        UserError: all checkpoints are damaged, or there were checkpoints and all are missing.
    """
    if store.was_overwritten(config.run_dir):
        return ResumePoint(messages=(f"--resume: an --overwrite of {config.run_dir} did not finish; starting fresh",))
    if (config.run_dir / COMPLETE_FILE).exists():
        finished = _plan_finished(config, settings=settings, problems=problems)
        if finished is not None:
            return finished
    checkpoint, refused = _newest_whole(config.run_dir, damage or partial(damage_in, config))
    if checkpoint is None:
        return ResumePoint(messages=(f"--resume: {why_nothing_was_saved(config.run_dir)}; starting fresh",))
    manifest, state = parse_manifest(checkpoint), read_run_state(checkpoint)
    assert manifest.topology is not None  # by ``require_resumable``
    before = f"{manifest.strategy} on {counted(manifest.topology.world_size, 'rank')}"
    after = f"{config.strategy_name} on {counted(config.topology.world_size, 'rank')}"
    moved = [{"name": EXECUTED_BY, "before": before, "after": after}] if before != after else []
    same_ranks = _has_same_ranks(config, manifest)
    resuming = f"resuming from {checkpoint}{f' ({before}) as {after}' if moved else ''}"
    if not same_ranks and config.model.dropout > 0:
        resuming += "; dropout masks differ from those of an uninterrupted run"
    latest, missing = named_by(config.run_dir / store.LATEST), []
    is_name = store.STEP_FOLDER.fullmatch(latest) is not None
    older = is_name and store.step_of(latest) < state.step  # retention had removed it before it wrote the file
    if latest and not older and not (is_name and (config.run_dir / latest).is_dir()):
        named = f"{config.run_dir / store.LATEST} names {latest}, which does not exist"
        missing = [f"--resume: {named}; continuing from the newest one that does"]
    changes = _compare(config, manifest.fixed, settings, made="the checkpoint", problems=problems)
    if state.step > config.total_steps:
        end = f"this run ends after step {config.total_steps}: raise --max_train_steps or --epochs"
        problems.add(f"--resume: {checkpoint} is at step {state.step}, but {end}", differs=True)
    validates_anew = any(one["name"] in store.VALIDATED_ON for one in changes)
    return ResumePoint(
        checkpoint=checkpoint,
        refused=tuple(path for path, _ in refused),
        messages=(
            *(f"--resume: {path.name} is refused: {reason}" for path, reason in refused),
            *missing,
            resuming,
            *(f"--allow_changed: {one['name']} was {one['before']} and is {one['after']}" for one in changes),
            *(["validation set changed: the best validation loss starts anew"] if validates_anew else []),
        ),
        changes=(*map(asdict, state.changes), *({"step": state.step, **one} for one in [*moved, *changes])),
        run_id=manifest.run_id,
        validates_anew=validates_anew,
        same_ranks=same_ranks,
    )


def _has_same_ranks(config: RunConfig, manifest: Manifest) -> bool:
    """Whether each rank does what the rank of the same number did in the checkpoint's run."""
    here, there = config.topology, manifest.topology
    same = there is not None and (there.world_size, there.sizes) == (here.world_size, asdict(here.sizes))
    return same and manifest.device == config.device


def _plan_finished(config: RunConfig, *, settings: dict[str, Any], problems: Problems) -> ResumePoint | None:
    """The start of a run that has finished; None if this run may be longer, or the checkpoints are missing.

    The files of the checkpoint are not verified, because none will be loaded.
    """
    for checkpoint in store.checkpoints(config.run_dir):
        with contextlib.suppress(UserError):
            (manifest := parse_manifest(checkpoint)).require_resumable(checkpoint)
            break
    else:
        return None
    assert manifest.step is not None  # by ``require_resumable``
    if config.total_steps > manifest.step and "total steps" in _allowed(config):
        return None
    _compare(config, manifest.fixed, settings, made="the finished run", problems=problems)
    return ResumePoint(
        checkpoint=checkpoint, finished=True, messages=(f"{config.run_dir} holds a finished run; nothing to do",)
    )


def _newest_whole(run_dir: Path, damage: Callable[[str], str]) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest undamaged checkpoint, and the newer ones with what is wrong with each.

    Raises:
        UserError: there are checkpoints, and all are damaged.
    """
    refused: list[tuple[Path, str]] = []
    for checkpoint in store.candidates(run_dir):
        if not (reason := damage(checkpoint.name)):
            return checkpoint, refused
        refused.append((checkpoint, reason))
    cure = "restore one, or start again with --overwrite"
    if refused:
        lines = (f"--resume: {path.name} is refused: {reason}" for path, reason in refused)
        raise UserError(f"--resume: no checkpoint in {run_dir} is intact: {cure}", *lines)
    marked = sorted(path.name for path in run_dir.glob("step-*") if store.DAMAGED_FOLDER.fullmatch(path.name))
    if damaged := ", ".join(marked):
        raise UserError(f"--resume: {run_dir} holds only damaged checkpoints ({damaged}): {cure}")
    return None, refused


def damage_in(config: RunConfig, name: str, rank: int = 0, ranks: int = 1) -> str:
    """What is wrong with a checkpoint that ``ranks`` verify together, as far as ``rank`` sees; empty if nothing is.

    Each file is hashed by one of them: pieces and random states by the rank of their number, which will read them if
    the ranks are as many as before; the others in turn.
    """
    checkpoint, device = config.run_dir / name, config.device
    try:
        turns = {file: turn for turn, file in enumerate(parse_manifest(checkpoint).files)}
        turns |= {file: int(number[1]) for file in turns if (number := _NUMBERED.search(file))}
        manifest = read_manifest(checkpoint, only=lambda file: turns[file] % ranks == rank)
        manifest.require_resumable(checkpoint)
        manifest.require(checkpoint, (*state_files(checkpoint), store.MODEL, COUNTERS, STATE_FILE))
        step = read_run_state(checkpoint).step
        if (name, manifest.step) != (store.folder_name(step), step):
            differ = f"its {STATE_FILE} is of step {step} and its manifest of step {manifest.step}"
            return f"{checkpoint}: {differ}: a file or the folder was renamed"
        StateReader(checkpoint).check(rank, ranks)
        if rank == 0 and _has_same_ranks(config, manifest):
            check_random_states(checkpoint, named=manifest.files, ranks=config.topology.world_size, device=device)
    except UserError as error:
        return str(error)
    return ""


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
        cure = f"{way_out}repeat the original command, or start a new run in another folder"
        line = f"--resume: {name} is {now} but {made} in {config.run_dir} was made with {then}: {cure}"
        problems.add(line, differs=True)
    return changes


def _allowed(config: RunConfig) -> set[str]:
    return {name for group in config.options.allow_changed for name in CHANGEABLE[group]}


# The files of a run, and whether the folder holds one.

CONFIG_FILE = "config.json"
_FILES = (COMPLETE_FILE, store.LATEST, store.BEST, LOG_FILE, COMMUNICATION_FILE, STEPS_FILE, RECORD_FILE, CONFIG_FILE)
"""Files that a run writes next to its checkpoints, in the order of removal: those that identify a run go last.
``hardware.jsonl`` and the files of further machines go before them.

A kill in between leaves no ``latest``, and no step lines without a record;
``why_nothing_was_saved`` says why this matters."""
TRACKERS_FOLDER = "trackers"
"""Folder of files that experiment trackers store on this machine, and of the run's ids in them."""
IDS_FILE = "run_ids.json"
"""The run's id in each tracker, by the tracker's name. It also marks the folder as written by this program."""
_OWN_FOLDERS = (store.STEP_FOLDER, store.PARTIAL_FOLDER, store.DAMAGED_FOLDER)
_OWN_KEYS = {RECORD_FILE: {"schema_version", "training_config"}, CONFIG_FILE: {"options", "training_config"}}

_OWN_LINES = ({"step", "epoch", "loss", "lr", "grad_norm", "tokens"}, {"step", "val_loss", "val_tokens"})


def holds_run_to_resume(config: RunConfig, problems: Problems) -> bool:
    """Whether the folder holds a run for ``--resume`` to continue; changes nothing.

    Args:
        config: the run.
        problems: receives what prevents the run from starting in the folder.
    """
    run_dir, options = config.run_dir, config.options
    place = next(folder for folder in (run_dir, *run_dir.parents, Path()) if folder.exists())
    if not place.is_dir():
        problems.add(f"--checkpoint_path {run_dir}: {place} is a file, not a folder: name another folder")
    elif not os.access(place, os.R_OK | os.W_OK | os.X_OK):
        problems.add(f"--checkpoint_path {run_dir}: no permission to read and write in {place}: name another folder")
    if not run_dir.is_dir() or not os.access(run_dir, os.R_OK | os.X_OK):
        return False
    existing = _existing(run_dir)
    if foreign := _foreign(run_dir, existing):
        what = f"holds a {foreign.name} that this program did not write"
        problems.add(f"--checkpoint_path {run_dir}: {what}: name another folder")
        return False
    if not existing or options.overwrite:
        return False
    if not options.resume:
        proof = _proof(run_dir)
        assert proof is not None  # else what exists is foreign
        cure = "add --resume to continue it, --overwrite to delete it, or name another folder"
        problems.add(f"--checkpoint_path {run_dir}: holds a run already ({proof.name}): {cure}")
        return False
    trackers = run_dir / TRACKERS_FOLDER
    inside = sorted(trackers.glob("*")) if is_tracker_folder(trackers) else []
    links = [path.relative_to(run_dir) for path in (*existing, *inside) if path.is_symlink()]
    cure = "replace it by a copy of its target (cp -rL), or remove it"
    for name in links:
        problems.add(f"--resume: {run_dir / name} is a link, and links inside a run folder are not followed: {cure}")
    return not links


def contents(run_dir: Path) -> list[str]:
    """The names of everything in the folder that a run writes, to notice a change by another process."""
    return [path.name for path in _existing(run_dir)] if run_dir.is_dir() else []


def make_run_folder(run_dir: Path) -> None:
    """Make the folder, durable with all folders above it that were missing.

    Raises:
        UserError: the system refuses.
    """
    try:
        missing = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
        run_dir.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            with contextlib.suppress(PermissionError):  # one may write there, but not read
                sync_directory(folder.parent)
    except OSError as error:
        line = f"--checkpoint_path {run_dir}: cannot be made ({error.strerror}): name another folder"
        raise UserError(line) from error


def clear_run_folder(run_dir: Path, start: ResumePoint) -> None:
    """Remove what an earlier process left: a fresh start removes its run, a resume its incomplete checkpoints.

    A resume also marks the checkpoints that it refused as damaged. An overwrite renames the checkpoints first and
    removes them last: after a kill in between, ``--resume`` starts fresh. Each of its steps is durable before the next,
    so this also holds after a power cut.
    """
    remove(run_dir / COMPLETE_FILE)
    if start.checkpoint is None:
        for pattern in (store.DAMAGED_FOLDER, store.STEP_FOLDER):
            for checkpoint in _folders(run_dir, pattern):
                store.set_aside(checkpoint, suffix=store.OVERWRITTEN)
        sync_directory(run_dir)
        for path in _files(run_dir):
            remove(path)
    sync_directory(run_dir)  # a killed process may have renamed a checkpoint, and not synced it, in place of another
    for path in _folders(run_dir, store.PARTIAL_FOLDER):
        remove(path)
    if start.checkpoint is not None:
        for checkpoint in start.refused:
            store.mark_damaged(checkpoint)
        store.name_newest_and_best(run_dir)


def _existing(run_dir: Path) -> list[Path]:
    """Everything in ``run_dir`` that is named like a file or folder of a run, links included."""
    return _files(run_dir) + [path for name in _OWN_FOLDERS for path in _folders(run_dir, name)]


def _files(run_dir: Path) -> list[Path]:
    """Paths in ``run_dir`` named like a file of a run, or like the folder of trackers or profiles, links included."""
    of_machines = sorted(path for path in run_dir.iterdir() if MACHINE_FILE.fullmatch(path.name))
    named = [run_dir / name for name in (TRACKERS_FOLDER, PROFILE_FOLDER, *_FILES) if os.path.lexists(run_dir / name)]
    return of_machines + named


def _folders(run_dir: Path, name: re.Pattern[str]) -> list[Path]:
    """Folders and links whose whole name matches ``name``, newest first."""
    named = (path for path in run_dir.iterdir() if name.fullmatch(path.name))
    return sorted((path for path in named if path.is_dir() or path.is_symlink()), reverse=True)


def _foreign(run_dir: Path, existing: list[Path]) -> Path | None:
    """A file or folder that a run would replace although no run wrote it; None if there is none."""
    for path in existing:
        if (path.name in _FILES or MACHINE_FILE.fullmatch(path.name)) and path.is_dir() and not path.is_symlink():
            return path
        for name, is_ours in ((TRACKERS_FOLDER, is_tracker_folder), (PROFILE_FOLDER, is_profile_folder)):
            if path.name == name and not path.is_symlink() and not is_ours(path):
                return path
    return existing[0] if existing and _proof(run_dir) is None else None


def is_tracker_folder(path: Path) -> bool:
    """Whether ``path`` is a folder that a run with ``--track`` made, or began to make; False for a link."""
    if path.is_symlink() or not path.is_dir():
        return False
    return is_regular_file(path / IDS_FILE) or not any(path.iterdir())


def _proof(run_dir: Path) -> Path | None:
    """The first file or folder that only a run of this program writes; None if there is none."""
    own = [path for path in (run_dir / RECORD_FILE, run_dir / CONFIG_FILE) if is_ours(path)]
    steps = run_dir / STEPS_FILE
    first: dict[str, Any] = next(read_steps(steps), {}) if is_regular_file(steps) else {}
    if any(first.keys() >= keys for keys in _OWN_LINES):
        own.append(steps)
    folders = (path for name in _OWN_FOLDERS for path in _folders(run_dir, name))
    own += [path for path in folders if path.is_dir() and not path.is_symlink()]
    return own[0] if own else None


def is_ours(path: Path) -> bool:
    """Whether a record or a ``config.json`` was written by a run of this program."""
    try:
        return is_regular_file(path) and read_object(path, max_bytes=MAX_RECORD_BYTES).keys() >= _OWN_KEYS[path.name]
    except JsonError:
        return False
