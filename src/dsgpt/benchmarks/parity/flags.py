"""The command line of ``parity``: its help and its flags."""

from dsgpt.benchmarks.harness.flags import SuiteFlags
from dsgpt.benchmarks.harness.suite import Suite
from dsgpt.benchmarks.harness.tested import STRATEGIES
from dsgpt.benchmarks.parity.command import PAGE, ParityOptions, run_parity

DESCRIPTION = """\
parity: train the same small model under every strategy, at 1, 2, 4 and 8 ranks, with and without accumulation, with
AdamW and SGD, in fp32 and bf16, and compare every step with plain PyTorch; then plant known bugs and show that each one
is caught. Exit code 0: all are equal and all bugs were caught; 1: otherwise."""
EXAMPLES = f"""\
examples:
  .venv/bin/python src/benchmark.py parity
  .venv/bin/python src/benchmark.py parity --core
  .venv/bin/python src/benchmark.py parity --only zero1 zero3 --ranks 2
  .venv/bin/python src/benchmark.py parity --table-from checkpoint/parity/parity.json

strategies: {", ".join(STRATEGIES)}"""


def _add_flags(flags: SuiteFlags) -> None:
    flags.parser.add_argument(
        "--ranks",
        type=flags.reader.whole("--ranks", low=1),
        nargs="+",
        default=(),
        metavar="N",
        help="only these numbers of ranks (default: 1, 2, 4 and 8)",
    )
    flags.only("STRATEGY", "strategies")
    flags.core("only what `make test` runs: each strategy in a few trainings")
    flags.device("cpu, where every machine can run everything, or cuda with a GPU for each rank")


SUITE = Suite(
    description=DESCRIPTION, examples=EXAMPLES, add_flags=_add_flags, options=ParityOptions, run=run_parity, page=PAGE
)
