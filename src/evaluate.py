"""Measure how well a model predicts: ``.venv/bin/python src/evaluate.py --help``."""

from dsgpt.common.command_line import read_options, run_script
from dsgpt.common.text import next_line, script_words
from dsgpt.inference.requests import EvaluateRequest

DESCRIPTION = """\
Measure the perplexity and the bits per byte of a text under a model, or let lm-evaluation-harness evaluate it (--tasks;
install it with `.venv/bin/python -m pip install -e '.[eval]'`). The model is that of a
run, whichever strategy trained it, of a portable folder, or of a Hugging Face folder of a GPT-2."""
EXAMPLES = """\
examples:
  .venv/bin/python src/evaluate.py --checkpoint checkpoint/demo-zero1 --data data/python-stdlib/val.bin
  .venv/bin/python src/evaluate.py --checkpoint checkpoint/demo-zero1 --text README.md --stride 64
  .venv/bin/python src/evaluate.py --checkpoint exported/gpt2 --tasks lambada_openai,hellaswag --limit 100"""


def main() -> None:
    """Read the flags, evaluate, print."""
    request, problems = read_options(EvaluateRequest, description=DESCRIPTION, epilog=EXAMPLES, allow_abbrev=True)
    request.check(problems)
    problems.raise_if_any()
    from dsgpt.inference.evaluate import evaluate, lines_of  # noqa: PLC0415 - torch takes seconds; --help should not
    from dsgpt.machine.console import Console  # noqa: PLC0415

    for line in lines_of(evaluate(request, console=Console(speaks=True))):
        print(line)
    if not request.tasks:
        print(next_line(script_words("src/generate.py", "--checkpoint", request.checkpoint, "--prompt", "The")))


if __name__ == "__main__":
    run_script(main, kept="nothing was written")
