"""Continue text: ``.venv/bin/python src/generate.py --checkpoint checkpoint/demo-zero1 --prompt "def main("``."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsgpt.common.command_line import Parser, Reader, complain, read_words, run_script
from dsgpt.common.errors import Problems, UserError
from dsgpt.config.options import DEVICES, WHICH_CHECKPOINT
from dsgpt.inference.requests import PRECISIONS, QUANTIZATIONS
from dsgpt.inference.requests import GenerateRequest as Request
from dsgpt.inference.text import CtrlC

if TYPE_CHECKING:
    from dsgpt.inference.sample import Writer

DESCRIPTION = """\
Continue prompts with the model of a run, whichever strategy trained it, of a portable folder, or of a Hugging Face
folder of a GPT-2. A text ends before an end-of-text token or a --stop text, after --max_new_tokens, or where the
model's context is full. --seed repeats the texts, at any --batch_size. Ctrl-C prints what there is."""
EXAMPLES = """\
examples:
  .venv/bin/python src/generate.py --checkpoint checkpoint/demo-zero1 --prompt "def main("
  .venv/bin/python src/generate.py --checkpoint checkpoint/demo-zero1/step-00000200 --prompt "import" --temperature 0
  .venv/bin/python src/generate.py --checkpoint checkpoint/demo-zero1 --prompt "import" --prompt "class" --num_samples 4
  head -9 src/gpt2.py | .venv/bin/python src/generate.py --checkpoint checkpoint/demo-zero1 - --stop "def " --stream
  .venv/bin/python src/generate.py --checkpoint exported/gpt2 --precision bf16 --interactive"""
LINE = "-" * 80


def main() -> None:
    """Read the flags, continue the prompts, print."""
    reader = Reader()
    flags = read_words(_build_parser(reader), reader)
    request = _request(flags, reader.problems)
    prompts = _prompts(flags, reader.problems)
    reader.problems.raise_if_any()
    from dsgpt.inference.sample import Writer  # noqa: PLC0415 - torch takes seconds; --help should not

    writer = Writer(request)
    if flags.interactive:
        _converse(writer)
    else:
        _print_texts(writer, prompts, stream=flags.stream)


def _print_texts(writer: "Writer", prompts: list[str], *, stream: bool) -> None:
    full = False
    with CtrlC() as ctrl_c:
        for text in writer.texts(prompts, show=_show if stream else None, stopped=partial(getattr, ctrl_c, "asked")):
            print("" if stream else text, LINE, sep="\n", flush=True)
            full |= text.ended == "context"
    if full:
        _note_context(writer)
    if ctrl_c.asked:
        raise KeyboardInterrupt


def _converse(writer: "Writer") -> None:
    """Continue every line of the input, until it ends; Ctrl-C ends the text that is being written."""
    interactive = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if interactive else "")
        except (EOFError, KeyboardInterrupt):
            if interactive:
                print()
            return
        try:
            with CtrlC() as ctrl_c:
                for text in writer.texts([line], show=_show, stopped=partial(getattr, ctrl_c, "asked")):
                    print(flush=True)
                    if text.ended == "context":
                        _note_context(writer)
        except UserError as error:
            complain(error.problems, 0)


def _note_context(writer: "Writer") -> None:
    print(f"note: a text ends where the model's context of {writer.context:,} tokens is full", file=sys.stderr)


def _show(piece: str) -> None:
    print(piece, end="", flush=True)


def _request(flags: argparse.Namespace, problems: Problems) -> Request:
    """The request, checked as far as its values could be read."""
    names = set(Request.__dataclass_fields__)
    given: dict[str, Any] = {name: value for name, value in vars(flags).items() if name in names and value is not None}
    given["stop"] = tuple(flags.stop)
    if flags.stream and "batch_size" in given:
        problems.add("--stream writes one text at a time: leave --batch_size out")
    request = Request(**given)
    request.check(problems)
    return request


def _prompts(flags: argparse.Namespace, problems: Problems) -> list[str]:
    """The prompts of all flags; the start of a document if there are none."""
    prompts = list(flags.prompt)
    if flags.stdin not in (None, "-") and not problems:  # otherwise it may be the value of an unknown flag
        problems.add(f"{flags.stdin!r} is neither a flag nor the value of one: only - for the standard input")
    if flags.interactive and (prompts or flags.prompt_file or flags.stdin):
        problems.add("--interactive reads its prompts itself: leave other prompts out")
    elif flags.prompt_file is not None and str(flags.prompt_file) != "-":
        _read(flags.prompt_file.read_bytes, f"--prompt_file {flags.prompt_file}", prompts, problems)
    elif flags.prompt_file is not None or flags.stdin == "-":
        _read(sys.stdin.buffer.read, "standard input", prompts, problems)
    return prompts or [""]


def _read(read: Callable[[], bytes], what: str, prompts: list[str], problems: Problems) -> None:
    """Add a whole file as one prompt, without the line break at its end."""
    try:
        prompts.append(read().decode("utf-8").removesuffix("\n"))
    except OSError as error:
        problems.add(f"{what}: cannot be read ({error.strerror})")
    except UnicodeDecodeError:
        problems.add(f"{what}: is not valid UTF-8 text")


def _build_parser(reader: Reader) -> argparse.ArgumentParser:
    parser = Parser(description=DESCRIPTION, epilog=EXAMPLES, allow_abbrev=True)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="DIR",
        help="run folder, one checkpoint in it, portable folder, or Hugging Face folder of a GPT-2",
    )
    _add_choices(parser, reader)
    _add_prompts(parser)
    _add_whole_numbers(parser, reader)
    _add_numbers(parser, reader)
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end a text before this; may be repeated"
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the step of a token, for GPUs; on CPUs it is slower than without",
    )
    parser.add_argument("--stream", action="store_true", help="print each text while it is generated")
    parser.add_argument(
        "--interactive", action="store_true", help="continue each line that is typed; Ctrl-D ends, Ctrl-C ends a text"
    )
    return parser


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stdin", nargs="?", metavar="-", help="continue the text of the standard input")
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue; may be repeated (default: none, the start of a document)",
    )
    parser.add_argument(
        "--prompt_file", type=Path, metavar="FILE", help="text file to continue; - is the standard input"
    )


def _add_choices(parser: argparse.ArgumentParser, reader: Reader) -> None:
    newest_or_best = "checkpoint of a run: the newest, or the one with the lowest validation loss"
    for flag, allowed, default, text in (
        ("--which", WHICH_CHECKPOINT, "latest", newest_or_best),
        ("--precision", PRECISIONS, "fp32", "of weights and arithmetic"),
        ("--quantize", QUANTIZATIONS, "none", "int8: weights in 8 bits, which lose a little, with --precision bf16"),
        ("--device", DEVICES, "auto", "where to compute"),
    ):
        parser.add_argument(
            flag,
            type=reader.choice(flag, allowed, default),
            default=default,
            metavar="{" + ",".join(allowed) + "}",
            help=f"{text} (default: {default})",
        )


def _add_whole_numbers(parser: argparse.ArgumentParser, reader: Reader) -> None:
    wholes = (
        ("--max_new_tokens", 1, 100, "N", "tokens to add"),
        ("--num_samples", 1, 1, "N", "continuations of each prompt"),
        ("--top_k", 1, 50, "K", "sample from the K likeliest"),
        ("--seed", 0, 1337, "N", "same seed, same text"),
    )
    for flag, low, default, metavar, text in wholes:
        parser.add_argument(
            flag,
            type=reader.whole(flag, low=low),
            default=default,
            metavar=metavar,
            help=f"{text} (default: {default})",
        )
    parser.add_argument(
        "--batch_size",
        type=reader.whole("--batch_size", low=1),
        metavar="N",
        help=f"texts that are generated together (default: {Request.batch_size})",
    )


def _add_numbers(parser: argparse.ArgumentParser, reader: Reader) -> None:
    numbers = (
        ("--temperature", 0.8, "T", "0: always the likeliest token"),
        ("--top_p", 1.0, "P", "sample from the fewest likeliest tokens whose probabilities reach this sum"),
        ("--min_p", 0.0, "P", "sample from tokens at least this share as probable as the likeliest"),
        ("--repetition_penalty", 1.0, "X", "above 1: tokens that are in the text already become less likely"),
    )
    for flag, default, metavar, text in numbers:
        parser.add_argument(
            flag,
            type=reader.number(flag),
            default=default,
            metavar=metavar,
            help=f"{text} (default: {default:g})",
        )


if __name__ == "__main__":
    run_script(main, kept="the texts so far were printed")
