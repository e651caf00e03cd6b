"""The command line of ``saving``: its help and its flags."""

from dsgpt.benchmarks.harness.flags import SuiteFlags
from dsgpt.benchmarks.harness.suite import Suite
from dsgpt.benchmarks.saving.command import PAGE, SavingOptions, run_saving

DESCRIPTION = """\
saving: train the model `tiny` with --save_mode sync and async in turn, and compare how long training waits for each
checkpoint. Exit code 0: async waits at most a fifth of the time; 1: longer."""
EXAMPLES = """\
examples:
  .venv/bin/python src/benchmark.py saving
  .venv/bin/python src/benchmark.py saving --rounds 10"""


def _add_flags(flags: SuiteFlags) -> None:
    flags.number("--rounds", default=5, low=1, text="runs of each save mode (default: 5)")
    flags.device("cpu or cuda")


SUITE = Suite(
    description=DESCRIPTION, examples=EXAMPLES, add_flags=_add_flags, options=SavingOptions, run=run_saving, page=PAGE
)
