"""Serve a model with OpenAI's completions: ``.venv/bin/python src/serve.py --checkpoint checkpoint/demo-zero1``."""

from dsgpt.common.command_line import run_script
from dsgpt.inference.commands import serve

if __name__ == "__main__":
    run_script(serve)
