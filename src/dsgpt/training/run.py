"""One run from its configuration to its record: everything around the loop."""

import contextlib
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dsgpt.checkpointing import store
from dsgpt.checkpointing.random_state import load_random_state
from dsgpt.checkpointing.run_state import read_run_state
from dsgpt.checkpointing.training_state import StateReader
from dsgpt.common.errors import Interrupted, UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.common.json_files import JsonError
from dsgpt.common.problems import Problems
from dsgpt.config.run_config import RunConfig
from dsgpt.model.gpt2 import parameter_shapes
from dsgpt.runtime.device import bring_up
from dsgpt.runtime.interruption import Interruption
from dsgpt.runtime.process_group import HostGroup, barrier, from_main, joined
from dsgpt.strategies.base import Strategy
from dsgpt.strategies.build import build_strategy
from dsgpt.telemetry.console import Console
from dsgpt.telemetry.record import RECORD_FILE, STEPS_FILE, drop_steps_after
from dsgpt.training.completion import mark_complete, measure_inference
from dsgpt.training.data_check import check_tokenizer, data_hash, data_tokenizer, initial_weights_hash
from dsgpt.training.earlier_record import EarlierRecord, read_earlier_record
from dsgpt.training.journal import Journal
from dsgpt.training.loop import fit
from dsgpt.training.resume import Start, plan_resume
from dsgpt.training.run_description import fixed_facts, plan_lines, record_facts
from dsgpt.training.run_folder import (
    CONFIG_FILE,
    LOG_FILE,
    clear_run_folder,
    contents,
    holds_own_config,
    make_run_folder,
    may_go_on,
)
from dsgpt.training.run_lock import PATIENCE_SEC, RunLock, is_guarded, refuse_if_locked
from dsgpt.training.saving import Saver
from dsgpt.training.stopping import Stopping


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """What the main rank found out before the others needed it."""

    start: Start
    hashes: dict[str, str | None]
    """sha256 of ``train`` and ``val``, and of the published ``initial weights``, None where there are none."""
    found: list[str]
    """What the run folder held."""
    earlier: EarlierRecord
    """Of the run to go on with."""
    notices: tuple[str, ...]
    """What to tell the user of the tokenizers."""

    @property
    def told(self) -> tuple[str, ...]:
        """What to tell the user of all this."""
        return *self.notices, *self.start.messages


def run(config: RunConfig, console: Console, interruption: Interruption) -> None:
    """Train as ``config`` says, or stop after the plan with ``--dry_run``.

    Raises:
        UserError: the data or the run folder forbid it.
        NonFiniteError: the loss became NaN or infinite.
        SaveError: a checkpoint could not be written.
        Interrupted: the run was asked to stop.
    """
    patience = PATIENCE_SEC if config.options.resume else 0
    with RunLock(config.run_dir, patience_sec=patience, say=console.say) as lock:
        prepared = _prepare(config, console, lock) if config.topology.is_main else None
        for line in plan_lines(config):
            console.say(line)
        if config.options.dry_run:
            for line in prepared.told if prepared else ():
                console.say(line)
            console.say("dry run: everything checked, nothing started")
            return
        device = bring_up(config.device, local_rank=config.topology.local_rank, threads=config.threads_per_device)
        group = contextlib.nullcontext() if config.run_type == "baseline" else joined(config.topology, device)
        with group:
            prepared = from_main(prepared)
            for line in prepared.told:
                console.say(line)
            if not prepared.start.finished:
                with contextlib.closing(_build(config, device, prepared.start)) as strategy:
                    _train(strategy, config, console, device, prepared, interruption, lock)


def _prepare(config: RunConfig, console: Console, lock: RunLock) -> _Prepared:
    """Check what only one rank should read: the data's contents, the run folder and its checkpoints.

    A folder that a run was started in is locked from here on.
    """
    problems, run_dir = Problems(), config.run_dir
    if config.options.dry_run:
        refuse_if_locked(run_dir)
    elif is_guarded(run_dir) or store.replaced(run_dir):
        lock.take()
        if os.access(run_dir, os.W_OK):  # else it is refused below
            store.put_back(run_dir)
    goes_on = may_go_on(config, problems)
    problems.add(*filter(None, [data_tokenizer(config.train)[1]]))
    problems.raise_if_any()
    verify = config.options.verify_data
    hashes = {
        name: data_hash(file, verify=verify, console=console, problems=problems)
        for name, file in (("train", config.train), ("val", config.val))
    }
    problems.raise_if_any()  # a file that changed would also differ from the checkpoint's
    hashes["initial weights"] = initial_weights_hash(config, console)
    start = Start()
    if goes_on:
        start = plan_resume(config, fixed=fixed_facts(config, hashes=hashes), problems=problems)
    earlier, unknown = _earlier_record(run_dir) if start.checkpoint else (EarlierRecord(), "")
    notices = (check_tokenizer(config, problems), unknown)
    problems.raise_if_any()
    return _Prepared(
        start=start,
        hashes=hashes,
        found=contents(run_dir),
        earlier=earlier,
        notices=tuple(filter(None, notices)),
    )


def _earlier_record(run_dir: Path) -> tuple[EarlierRecord, str]:
    """What the record to go on with says of saves, and a notice where it cannot be read."""
    try:
        return read_earlier_record(run_dir) or EarlierRecord(), ""
    except JsonError as error:
        return EarlierRecord(), f"{run_dir / RECORD_FILE} is damaged ({error}): what earlier saves cost is lost"


def _build(config: RunConfig, device: torch.device, start: Start) -> Strategy:
    """The strategy, which may still refuse the recipe: nothing is written before."""
    torch.manual_seed(_dropout_seed(config))
    # A checkpoint holds all that a run needs to go on: where its initial weights came from may be gone.
    return build_strategy(replace(config, init_from=None) if start.checkpoint else config, device)


def _train(
    strategy: Strategy,
    config: RunConfig,
    console: Console,
    device: torch.device,
    prepared: _Prepared,
    interruption: Interruption,
    lock: RunLock,
) -> None:
    ranks = HostGroup()
    stopping = Stopping(interruption, ranks)
    facts = _open_folder(config, console, prepared, lock)
    done, journal = _take_up(config, console, device, strategy, prepared, facts)
    fixed, run_id = fixed_facts(config, hashes=prepared.hashes), facts.get("run_id")
    saver = Saver(config, console, device, strategy, journal, fixed=fixed, run_id=run_id, ranks=ranks)
    with interruption.patience():
        try:
            journal.write()
            fit(config, strategy, journal, console, stopping, done=done, saver=saver)
            measure_inference(config, console, device, strategy, journal, interruption)
            if stopping.agreed():
                raise stopping.stop("when all steps were done and saved, before the end of the run")
            journal.write("completed")
            if config.topology.is_main:
                mark_complete(config, journal, console)
            barrier()
        except BaseException as error:
            saver.close()
            _end_early(journal, console, error)
            raise
        finally:
            journal.close()


def _end_early(journal: Journal, console: Console, error: BaseException) -> None:
    journal.end_early("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
    if isinstance(error, Interrupted) and error.together:
        console.say(f"{error}; continue with --resume")
        barrier()  # the first rank to leave makes the launcher end the others, and rank 0 had this to write


def _open_folder(config: RunConfig, console: Console, prepared: _Prepared, lock: RunLock) -> dict[str, Any]:
    """Rank 0 takes the run folder for as long as the run lasts, while the others wait; the facts of its record.

    Raises:
        UserError: on every rank, where rank 0 may not have the folder.
    """
    facts, problems = {}, ()
    if config.topology.is_main:
        try:
            facts = _begin_files(config, console, prepared, lock)
        except UserError as error:
            problems = error.problems
    if problems := from_main(problems):
        raise UserError(*problems)
    return facts


def _begin_files(config: RunConfig, console: Console, prepared: _Prepared, lock: RunLock) -> dict[str, Any]:
    start, run_dir = prepared.start, config.run_dir
    make_run_folder(run_dir)
    lock.take()
    if contents(run_dir) != prepared.found:
        raise UserError(f"--checkpoint_path {run_dir}: another process changed it meanwhile: start again")
    clear_run_folder(run_dir, start)
    facts = record_facts(
        config,
        hashes=prepared.hashes,
        resumed_from=start.checkpoint.name if start.checkpoint is not None else None,
        changes=start.changes,
        run_id=start.run_id,
    )
    if not holds_own_config(run_dir):  # a resumed run keeps what it was started with
        _write_config(config, facts)
    console.log_to(run_dir / LOG_FILE)
    return facts


def _dropout_seed(config: RunConfig, *, step: int = 0) -> int:
    """Ranks that compute different activations draw different masks; tensor peers, which share them, draw the same.

    Args:
        config: the run.
        step: that this process goes on from; where it cannot go on with the streams of its checkpoint, it must not
            begin again with those of the run's first step.
    """
    stream = config.topology.rank // config.topology.sizes.tensor
    return (config.options.seed * 1_000_003 + step * 1_000_000_007 + stream) % 2**63  # what torch takes for a seed


def _write_config(config: RunConfig, facts: dict[str, Any]) -> None:
    options = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config.options).items()}
    kept = ("command_line", "git_commit", "env", "data", "training_config", "deepspeed_config")
    write_json_atomic(config.run_dir / CONFIG_FILE, {"options": options, **{name: facts[name] for name in kept}})


def _reader(config: RunConfig, checkpoint: Path) -> StateReader:
    reader = StateReader(checkpoint)
    reader.require_shapes(parameter_shapes(config.model))
    return reader


def _take_up(
    config: RunConfig,
    console: Console,
    device: torch.device,
    strategy: Strategy,
    prepared: _Prepared,
    facts: dict[str, Any],
) -> tuple[int, Journal]:
    """The steps done before, and the journal; with a checkpoint, the strategy and journal continue it."""
    checkpoint = prepared.start.checkpoint
    if checkpoint is None:
        return 0, Journal(config, device, console, facts, first_step=0)
    state = read_run_state(checkpoint)
    if prepared.start.validates_anew:
        state = state.without_validations()
    strategy.load_state(_reader(config, checkpoint))
    if prepared.start.same_ranks:
        load_random_state(checkpoint, rank=config.topology.rank, device=device)
    else:
        torch.manual_seed(_dropout_seed(config, step=state.step))
    steps_file = config.run_dir / STEPS_FILE
    if config.topology.is_main and (damaged := drop_steps_after(steps_file, state.step)):
        console.say(f"{steps_file}: {len(damaged)} damaged lines were dropped, the first of them line {damaged[0]}")
    barrier()
    journal = Journal(config, device, console, facts, first_step=state.step)
    journal.take_up(state, steps_file, earlier=prepared.earlier)
    return state.step, journal
