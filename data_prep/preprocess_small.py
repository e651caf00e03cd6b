"""Turn the first documents of a text into small token files; see --help."""

from dsgpt.common.command_line import run_script
from dsgpt.data.download import KEPT
from dsgpt.data.preparation import main_small

if __name__ == "__main__":
    run_script(main_small, kept=KEPT)
