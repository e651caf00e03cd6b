"""The command line of ``faults``: its help and its flags."""

from dsgpt.benchmarks.faults.command import PAGE, FaultOptions, run_faults
from dsgpt.benchmarks.faults.plan import KILLS, SEED
from dsgpt.benchmarks.harness.flags import SuiteFlags
from dsgpt.benchmarks.harness.suite import Suite

DESCRIPTION = """\
faults: kill ranks, launchers and whole runs at seeded instants, send signals, damage checkpoints, fill the disk; then
resume every run, which must end with the losses of an undisturbed run, to the last bit. Exit code 0: they all do; 1:
otherwise."""
EXAMPLES = """\
examples:
  .venv/bin/python src/benchmark.py faults
  .venv/bin/python src/benchmark.py faults --kills 200 --seed 1
  .venv/bin/python src/benchmark.py faults --table-from checkpoint/faults/faults.json"""


def _add_flags(flags: SuiteFlags) -> None:
    flags.number("--kills", default=KILLS, text=f"how many kills (default: {KILLS})")
    drawn = f"seed that draws victims and instants (default: {SEED}, as in docs/faults.md)"
    flags.number("--seed", default=SEED, text=drawn)
    flags.core("only what `make test` runs")


SUITE = Suite(
    description=DESCRIPTION, examples=EXAMPLES, add_flags=_add_flags, options=FaultOptions, run=run_faults, page=PAGE
)
