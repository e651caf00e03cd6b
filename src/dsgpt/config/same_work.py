"""What equal work is: the facts that are compared, and what a flag or a key of the recipe can change.

Two runs did the same work if all facts agree; ``record/work.py`` reads them from records. Every flag of ``src/gpt2.py``
and every key of a recipe declares, where it is defined, what it means for them. A test compares two runs that differ
only in it, and fails for a flag or key that declares nothing.
"""

from typing import NamedTuple

WORK_FACTS = (
    "global batch",
    "sequence length",
    "train data",
    "tokens in the train file",
    "validation data",
    "tokens in the validation file",
    "validation windows",
    "model n_layer",
    "model n_head",
    "model n_embd",
    "model block_size",
    "model vocab_size",
    "model dropout",
    "optimizer steps",
    "tokens",
    "precision",
)
"""Facts about the amount of work, in the order in which they are shown."""

TRAINING_FACTS = (
    "initial weights",
    "optimizer type",
    "optimizer settings",
    "learning rate",
    "scheduler",
    "gradient clipping",
    "loss scaling",
    "quantized communication",
    "seed",
    "changed at resume",
)
"""Facts that change the training, and not the amount of work."""

LATER_FACTS = frozenset(
    {
        "tokens in the train file",
        "tokens in the validation file",
        "validation windows",
        "optimizer settings",
        "initial weights",
        "loss scaling",
        "quantized communication",
        "changed at resume",
    }
)
"""Facts that records of generation 2.1 may lack. They are not compared if no run recorded them."""

RESUME_FACTS = frozenset({"quantized communication", "changed at resume"})
"""Those of ``LATER_FACTS`` that a resume may change. They are compared if a run was resumed."""


class ChangesTraining:
    """Of a flag or key: it changes the training. At least one of ``facts`` then differs."""

    def __init__(self, *facts: str) -> None:
        self.facts = facts


class ExecutionOnly(NamedTuple):
    """Of a flag or key that may differ between runs that did the same work.

    With dropout, another split over ranks or micro batches draws other masks. The work is the same; charts judge the
    losses separately (``equal loss``).
    """

    why: str


EXECUTES = ExecutionOnly("changes where a step is computed, not what is computed; the parity suite compares the losses")
SPLITS = ExecutionOnly("splits the same global batch; sums over it differ only in order, which the parity suite bounds")
PLACES = ExecutionOnly("changes where state is kept or how much is sent at once; the values are the same")
PRINTS = ExecutionOnly("prints or measures")
PROFILES = ExecutionOnly("measures some steps, which compute the same; figures of speed leave them out")
SAVES = ExecutionOnly("changes when, where or how a state is written, not its values")
SWAPS = ExecutionOnly("changes how files are read and written while state is swapped")
NAMES = ExecutionOnly("a name; the entries of the file are judged one by one")
RESUMES = ExecutionOnly("a resumed run is the same run; changes that were allowed count under --allow_changed")
