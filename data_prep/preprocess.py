"""Turn text into token files for training; see --help."""

from dsgpt.common.command_line import run_script
from dsgpt.data.preparation import KEPT, main

if __name__ == "__main__":
    run_script(main, kept=KEPT)
