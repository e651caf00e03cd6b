"""Plan a training before it is paid for: ``.venv/bin/python src/plan.py --help``."""

import sys
from pathlib import Path

from dsgpt.advising.options import read_options
from dsgpt.common.script import run_script

REPOSITORY = Path(__file__).resolve().parent.parent


def main() -> int:
    """Read the flags, and calibrate, plan or recommend."""
    options, problems = read_options(sys.argv[1:])
    from dsgpt.advising.command import act  # noqa: PLC0415 - --help needs none of it

    return act(options, problems, repository=REPOSITORY)


if __name__ == "__main__":
    run_script(main, kept="nothing was written")
