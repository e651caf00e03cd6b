"""Train GPT-2: ``python src/gpt2.py --help``, or under ``deepspeed`` or ``torchrun``."""

import sys

from dsgpt.common.script import prepare_output
from dsgpt.main import leave, train

if __name__ == "__main__":
    prepare_output(lose=True)  # train.log has every line; a reader that has gone does not end the run
    leave(train(sys.argv[1:]))
