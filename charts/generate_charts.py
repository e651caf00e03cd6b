"""Draw the comparison of two or more training runs: ``.venv/bin/python charts/generate_charts.py --help``."""

from dsgpt.charts.generate import main
from dsgpt.common.command_line import run_script

if __name__ == "__main__":
    run_script(main)
