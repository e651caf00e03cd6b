"""Measure how well a model predicts: ``.venv/bin/python src/evaluate.py --help``."""

from dsgpt.common.command_line import run_script
from dsgpt.inference.commands import evaluate

if __name__ == "__main__":
    run_script(evaluate, kept="nothing was written")
