"""One rank of one cell of the resume suite."""

import contextlib
import math
import shutil
from pathlib import Path

import torch

from dsgpt.benchmarks.launch import config_of, write_end
from dsgpt.checkpoints import store
from dsgpt.checkpoints.training_state import COUNTERS, MOMENTS, StateReader, complete_state, write_shards
from dsgpt.common.files import sha256_of
from dsgpt.machine.console import logging_to_console
from dsgpt.machine.device import barrier, bring_up, gather_objects, joined
from dsgpt.machine.launcher import Interruption
from dsgpt.model.gpt2 import parameter_shapes
from dsgpt.record.schema import COMPLETE_FILE
from dsgpt.strategies.base import build_strategy
from dsgpt.training.run import run
from dsgpt.training.trainer import validation_loss


def train(flags: list[str], folder: Path, *, checkpoint: str = "") -> None:
    """Train as ``src/gpt2.py`` does with ``flags``; with a ``checkpoint``, resume from it.

    Raises:
        UserError: the product refuses the combination.
    """
    config = config_of(flags)
    main = config.topology.is_main
    if checkpoint and main:  # copy its run as a kill after that save would have left it
        saved = Path(checkpoint)
        others = [path.name for path in saved.parent.glob("step-*") if path != saved]
        left_out = shutil.ignore_patterns(COMPLETE_FILE, ".lock", *others)
        shutil.copytree(saved.parent, config.run_dir, ignore=left_out)
    with logging_to_console(speaks=main), Interruption(speaks=main) as interruption:
        run(config, interruption)
    write_end(folder, config.topology.rank)


def rewrite(flags: list[str], folder: Path, *, checkpoint: str) -> None:
    """Let the strategy of ``flags`` load a checkpoint, write it again, and validate.

    Raises:
        UserError: the product refuses the combination.
    """
    config, out = config_of(flags), folder / "rewritten"
    main, shapes = config.topology.is_main, parameter_shapes(config.model)
    device = bring_up(config.device, local_rank=config.topology.local_rank, threads=config.threads_per_device)
    with contextlib.nullcontext() if config.run_type == "baseline" else joined(config.topology, device):
        if main:
            out.mkdir()
        reader = StateReader(Path(checkpoint))
        reader.require_shapes(shapes)
        with contextlib.closing(build_strategy(config, device)) as strategy:
            strategy.load_state(reader)
            topology = config.topology
            written = write_shards(out, strategy.shards(), rank=topology.rank, ranks=topology.world_size)
            parts = gather_objects(written)
            if main:
                complete_state(out, parts, strategy.counters(), shapes=shapes)
            wrong = [  # what this rank holds whole must be the checkpoint's weights, rounded to the precision
                name
                for name, value in strategy.replicated_weights()
                if not torch.equal(value.cpu(), reader.read(name).to(value.dtype))
            ]
            val_loss, _ = validation_loss(config, strategy) or (math.nan, 0)
            barrier()
        same = {COUNTERS: sha256_of(out / COUNTERS) == sha256_of(Path(checkpoint) / COUNTERS)}
        again = StateReader(out)
        for file, moments in ((store.WEIGHTS, (None,)), (MOMENTS, ("exp_avg", "exp_avg_sq"))):
            values = ((again.read(name, key), reader.read(name, key)) for name in shapes for key in moments)
            same[file] = all(torch.equal(one, two) for one, two in values)
        write_end(folder, config.topology.rank, same=same, wrong=wrong, val_loss=val_loss)
        barrier()
