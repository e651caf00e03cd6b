"""Turn token files into those of other trainers, and theirs into ours; see --help."""

from dsgpt.common.command_line import run_script
from dsgpt.data.exchange import main

if __name__ == "__main__":
    run_script(main)
