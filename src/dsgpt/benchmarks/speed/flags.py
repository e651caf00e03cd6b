"""The command line of ``speed``: its help and its flags."""

from dsgpt.benchmarks.harness.flags import SuiteFlags
from dsgpt.benchmarks.harness.suite import Suite
from dsgpt.benchmarks.speed.command import PAGE, SpeedOptions, run_speed

DESCRIPTION = """\
speed: let this program, nanoGPT and Hugging Face's GPT-2 train in turn with the same shapes, precision, threads and
tokens, and compare their tokens per second; compare DeepSpeed's engine with the plain loop, and several devices with
one; measure peak memory, start-up, and what this machine can do. Exit code 0: every goal was reached; 1: otherwise."""
EXAMPLES = """\
examples:
  git clone https://github.com/karpathy/nanoGPT /tmp/nanoGPT
  .venv/bin/python src/benchmark.py speed --peer nanogpt=/tmp/nanoGPT
  .venv/bin/python src/benchmark.py speed --peer nanogpt=/tmp/nanoGPT --only small memory --rounds 9
  .venv/bin/python src/benchmark.py speed --device cuda --peer nanogpt=/tmp/nanoGPT"""


def _add_flags(flags: SuiteFlags) -> None:
    flags.number("--rounds", default=5, low=1, text="turns of every trainer in a row (default: 5)")
    flags.peers("checkouts to compare with")
    flags.only("KEY", "rows, by the beginnings of their keys")
    flags.device("cpu or cuda")


SUITE = Suite(
    description=DESCRIPTION, examples=EXAMPLES, add_flags=_add_flags, options=SpeedOptions, run=run_speed, page=PAGE
)
