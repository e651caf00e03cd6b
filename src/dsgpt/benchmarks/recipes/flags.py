"""The command line of ``recipes``: its help and its flags."""

from dsgpt.benchmarks.harness.flags import SuiteFlags
from dsgpt.benchmarks.harness.suite import Suite
from dsgpt.benchmarks.recipes.command import PAGE, RecipesOptions, run_recipes
from dsgpt.benchmarks.recipes.grid import SEARCHES

DESCRIPTION = """\
recipes: train small models with many learning rates, batches and schedules on the same tokens, and show which learns
most; the recipes in ds_configs/sizes come from it. Exit code 0: every training ended."""
EXAMPLES = f"""\
examples:
  .venv/bin/python src/benchmark.py recipes
  .venv/bin/python src/benchmark.py recipes --size demo

sizes: {", ".join(SEARCHES)}"""


def _add_flags(flags: SuiteFlags) -> None:
    flags.parser.add_argument(
        "--size",
        type=flags.reader.choice("--size", tuple(SEARCHES), None),
        nargs="+",
        default=(),
        metavar="SIZE",
        help="only these model sizes (default: all)",
    )
    flags.device("cpu, one training per core, or cuda, one at a time")


SUITE = Suite(
    description=DESCRIPTION, examples=EXAMPLES, add_flags=_add_flags, options=RecipesOptions, run=run_recipes, page=PAGE
)
