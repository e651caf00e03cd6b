"""The command line of ``plan``: its help and its flags."""

from dsgpt.benchmarks.harness.flags import SuiteFlags
from dsgpt.benchmarks.harness.suite import Suite
from dsgpt.benchmarks.plan.command import PAGE, PlanOptions, run_plan

DESCRIPTION = """\
plan: predict the peak memory, the bytes sent and the step time of small trainings under every strategy, then measure
them: the most memory of tensors in a step on every rank, PyTorch's MemTracker as a second witness, DeepSpeed's own
estimator beside it, and step times in rounds without a profiler. Takes about 6 minutes on 2 cores. Exit code 0: every
predicted peak is at most 10% over and 3% under the measured one, and the bytes sent are exact; 1: otherwise."""
EXAMPLES = """\
examples:
  .venv/bin/python src/benchmark.py plan
  .venv/bin/python src/benchmark.py plan --only zero fsdp --rounds 0
  .venv/bin/python src/benchmark.py plan --table-from checkpoint/plan/plan.json"""


def _add_flags(flags: SuiteFlags) -> None:
    flags.number("--rounds", default=2, text="rounds of step times; 0 for memory only (default: 2)")
    flags.only("KEY", "cells, by the beginnings of their keys")


SUITE = Suite(
    description=DESCRIPTION, examples=EXAMPLES, add_flags=_add_flags, options=PlanOptions, run=run_plan, page=PAGE
)
