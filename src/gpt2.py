"""Train GPT-2: ``.venv/bin/python src/gpt2.py --help``, or under ``deepspeed`` or ``torchrun``."""

import sys

from dsgpt.common.command_line import prepare_output
from dsgpt.machine.launcher import exit_rank
from dsgpt.training.command import train

if __name__ == "__main__":
    prepare_output(lose=True)  # a closed output does not end the run; train.log has every line
    exit_rank(train(sys.argv[1:]))
