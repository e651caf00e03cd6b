"""One run from its configuration to its record: everything around the loop."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dsgpt.checkpointing.random_state import load_random_state
from dsgpt.checkpointing.run_state import read_run_state
from dsgpt.config import RunConfig
from dsgpt.device import bring_up
from dsgpt.errors import UserError
from dsgpt.files import write_json_atomic
from dsgpt.problems import Problems
from dsgpt.process_group import barrier, from_main, joined
from dsgpt.strategies.base import Strategy
from dsgpt.strategies.build import build_strategy
from dsgpt.telemetry.console import Console
from dsgpt.telemetry.record import STEPS_FILE, drop_steps_after
from dsgpt.training.checkpoint import save_checkpoint
from dsgpt.training.data_check import data_hash, data_tokenizer
from dsgpt.training.facts import fixed_facts, plan_lines, record_facts
from dsgpt.training.finish import mark_complete, measure_inference
from dsgpt.training.journal import Journal
from dsgpt.training.loop import fit
from dsgpt.training.run_folder import (
    CONFIG_FILE,
    LOG_FILE,
    Start,
    check_resumable,
    clear_run_folder,
    holds_own_config,
    make_run_folder,
    plan_start,
)
from dsgpt.training.run_lock import refuse_if_locked, run_lock


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """What the main rank found out before the others needed it."""

    start: Start
    hashes: dict[str, str]
    run_id: str | None
    """Of the run to go on with."""
    notice: str
    """What to tell the user of the data's tokenizer; empty where there is nothing."""


def run(config: RunConfig, console: Console) -> None:
    """Train as ``config`` says, or stop after the plan with ``--dry_run``.

    Raises:
        UserError: the data or the run folder forbid it.
        NonFiniteError: the loss became NaN or infinite.
    """
    prepared = _prepare(config, console) if config.topology.is_main else None
    for line in plan_lines(config):
        console.say(line)
    if config.options.dry_run:
        console.say("dry run: everything checked, nothing started")
        return
    device = bring_up(config.device, local_rank=config.topology.local_rank, threads=config.threads_per_device)
    group = contextlib.nullcontext() if config.run_type == "baseline" else joined(config.topology, device)
    with group:
        prepared = from_main(prepared)
        for line in filter(None, (prepared.notice, prepared.start.message)):
            console.say(line)
        if not prepared.start.finished:
            _train(config, console, device, prepared)


def _prepare(config: RunConfig, console: Console) -> _Prepared:
    """Check what only one rank should read: the data's contents, the run folder and its checkpoint."""
    problems = Problems()
    refuse_if_locked(config.run_dir)
    start = plan_start(config, problems)
    problems.raise_if_any()
    verify = config.options.verify_data
    hashes = {
        name: data_hash(file, verify=verify, console=console, problems=problems)
        for name, file in (("train", config.train), ("val", config.val))
    }
    run_id = check_resumable(config, start, fixed=fixed_facts(config, hashes=hashes), problems=problems)
    problems.raise_if_any()
    _, notice = data_tokenizer(config.train)
    return _Prepared(start=start, hashes=hashes, run_id=run_id, notice=notice)


def _train(config: RunConfig, console: Console, device: torch.device, prepared: _Prepared) -> None:
    torch.manual_seed(_dropout_seed(config))
    strategy = build_strategy(config, device)  # may still refuse the recipe, so nothing is written before
    with _opened_folder(config, console, prepared) as facts:
        done, journal = _take_up(config, console, device, strategy, prepared.start.checkpoint, facts)
        save = _saver(config, console, device, strategy, journal, facts, prepared)
        try:
            journal.write()
            fit(config, strategy, journal, console, done=done, save=save)
            measure_inference(config, console, device, strategy, journal)
        except BaseException as error:
            journal.end_early("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
            raise
        finally:
            journal.close()
        journal.write("completed")
        if config.topology.is_main:
            mark_complete(config, journal, console)
        barrier()


@contextlib.contextmanager
def _opened_folder(config: RunConfig, console: Console, prepared: _Prepared) -> Iterator[dict[str, Any]]:
    """Rank 0 takes the run folder for as long as the run lasts, while the others wait; the facts of its record.

    Raises:
        UserError: on every rank, where rank 0 may not have the folder.
    """
    facts, problems = {}, ()
    with contextlib.ExitStack() as held:
        if config.topology.is_main:
            try:
                make_run_folder(config.run_dir)
                held.enter_context(run_lock(config.run_dir))
                facts = _begin_files(config, console, prepared)
            except UserError as error:
                problems = error.problems
        if problems := from_main(problems):
            raise UserError(*problems)
        yield facts


def _begin_files(config: RunConfig, console: Console, prepared: _Prepared) -> dict[str, Any]:
    start, run_dir, problems = prepared.start, config.run_dir, Problems()
    found = plan_start(config, problems)
    problems.raise_if_any()
    if found != start:
        raise UserError(f"--checkpoint_path {run_dir}: another process changed it meanwhile: start again")
    clear_run_folder(run_dir, start)
    facts = record_facts(
        config,
        hashes=prepared.hashes,
        resumed_from=start.checkpoint.name if start.checkpoint is not None else None,
        run_id=prepared.run_id,
    )
    if not holds_own_config(run_dir):  # a resumed run keeps what it was started with
        _write_config(config, facts)
    console.log_to(run_dir / LOG_FILE)
    return facts


def _saver(
    config: RunConfig,
    console: Console,
    device: torch.device,
    strategy: Strategy,
    journal: Journal,
    facts: dict[str, Any],
    prepared: _Prepared,
) -> Callable[[int], None]:
    fixed = fixed_facts(config, hashes=prepared.hashes)

    def save(step: int) -> None:
        started = time.perf_counter()
        journal.before_save()
        save_checkpoint(config, strategy, device, state=journal.state(step), fixed=fixed, run_id=facts.get("run_id"))
        journal.after_save()
        console.say(f"step {step:>6}/{config.total_steps}  saved in {time.perf_counter() - started:.1f} s")

    return save


def _dropout_seed(config: RunConfig) -> int:
    """Ranks that compute different activations draw different masks; tensor peers, which share them, draw the same."""
    stream = config.topology.rank // config.topology.sizes.tensor
    return (config.options.seed * 1_000_003 + stream) % 2**63  # what torch takes for a seed


def _write_config(config: RunConfig, facts: dict[str, Any]) -> None:
    options = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config.options).items()}
    kept = ("command_line", "git_commit", "env", "data", "training_config", "deepspeed_config")
    write_json_atomic(config.run_dir / CONFIG_FILE, {"options": options, **{name: facts[name] for name in kept}})


def _take_up(
    config: RunConfig,
    console: Console,
    device: torch.device,
    strategy: Strategy,
    checkpoint: Path | None,
    facts: dict[str, Any],
) -> tuple[int, Journal]:
    """The steps done before, and the journal; with a checkpoint, the strategy and journal continue it."""
    if checkpoint is None:
        return 0, Journal(config, device, console, facts, first_step=0)
    state = read_run_state(checkpoint)
    strategy.load(checkpoint)
    load_random_state(checkpoint, rank=config.topology.rank, device=device)
    steps_file = config.run_dir / STEPS_FILE
    if config.topology.is_main and (damaged := drop_steps_after(steps_file, state.step)):
        console.say(f"{steps_file}: {len(damaged)} damaged lines were dropped, the first of them line {damaged[0]}")
    barrier()
    journal = Journal(config, device, console, facts, first_step=state.step)
    journal.take_up(state, steps_file, epoch_start=state.step - state.step % config.order.steps_per_epoch)
    return state.step, journal
