"""Measure how well a model predicts: ``.venv/bin/python src/evaluate.py --help``."""

from pathlib import Path
from typing import Any

from dsgpt.common.command_line import Parser, Reader, read_words, run_script
from dsgpt.common.text import next_line, script_words
from dsgpt.config.options import DEVICES, WHICH_CHECKPOINT
from dsgpt.inference.requests import PRECISIONS, QUANTIZATIONS
from dsgpt.inference.requests import EvaluateRequest as Request

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
    reader = Reader()
    flags = read_words(_build_parser(reader), reader)
    names = set(Request.__dataclass_fields__)
    given: dict[str, Any] = {name: value for name, value in vars(flags).items() if name in names and value is not None}
    given["tasks"] = tuple(name for name in (flags.tasks or "").split(",") if name)
    request = Request(**given)
    request.check(reader.problems)
    reader.problems.raise_if_any()
    from dsgpt.inference.evaluate import evaluate, lines_of  # noqa: PLC0415 - torch takes seconds; --help should not
    from dsgpt.machine.console import Console  # noqa: PLC0415

    for line in lines_of(evaluate(request, console=Console(speaks=True))):
        print(line)
    if not flags.tasks:
        print(next_line(script_words("src/generate.py", "--checkpoint", flags.checkpoint, "--prompt", "The")))


def _build_parser(reader: Reader) -> Parser:
    parser = Parser(description=DESCRIPTION, epilog=EXAMPLES, allow_abbrev=True)
    paths = (
        ("--checkpoint", True, "DIR", "run folder, one checkpoint in it, portable folder, or Hugging Face folder"),
        ("--data", False, "BIN", "token file to predict"),
        ("--text", False, "FILE", "text file to predict"),
        ("--include_path", False, "DIR", "folder with tasks of your own, for --tasks"),
        ("--output", False, "JSON", "also write the figures there"),
    )
    for flag, required, metavar, text in paths:
        parser.add_argument(flag, type=Path, required=required, metavar=metavar, help=text)
    parser.add_argument("--tasks", metavar="NAMES", help="tasks of lm-evaluation-harness, with commas between them")
    for flag, default, text in (
        ("--limit", None, "most examples of each task (default: all)"),
        ("--seq_length", None, "tokens of a window (default: as in training; of Hugging Face's models the context)"),
        ("--stride", None, "tokens from one window to the next; a shorter stride gives each token more before it, and "
         "takes longer (default: those of a window)"),
        ("--windows", None, "predict the first N windows of --data, as a validation of training does (default: all)"),
        ("--batch_size", Request.batch_size, f"windows or examples at a time (default: {Request.batch_size})"),
    ):  # fmt: skip
        parser.add_argument(flag, type=reader.whole(flag, low=1), default=default, metavar="N", help=text)
    newest_or_best = "checkpoint of a run: the newest, or the one with the lowest validation loss"
    for flag, allowed, standard, text in (
        ("--which", WHICH_CHECKPOINT, "latest", newest_or_best),
        ("--precision", PRECISIONS, "fp32", "of weights and arithmetic"),
        ("--quantize", QUANTIZATIONS, "none", "int8: weights in 8 bits, which lose a little"),
        ("--device", DEVICES, "auto", "where to compute"),
    ):
        parser.add_argument(
            flag,
            type=reader.choice(flag, allowed, standard),
            default=standard,
            metavar="{" + ",".join(allowed) + "}",
            help=f"{text} (default: {standard})",
        )
    return parser


if __name__ == "__main__":
    run_script(main, kept="nothing was written")
