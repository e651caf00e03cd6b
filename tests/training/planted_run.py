"""``src/gpt2.py`` with a bug planted: the first word names one of the parity suite or of the museum; empty for none."""

import contextlib
import sys

from dsgpt.benchmarks import museum
from dsgpt.benchmarks.parity_rank import BUGS, LOGITS_AT_ONCE
from dsgpt.machine.launcher import exit_rank
from dsgpt.model.linear_cross_entropy import CHUNKS
from dsgpt.training.command import train


def nan_on_rank_1(norm, strategy, gradients):
    return norm(strategy, gradients) * (1.0 if strategy._rank == 0 else float("nan"))


HERE = {
    "": contextlib.nullcontext,
    "nan-on-rank-1": museum.replaced("dsgpt.strategies.pytorch:TorchStrategy", "_global_norm", nan_on_rank_1),
}
bug, *words = sys.argv[1:]
CHUNKS.update(dict.fromkeys(CHUNKS, LOGITS_AT_ONCE))
museum.load()
planted = BUGS[bug].planted if bug in BUGS else HERE.get(bug) or museum.EXHIBITS[bug].plant
with planted():
    exit_rank(train(words))
