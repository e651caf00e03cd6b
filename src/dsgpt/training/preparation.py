"""What the main rank does before training: it checks the data and the run folder, then opens the folder."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsgpt.checkpointing import store
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.common.json_files import JsonError
from dsgpt.common.problems import Problems
from dsgpt.config.run_config import RunConfig
from dsgpt.runtime.process_group import from_main
from dsgpt.telemetry.console import LogFile
from dsgpt.telemetry.record import LOG_FILE, RECORD_FILE, later_schema
from dsgpt.training.budget import TrainingPlan, read_plan
from dsgpt.training.data_check import check_tokenizer, data_hash, data_tokenizer, initial_weights_hash
from dsgpt.training.earlier_record import EarlierRecord, read_earlier_record
from dsgpt.training.resume import Start, plan_resume
from dsgpt.training.run_description import describe_run, settings_to_match
from dsgpt.training.run_folder import (
    CONFIG_FILE,
    clear_run_folder,
    contents,
    holds_own_config,
    holds_run_to_resume,
    make_run_folder,
)
from dsgpt.training.run_lock import RunLock, is_guarded, refuse_if_locked


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What the main rank found; the other ranks receive it."""

    start: Start
    hashes: dict[str, str | None]
    """sha256 of ``train`` and ``val``, and of the published ``initial weights``, None where there are none."""
    settings: dict[str, Any]
    """Those that a resumed run must match."""
    found: list[str]
    """What the run folder held."""
    earlier: EarlierRecord
    """The record of the run to resume."""
    plan: TrainingPlan | None
    """That of ``--plan``."""
    messages: tuple[str, ...]
    """Lines for the user."""


def prepare(config: RunConfig, lock: RunLock) -> Prepared:
    """Check what only one rank should read: the contents of the data, the run folder and its checkpoints.

    Locks the run folder if a run was started in it before, and renames back a checkpoint that was being replaced. A
    dry run only checks the lock. The sidecar of a data file that was hashed may get a new stamp. Nothing else changes.

    Raises:
        UserError: lists the mistakes, one line each.
    """
    problems, run_dir = Problems(), config.run_dir
    _lock_existing(config, lock)
    resumes = holds_run_to_resume(config, problems)
    problems.add(*filter(None, [data_tokenizer(config.train)[1]]))
    problems.raise_if_any()
    verify = config.options.verify_data
    hashes = {
        name: data_hash(file, verify=verify, problems=problems)
        for name, file in (("train", config.train), ("val", config.val))
    }
    problems.raise_if_any()  # else a changed file is reported again, as different from the checkpoint's
    hashes["initial weights"] = initial_weights_hash(config)
    settings, start = settings_to_match(config, hashes=hashes), Start()
    if resumes:
        start = plan_resume(config, settings=settings, problems=problems)
    earlier, damaged = _earlier_record(run_dir) if start.checkpoint else (EarlierRecord(), "")
    plan = read_plan(config, problems)
    unchecked = check_tokenizer(config, problems)
    problems.raise_if_any()
    return Prepared(
        start=start,
        hashes=hashes,
        settings=settings,
        found=contents(run_dir),
        earlier=earlier,
        plan=plan,
        messages=(*filter(None, (unchecked, damaged)), *start.messages),
    )


def _lock_existing(config: RunConfig, lock: RunLock) -> None:
    run_dir = config.run_dir
    if config.options.dry_run:
        refuse_if_locked(run_dir)
    elif is_guarded(run_dir) or store.replaced(run_dir):
        lock.take()
        if os.access(run_dir, os.W_OK):  # else ``holds_run_to_resume`` refuses it
            store.put_back(run_dir)


def _earlier_record(run_dir: Path) -> tuple[EarlierRecord, str]:
    """The record of the run to resume, and a message if it cannot be read or is of a later version."""
    try:
        earlier = read_earlier_record(run_dir) or EarlierRecord()
        said = later_schema(earlier.schema_version)
        return earlier, f"{run_dir / RECORD_FILE} {said}" if said else ""
    except JsonError as error:
        return EarlierRecord(), f"{run_dir / RECORD_FILE} is damaged ({error}): its list of earlier saves is lost"


def open_run_folder(config: RunConfig, prepared: Prepared, *, lock: RunLock, log: LogFile) -> dict[str, Any]:
    """Lock the run folder, clear it and start its files, on the main rank while the others wait; collective.

    Args:
        config: the run.
        prepared: from ``prepare``.
        lock: of the folder.
        log: the log file to open in it.

    Returns:
        The description of the run, for its record; empty on other ranks.

    Raises:
        UserError: on every rank, if the main rank cannot lock or make the folder, or another process changed it.
    """
    description: dict[str, Any] = {}
    problems: tuple[str, ...] = ()
    if config.topology.is_main:
        try:
            description = _open(config, prepared, lock, log)
        except UserError as error:
            problems = error.problems
    problems = from_main(problems)
    if problems:
        raise UserError(*problems)
    return description


def _open(config: RunConfig, prepared: Prepared, lock: RunLock, log: LogFile) -> dict[str, Any]:
    start, run_dir = prepared.start, config.run_dir
    make_run_folder(run_dir)
    lock.take()
    if contents(run_dir) != prepared.found:
        raise UserError(f"--checkpoint_path {run_dir}: another process changed it: repeat the command")
    clear_run_folder(run_dir, start)
    description = describe_run(
        config,
        hashes=prepared.hashes,
        resumed_from=start.checkpoint.name if start.checkpoint is not None else None,
        changes=start.changes,
        run_id=start.run_id,
    )
    if not holds_own_config(run_dir):  # a resumed run keeps its own
        _write_config(config, description)
    log.open(run_dir / LOG_FILE)
    return description


def _write_config(config: RunConfig, description: dict[str, Any]) -> None:
    options = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config.options).items()}
    kept = ("command_line", "git_commit", "env", "data", "training_config", "deepspeed_config")
    written = {"options": options, **{name: description[name] for name in kept}}
    write_json_atomic(config.run_dir / CONFIG_FILE, written)
