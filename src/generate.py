"""Continue text: ``.venv/bin/python src/generate.py --checkpoint checkpoint/demo-zero1 --prompt "def main("``."""

from dsgpt.common.command_line import run_script
from dsgpt.inference.commands import generate

if __name__ == "__main__":
    run_script(generate, kept="the texts so far were printed")
