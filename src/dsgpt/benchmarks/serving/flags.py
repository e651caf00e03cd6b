"""The command line of ``serving``: its help and its flags."""

from pathlib import Path

from dsgpt.benchmarks.harness.flags import SuiteFlags
from dsgpt.benchmarks.harness.suite import Suite
from dsgpt.benchmarks.serving.command import CHECKPOINT, PAGE, REQUESTS, ROUNDS, TIMES, ServingOptions, run_serving

DESCRIPTION = """\
serving: ask a server of src/serve.py for several times the completions that it can give, and ask again when it refuses.
Exit code 0: every request got one answer, the right text, and the memory did not grow; 1: otherwise."""
EXAMPLES = """\
examples:
  .venv/bin/python src/benchmark.py serving --checkpoint checkpoint/demo-zero1
  .venv/bin/python src/benchmark.py serving --requests 100 --times 8 --rounds 1"""


def _add_flags(flags: SuiteFlags) -> None:
    flags.parser.add_argument(
        "--checkpoint",
        type=Path,
        default=CHECKPOINT,
        metavar="DIR",
        help=f"what to serve, as for src/serve.py (default: {CHECKPOINT})",
    )
    for flag, default, text in (
        ("--requests", REQUESTS, "requests of a round"),
        ("--times", TIMES, "arrivals per second, in multiples of what the server can answer"),
        ("--rounds", ROUNDS, "rounds on the same server"),
    ):
        flags.number(flag, default=default, low=1, text=f"{text} (default: {default})")
    flags.device("cpu or cuda")


SUITE = Suite(
    description=DESCRIPTION, examples=EXAMPLES, add_flags=_add_flags, options=ServingOptions, run=run_serving, page=PAGE
)
