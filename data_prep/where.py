"""Print the documents behind a token, a step of a run, or its spikes; see --help."""

from dsgpt.common.command_line import run_script
from dsgpt.record.readings import main

if __name__ == "__main__":
    run_script(main)
