"""Run a benchmark suite, or remake the committed records: ``.venv/bin/python src/benchmark.py --help``."""

from dsgpt.benchmarks.suites import main
from dsgpt.common.command_line import run_script

if __name__ == "__main__":
    run_script(main)
