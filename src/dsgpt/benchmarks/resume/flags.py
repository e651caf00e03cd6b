"""The command line of ``resume``: its help and its flags."""

from dsgpt.benchmarks.harness.flags import SuiteFlags
from dsgpt.benchmarks.harness.suite import Suite
from dsgpt.benchmarks.resume.command import PAGE, ResumeOptions, run_resume
from dsgpt.benchmarks.resume.matrix import PAIRS, SEED

DESCRIPTION = """\
resume: let every strategy load the same checkpoint and write it again, which must give the same bytes. Then let pairs
of strategies share a run: one trains 10 steps and saves, the other resumes for 10 more, which must give the losses of
an undisturbed run. Exit code 0: they do; 1: otherwise."""
EXAMPLES = """\
examples:
  .venv/bin/python src/benchmark.py resume
  .venv/bin/python src/benchmark.py resume --pairs 100 --seed 1
  .venv/bin/python src/benchmark.py resume --table-from checkpoint/resume/resume.json"""


def _add_flags(flags: SuiteFlags) -> None:
    flags.number("--pairs", default=PAIRS, text=f"how many pairs of strategies (default: {PAIRS})")
    flags.number("--seed", default=SEED, text=f"seed that draws the pairs (default: {SEED}, as in docs/resume.md)")
    flags.core("only what `make test` runs")


SUITE = Suite(
    description=DESCRIPTION, examples=EXAMPLES, add_flags=_add_flags, options=ResumeOptions, run=run_resume, page=PAGE
)
