"""Write weights for other programs: ``.venv/bin/python src/convert.py --from checkpoint/demo-zero1 --to hf OUT``."""

from dsgpt.common.command_line import run_script
from dsgpt.inference.commands import convert

if __name__ == "__main__":
    run_script(convert, kept="nothing was written")
