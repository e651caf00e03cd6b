"""Join the parts of a preparation by shards; see --help."""

from functools import partial

from dsgpt.common.command_line import run_script
from dsgpt.data.preparation import KEPT, main

if __name__ == "__main__":
    run_script(partial(main, merge=True), kept=KEPT)
