"""Turn the first documents of a text into small token files; see --help."""

from functools import partial

from dsgpt.common.command_line import run_script
from dsgpt.data.preparation import KEPT, main

if __name__ == "__main__":
    run_script(partial(main, small=True), kept=KEPT)
