"""Continue text: ``.venv/bin/python src/generate.py --checkpoint checkpoint/demo-zero1 --prompt "def main("``."""

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from dsgpt.common.command_line import complain, read_options, run_script
from dsgpt.common.errors import Problems, UserError
from dsgpt.inference.requests import GenerateRequest
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
    request, problems = read_options(GenerateRequest, description=DESCRIPTION, epilog=EXAMPLES, allow_abbrev=True)
    request.check(problems)
    prompts = _prompts(request, problems)
    problems.raise_if_any()
    from dsgpt.inference.sample import Writer  # noqa: PLC0415 - torch takes seconds; --help should not

    writer = Writer(request)
    if request.interactive:
        _converse(writer)
    else:
        _print_texts(writer, prompts, stream=request.stream)


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


def _prompts(request: GenerateRequest, problems: Problems) -> list[str]:
    """The prompts of all flags; the start of a document if there are none."""
    prompts = list(request.prompt)
    if request.stdin not in (None, "-") and not problems:  # otherwise it may be the value of an unknown flag
        problems.add(f"{request.stdin!r} is neither a flag nor the value of one: only - for the standard input")
    if request.interactive and (prompts or request.prompt_file or request.stdin):
        problems.add("--interactive reads its prompts itself: leave other prompts out")
    elif request.prompt_file is not None and str(request.prompt_file) != "-":
        _read(request.prompt_file.read_bytes, f"--prompt_file {request.prompt_file}", prompts, problems)
    elif request.prompt_file is not None or request.stdin == "-":
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


if __name__ == "__main__":
    run_script(main, kept="the texts so far were printed")
