"""``src/gpt2.py`` with a bug of the parity suite planted: the first word is its name, empty for none."""

import contextlib
import sys

from dsgpt.benchmarks.parity_rank import BUGS, LOGITS_AT_ONCE
from dsgpt.machine.launcher import exit_rank
from dsgpt.model.linear_cross_entropy import CHUNKS
from dsgpt.training.command import train

bug, *words = sys.argv[1:]
CHUNKS.update(dict.fromkeys(CHUNKS, LOGITS_AT_ONCE))
with BUGS[bug].planted() if bug else contextlib.nullcontext():
    exit_rank(train(words))
