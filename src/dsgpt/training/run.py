"""One run from its configuration to its record: everything around the loop."""

import contextlib
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from dsgpt.checkpointing import store
from dsgpt.config import RunConfig
from dsgpt.device import bring_up
from dsgpt.files import write_atomic, write_json_atomic
from dsgpt.inference.latency import measure_latency
from dsgpt.model.gpt2 import GPT2
from dsgpt.problems import Problems
from dsgpt.process_group import barrier, from_main, joined
from dsgpt.strategies.base import Strategy
from dsgpt.strategies.baseline import DTYPES
from dsgpt.strategies.build import build_strategy
from dsgpt.telemetry.console import Console, duration
from dsgpt.telemetry.record import COMPLETE_FILE, STEPS_FILE, drop_steps_after
from dsgpt.training.checkpoint import save_checkpoint, whole_weights
from dsgpt.training.data_check import data_hash
from dsgpt.training.facts import fixed_facts, plan_lines, record_facts
from dsgpt.training.journal import Journal
from dsgpt.training.loop import fit
from dsgpt.training.run_folder import CONFIG_FILE, LOG_FILE, Start, check_resumable, open_run_folder, plan_start


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """What the main rank found out before the others needed it."""

    start: Start
    hashes: dict[str, str]


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
        if prepared.start.message:
            console.say(prepared.start.message)
        if not prepared.start.finished:
            _train(config, console, device, prepared)


def _prepare(config: RunConfig, console: Console) -> _Prepared:
    """Check what only one rank should read: the data's contents, the run folder and its checkpoint."""
    problems = Problems()
    start = plan_start(config, problems)
    problems.raise_if_any()
    verify = config.options.verify_data
    hashes = {
        name: data_hash(file, verify=verify, console=console, problems=problems)
        for name, file in (("train", config.train), ("val", config.val))
    }
    check_resumable(config, start, fixed=fixed_facts(config, hashes=hashes), problems=problems)
    problems.raise_if_any()
    return _Prepared(start=start, hashes=hashes)


def _train(config: RunConfig, console: Console, device: torch.device, prepared: _Prepared) -> None:
    checkpoint = prepared.start.checkpoint
    facts = {}
    if config.topology.is_main:
        open_run_folder(config.run_dir, prepared.start)
        console.log_to(config.run_dir / LOG_FILE)
        facts = record_facts(
            config, hashes=prepared.hashes, resumed_from=checkpoint.name if checkpoint is not None else None
        )
        _write_config(config, facts)
    barrier()
    fixed = fixed_facts(config, hashes=prepared.hashes)
    torch.manual_seed(_dropout_seed(config))
    strategy = build_strategy(config, device)
    done, journal = _take_up(config, console, device, strategy, checkpoint, facts)

    def save(step: int) -> None:
        started = time.perf_counter()
        state = store.RunState(
            step=step,
            samples_seen=step * config.batch.global_batch_size,
            best_val_loss=journal.best_val_loss,
            epochs=journal.record.epochs,
        )
        save_checkpoint(config, strategy, device, state=state, fixed=fixed)
        console.say(f"step {step:>6}/{config.total_steps}  saved in {time.perf_counter() - started:.1f} s")

    try:
        fit(config, strategy, journal, console, done=done, save=save)
        _measure_inference(config, console, device, strategy, journal)
    except BaseException as error:
        journal.write("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
    finally:
        journal.close()
    journal.write("completed")
    if config.topology.is_main:
        _mark_complete(config, journal, console)
    barrier()


def _dropout_seed(config: RunConfig) -> int:
    """Data ranks draw different dropout masks."""
    return (config.options.seed * 1_000_003 + config.topology.data_rank) % 2**63  # what torch takes for a seed


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
    state = store.read_run_state(checkpoint)
    strategy.load(checkpoint)
    store.load_random_state(checkpoint, rank=config.topology.rank, device=device)
    steps_file = config.run_dir / STEPS_FILE
    if config.topology.is_main:
        drop_steps_after(steps_file, state.step)
    barrier()
    journal = Journal(config, device, console, facts, first_step=state.step)
    epoch = state.step // config.order.steps_per_epoch
    journal.take_up(steps_file, epochs=state.epochs, epoch=epoch, best=state.best_val_loss)
    return state.step, journal


def _measure_inference(
    config: RunConfig, console: Console, device: torch.device, strategy: Strategy, journal: Journal
) -> None:
    """Time the trained model on the main rank while the others wait; the same plain model for every strategy."""
    weights = whole_weights(strategy, keep=config.topology.is_main)
    if not config.topology.is_main:
        return
    model = GPT2(config.model)
    model.load_state_dict({**weights, "lm_head.weight": weights["wte.weight"]})
    model.to(device, DTYPES[config.precision]).eval()
    ids = torch.from_numpy(config.val.memmap()[: config.model.block_size].astype("int64")).to(device)
    journal.record.inference = measure_latency(model, ids)
    if journal.record.inference is not None:
        console.say(
            f"inference   {journal.record.inference['new_tokens']} tokens in "
            f"{journal.record.inference['latency_sec']:.2f} s, {journal.record.inference['tokens_per_sec']:.0f} "
            "tokens/s (batch 1, greedy, key-value cache)"
        )


def _mark_complete(config: RunConfig, journal: Journal, console: Console) -> None:
    summary = journal.record.summary
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    line = (
        f"finished {config.total_steps} steps at {finished}: train loss {summary['final_train_loss']:.4f}, validation "
        f"loss {summary['final_val_loss']:.4f}"
    )
    write_atomic(config.run_dir / COMPLETE_FILE, f"{line}\n".encode())
    speed = summary["mean_tokens_per_sec_global"]
    console.say(
        f"{line}, training {duration(summary['train_time_sec'])}" + (f", {speed:,.0f} tokens/s" if speed else "")
    )
    console.say(f"the record is {config.run_dir / 'training_metrics.json'}")
