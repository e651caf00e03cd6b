"""Train GPT-2: ``python src/gpt2.py --help``, or under ``deepspeed`` or ``torchrun``."""

import sys

from dsgpt.main import leave, train

if __name__ == "__main__":
    leave(train(sys.argv[1:]))
