"""Fetch a text set and keep its documents as JSON lines; see --help."""

from dsgpt.common.script import run_script
from dsgpt.prepare.console import KEPT
from dsgpt.prepare.download import main

if __name__ == "__main__":
    run_script(main, kept=KEPT)
