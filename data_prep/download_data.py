"""Fetch a text set and keep its documents as JSON lines; see --help."""

from dsgpt.common.command_line import run_script
from dsgpt.data.download import KEPT, main

if __name__ == "__main__":
    run_script(main, kept=KEPT)
