"""Turn text into token files for training; see --help."""

from dsgpt.common.script import run_script
from dsgpt.prepare.command import main
from dsgpt.prepare.console import KEPT

if __name__ == "__main__":
    run_script(main, kept=KEPT)
