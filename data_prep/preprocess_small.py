"""Turn the first documents of a text into small token files; see --help."""

from dsgpt.common.script import run_script
from dsgpt.prepare.command import main_small
from dsgpt.prepare.console import KEPT

if __name__ == "__main__":
    run_script(main_small, kept=KEPT)
