"""A rank of ``test_phases.py``: phases of a training on a stand-in GPU, as one rank of as many as its first word says.

The other ranks do not exist, so nothing is sent. The last word names the file for the most bytes of each phase.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from training_runs import resolved

from dsgpt.benchmarks.stand_in_gpu import stand_in_gpu
from dsgpt.checkpoints.training_state import write_shards
from dsgpt.machine.device import bring_up, joined
from dsgpt.machine.launcher import exit_rank
from dsgpt.machine.topology import read_topology
from dsgpt.planner.formulas import peak_memory
from dsgpt.strategies.base import build_strategy
from dsgpt.training.run_description import setup_of
from dsgpt.training.trainer import training_batches

GPUS = 8
"""Of a machine."""
PHASES = {
    "start": {"start"},
    "forward": {"forward", "loss"},
    "rest": {"backward", "reduction", "step"},
    "optimizer": {"step"},
    "evaluation": {"evaluation"},
    "save": {"save"},
}
"""Each phase with the planner's moments in it."""


def measure(ranks: int, words: list[str], folder: Path) -> dict[str, tuple[int, int | None]]:
    """The most bytes of each phase, measured and predicted; None where the planner has no such moment."""
    places = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": min(ranks, GPUS)}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "rehearsal"}
    if "baseline" not in words:
        os.environ.update({name: str(value) for name, value in places.items()} | meeting)
    with contextlib.ExitStack() as stack:
        ledger = stack.enter_context(stand_in_gpu(gpus=GPUS, alone=True))
        config = resolved(words, read_topology())
        device = bring_up("cuda", local_rank=0, threads=1)
        if "baseline" not in words:
            stack.enter_context(joined(config.topology, device, store=mock.Mock()))
        # ZeRO makes its weights flat on a GPU only where it has room for both, which the planner does not count.
        no_room = mock.patch.object(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(total_memory=0))
        with ledger.phase("start"), no_room:
            strategy = stack.enter_context(contextlib.closing(build_strategy(config, device)))
        batches = stack.enter_context(contextlib.closing(training_batches(config, first_step=0)))
        for step in (1, 2):
            strategy.train_step(batches, step)
        start = ledger.peaks["start"]
        ledger.peaks.clear()
        strategy.train_step(batches, 3)
        peaks = {"start": start, "forward": ledger.peaks.pop("forward"), "optimizer": ledger.peaks["optimizer"]}
        peaks["rest"] = max(ledger.peaks.values())
        with ledger.phase("evaluation"):
            strategy.eval_step(batches)
        with ledger.phase("save"):
            write_shards(folder, strategy.shards(), rank=0, ranks=ranks)
        peaks |= {name: ledger.peaks[name] for name in ("evaluation", "save")}
    setup = setup_of(config)
    without = set() if setup.computes_loss(0) else {"loss", "forward"}
    among = {name: moments - without for name, moments in PHASES.items()}
    predicted = {
        name: peak_memory(setup, device="cuda", among=own).total if own else None for name, own in among.items()
    }
    return {name: (peaks[name], predicted[name]) for name in PHASES}


if __name__ == "__main__":
    _, ranks, *words, out = sys.argv
    result = measure(int(ranks), words, Path(out).parent)
    Path(out).write_text(json.dumps(result), encoding="utf-8")
    exit_rank(0)
