"""One rank of one cell of the resume suite; see ``dsgpt.benchmarks.harness.worker``."""

import contextlib
import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from dsgpt.benchmarks.harness.rank_files import rank_file
from dsgpt.checkpointing.training_state import COUNTERS, MOMENTS, StateReader, write_training_state
from dsgpt.common.files import sha256_of, write_json_atomic
from dsgpt.config.flags import parse_arguments
from dsgpt.config.run_config import RunConfig, resolve
from dsgpt.model.gpt2 import parameter_shapes
from dsgpt.runtime.device import bring_up
from dsgpt.runtime.interruption import Interruption
from dsgpt.runtime.process_group import barrier, joined
from dsgpt.runtime.topology import read_topology
from dsgpt.strategies.base import Strategy
from dsgpt.strategies.build import build_strategy
from dsgpt.telemetry.console import logging_to_console
from dsgpt.telemetry.record import COMPLETE_FILE
from dsgpt.training.run import run
from dsgpt.training.trainer import validation_loss

STATE_FILES = ("model.safetensors", MOMENTS, COUNTERS)


def train(flags: list[str], folder: Path, *, checkpoint: str = "") -> None:
    """Train as ``src/gpt2.py`` does with ``flags``; with a ``checkpoint``, resume from it.

    Raises:
        UserError: the product refuses the combination.
    """
    config = _resolved(flags)
    if checkpoint and config.topology.is_main:
        _leave_at(Path(checkpoint), config.run_dir)
    speaks = config.topology.is_main
    with logging_to_console(speaks=speaks), Interruption(speaks=speaks) as interruption:
        run(config, interruption)
    _done(folder, config)


def _leave_at(checkpoint: Path, run_dir: Path) -> None:
    """Copy the run of ``checkpoint`` to ``run_dir`` as a kill after that save would have left it."""
    others = [path.name for path in checkpoint.parent.glob("step-*") if path != checkpoint]
    shutil.copytree(checkpoint.parent, run_dir, ignore=shutil.ignore_patterns(COMPLETE_FILE, ".lock", *others))


def rewrite(flags: list[str], folder: Path, *, checkpoint: str) -> None:
    """Let the strategy of ``flags`` load a checkpoint, write it again, and validate.

    Raises:
        UserError: the product refuses the combination.
    """
    config, out = _resolved(flags), folder / "rewritten"
    device = bring_up(config.device, local_rank=config.topology.local_rank, threads=config.threads_per_device)
    with contextlib.nullcontext() if config.run_type == "baseline" else joined(config.topology, device):
        if config.topology.is_main:
            out.mkdir()
        reader = StateReader(Path(checkpoint))
        reader.require_shapes(parameter_shapes(config.model))
        with contextlib.closing(build_strategy(config, device)) as strategy:
            strategy.load_state(reader)
            shapes, writes = parameter_shapes(config.model), config.topology.is_main
            write_training_state(out, strategy.iter_state(), strategy.counters(), shapes=shapes, writes=writes)
            wrong = _wrong_weights(strategy, reader)
            val_loss, _ = validation_loss(config, strategy) or (math.nan, 0)
            barrier()
        same = {name: sha256_of(out / name) == sha256_of(Path(checkpoint) / name) for name in STATE_FILES if writes}
        _done(folder, config, same=same, wrong=wrong, val_loss=val_loss)
        barrier()


def _wrong_weights(strategy: Strategy, reader: StateReader) -> list[str]:
    """The weights that this rank holds whole and that differ from the checkpoint's rounded to the precision."""
    return [
        name
        for name, value in strategy.replicated_weights()
        if not torch.equal(value.cpu(), reader.state(name).weight.to(value.dtype))
    ]


def _resolved(flags: list[str]) -> RunConfig:
    options, problems = parse_arguments(flags)
    return resolve(options, topology=read_topology(), problems=problems)


def _done(folder: Path, config: RunConfig, **facts: Any) -> None:
    write_json_atomic(rank_file(folder, config.topology.rank), {"status": "done", "time": time.time(), **facts})
