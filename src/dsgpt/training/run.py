"""One run in one process: its checks, its device and process group, its strategy, and the trainer."""

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from dsgpt.checkpointing.random_state import load_random_state
from dsgpt.checkpointing.run_state import RunState, read_run_state
from dsgpt.checkpointing.training_state import StateReader
from dsgpt.config.run_config import RunConfig
from dsgpt.model.gpt2 import parameter_shapes
from dsgpt.runtime.device import bring_up
from dsgpt.runtime.interruption import Interruption
from dsgpt.runtime.process_group import HostGroup, barrier, from_main, joined
from dsgpt.strategies.base import Strategy
from dsgpt.strategies.build import build_strategy
from dsgpt.telemetry.console import LogFile
from dsgpt.telemetry.record import STEPS_FILE, drop_steps_after
from dsgpt.training.checkpoint import about_run
from dsgpt.training.journal import Journal
from dsgpt.training.monitoring import open_monitor
from dsgpt.training.out_of_memory import out_of_memory_explained
from dsgpt.training.preparation import Prepared, open_run_folder, prepare
from dsgpt.training.resume import Start
from dsgpt.training.run_description import plan_lines
from dsgpt.training.run_lock import PATIENCE_SEC, RunLock
from dsgpt.training.saving import Saver
from dsgpt.training.sinks import open_sinks
from dsgpt.training.trackers.opening import open_trackers
from dsgpt.training.trainer import Trainer

logger = logging.getLogger(__name__)


def run(config: RunConfig, interruption: Interruption) -> None:
    """Train as ``config`` says, or stop after the plan with ``--dry_run``.

    Raises:
        UserError: the data or the run folder cannot be used.
        NonFiniteError: a loss, a gradient norm or a weight became NaN or infinite.
        SaveError: a checkpoint could not be written.
        Interrupted: the run was asked to stop.
    """
    patience = PATIENCE_SEC if config.options.resume else 0
    with LogFile() as log, RunLock(config.run_dir, patience_sec=patience) as lock:
        found = prepare(config, lock) if config.topology.is_main else None
        _log_lines(plan_lines(config))
        if config.options.dry_run:
            _log_lines(found.messages if found else ())
            logger.info("dry run: everything checked, nothing started")
        else:
            with out_of_memory_explained(config):
                _train(config, found, interruption, lock=lock, log=log)


def _train(
    config: RunConfig, found: Prepared | None, interruption: Interruption, *, lock: RunLock, log: LogFile
) -> None:
    device = bring_up(config.device, local_rank=config.topology.local_rank, threads=config.threads_per_device)
    with contextlib.nullcontext() if config.run_type == "baseline" else joined(config.topology, device):
        prepared: Prepared = from_main(found)
        _log_lines(prepared.messages)
        if prepared.start.finished:
            return
        with contextlib.closing(_build(config, prepared.start, device=device)) as strategy:
            ranks = HostGroup()
            description = open_run_folder(config, prepared, lock=lock, log=log)
            state = _load_checkpoint(config, prepared.start, strategy, device=device)
            journal = _open_journal(config, prepared, state, device=device, description=description, ranks=ranks)
            is_main = config.topology.is_main
            about = about_run(config, settings=prepared.settings, description=description) if is_main else {}
            saver = Saver(config, device=device, strategy=strategy, journal=journal, about=about, ranks=ranks)
            Trainer(
                config,
                device=device,
                strategy=strategy,
                journal=journal,
                saver=saver,
                monitor=open_monitor(config, device),
                interruption=interruption,
                ranks=ranks,
                done=state.step if state else 0,
            ).run()


def _log_lines(lines: Iterable[str]) -> None:
    for line in lines:
        logger.info(line)


def _build(config: RunConfig, start: Start, *, device: torch.device) -> Strategy:
    """The strategy. Building it may still fail on the recipe, so it is built before the run writes its first file."""
    torch.manual_seed(dropout_seed(config))
    # A resume needs only the checkpoint: the source of the initial weights may no longer exist.
    return build_strategy(replace(config, init_from=None) if start.checkpoint else config, device)


def dropout_seed(config: RunConfig, *, step: int = 0) -> int:
    """The seed of this rank's dropout masks.

    Ranks that compute different activations draw different masks. Tensor peers share activations and masks.

    Args:
        config: the run.
        step: of the checkpoint, if its random streams cannot be continued: a resumed run must not repeat the masks of
            the first steps.
    """
    stream = config.topology.rank // config.topology.sizes.tensor
    return (config.options.seed * 1_000_003 + step * 1_000_000_007 + stream) % 2**63  # torch accepts these seeds


def _load_checkpoint(config: RunConfig, start: Start, strategy: Strategy, *, device: torch.device) -> RunState | None:
    """Load the checkpoint, if any, into ``strategy`` and the random streams; returns the state of the run."""
    if start.checkpoint is None:
        return None
    state = read_run_state(start.checkpoint)
    reader = StateReader(start.checkpoint)
    reader.require_shapes(parameter_shapes(config.model))
    strategy.load_state(reader)
    if start.same_ranks:
        load_random_state(start.checkpoint, rank=config.topology.rank, device=device)
    else:
        torch.manual_seed(dropout_seed(config, step=state.step))
    return state.without_validations() if start.validates_anew else state


def _open_journal(
    config: RunConfig,
    prepared: Prepared,
    state: RunState | None,
    *,
    device: torch.device,
    description: dict[str, Any],
    ranks: HostGroup,
) -> Journal:
    """The journal, which continues that of the checkpoint's run; cuts ``metrics.jsonl`` back to its step."""
    steps_file = config.run_dir / STEPS_FILE
    done = state.step if state else 0
    if state is not None:
        if config.topology.is_main and (damaged := drop_steps_after(steps_file, done)):
            logger.warning(f"{steps_file}: damaged lines dropped: {len(damaged)}, the first was line {damaged[0]}")
        barrier()
    trackers = open_trackers(config, description=description, done=done)
    sinks = open_sinks(config, done=done, trackers=trackers)
    plan = prepared.plan
    journal = Journal(config, device=device, description=description, sinks=sinks, ranks=ranks, plan=plan, done=done)
    if state is not None:
        journal.resume(state, steps_file, earlier=prepared.earlier)
    return journal
