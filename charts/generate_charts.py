"""Draw the comparison of two or more training runs: ``.venv/bin/python charts/generate_charts.py --help``."""

from dsgpt.common.script import run_script
from dsgpt.reports.command import main

if __name__ == "__main__":
    run_script(main)
