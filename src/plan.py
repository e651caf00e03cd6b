"""Plan a training before it is paid for: ``.venv/bin/python src/plan.py --help``."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dsgpt.common.command_line import run_script
from dsgpt.planner.options import read_plan_options

if TYPE_CHECKING:
    from dsgpt.planner.plan import Plan


def main() -> int:
    """Read the flags, and calibrate, plan or recommend."""
    options, problems = read_plan_options(sys.argv[1:])
    from dsgpt.planner.search import act  # noqa: PLC0415 - --help needs none of it

    return act(options, problems, draw=_draw)


def _draw(plan: "Plan", path: Path) -> None:
    from dsgpt.charts.memory import draw_plan  # noqa: PLC0415 - matplotlib takes a second

    draw_plan(plan, path)


if __name__ == "__main__":
    run_script(main, kept="nothing was written")
