"""The commands ``generate``, ``evaluate`` and ``export``: what they are asked for, and what they print.

Imports no torch: only a command that was understood does.
"""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from dsgpt.common.command_line import Parser, Reader, complain, read_words
from dsgpt.common.errors import Problems, UserError
from dsgpt.common.text import next_line, script_words
from dsgpt.config.options import DEVICES, EXPORT_DTYPES, EXPORT_FORMS, WHICH_CHECKPOINT

if TYPE_CHECKING:
    import argparse

    from dsgpt.inference.sample import Writer

PRECISIONS = ("fp32", "bf16", "fp16")
QUANTIZATIONS = ("none", "int8")
LARGEST_SEED = 2**63
LINE = "-" * 80


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next id is drawn. Each of these narrows what the ones before it left."""

    repetition_penalty: float = 1.0
    """Divides positive logits of ids that the text already has, and multiplies negative ones (Keskar et al. 2019)."""
    temperature: float = 0.0
    """Divides the logits; 0 always takes the likeliest id."""
    top_k: int | None = None
    """Draw from this many likeliest ids; None from all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest ids whose probabilities reach this sum (Holtzman et al. 2020)."""
    min_p: float = 0.0
    """Draw from ids that are at least this share as probable as the likeliest (Nguyen et al. 2024)."""


@dataclass(frozen=True, kw_only=True)
class GenerateRequest(Sampling):
    """The options of a generation; each is the flag of its name."""

    checkpoint: Path
    which: str = "latest"
    max_new_tokens: int = 100
    temperature: float = 0.8
    top_k: int = 50
    stop: tuple[str, ...] = ()
    seed: int = 1337
    num_samples: int = 1
    batch_size: int = 8
    precision: str = "fp32"
    quantize: str = "none"
    """Weights in 8 bits: ``int8``."""
    compile: bool = False
    """Whether the step of a token is compiled."""
    device: str = "auto"

    def check(self, problems: Problems) -> None:
        """Note the values that make no sense."""
        for flag in ("num_samples", "max_new_tokens", "top_k", "batch_size"):
            if getattr(self, flag) < 1:
                problems.add(f"--{flag} must be at least 1, not {getattr(self, flag)}")
        if not 0 <= self.temperature < float("inf"):
            problems.add(f"--temperature must be a number of at least 0, not {self.temperature}")
        if not 0 <= self.seed < LARGEST_SEED:
            problems.add(f"--seed must be a whole number from 0 to 2^63 - 1, not {self.seed}")
        if not 0 < self.top_p <= 1:
            problems.add(f"--top_p must be above 0 and at most 1, not {self.top_p:g}")
        if not 0 <= self.min_p < 1:
            problems.add(f"--min_p must be at least 0 and below 1, not {self.min_p:g}")
        if not 0 < self.repetition_penalty < float("inf"):
            problems.add(f"--repetition_penalty must be a number above 0, not {self.repetition_penalty:g}")
        if self.quantize == "int8" and self.precision == "fp32":
            problems.add("--quantize int8 is faster only in 16 bits: add --precision bf16")
        if "" in self.stop:
            problems.add("--stop needs a text that is not empty")


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest:
    """The options of an evaluation; each is the flag of its name."""

    checkpoint: Path
    which: str = "latest"
    data: Path | None = None
    """A token file."""
    text: Path | None = None
    """A text file."""
    tasks: tuple[str, ...] = ()
    """Of lm-evaluation-harness."""
    include_path: Path | None = None
    """A folder with tasks of one's own."""
    limit: int | None = None
    """Most examples of each task."""
    seq_length: int | None = None
    """Tokens of a window; None for those of a sequence in training, or if that is unknown, the model's context."""
    stride: int | None = None
    """Tokens from one window to the next; None for those of a window, so that windows do not overlap."""
    windows: int | None = None
    """Windows of ``data`` to predict, from its start; None for all."""
    batch_size: int = 8
    """Windows, or examples, at a time."""
    precision: str = "fp32"
    quantize: str = "none"
    """Weights in 8 bits, as generation has them: ``int8``."""
    device: str = "auto"
    output: Path | None = None
    """The record to write."""

    def check(self, problems: Problems) -> None:
        """Note what does not fit together."""
        chosen = [f"--{name}" for name in ("data", "text", "tasks") if getattr(self, name)]
        if len(chosen) != 1:
            found = f"both {' and '.join(chosen)} are given" if chosen else "none is given"
            problems.add(f"give one of --data, --text and --tasks: {found}")
        for name in ("include_path", "limit"):
            if not self.tasks and getattr(self, name) is not None:
                problems.add(f"--{name} needs --tasks")
        if self.tasks and self.quantize != "none":
            problems.add("--quantize is for --data and --text: the harness reads the model unquantized")
        if self.tasks and (self.seq_length or self.stride):
            problems.add("--seq_length and --stride are for --data and --text: tasks have their own windows")
        if self.windows and not self.data:
            problems.add("--windows is for --data: a text is predicted as a whole")
        if self.seq_length and self.stride and self.stride > self.seq_length:
            problems.add(
                f"--stride {self.stride} is longer than the windows of --seq_length {self.seq_length}: tokens between "
                "them would not count"
            )
        if self.output is not None and self.output.is_dir():
            problems.add(f"--output {self.output}: is a folder, name a file")


def _given(flags: "argparse.Namespace", request: type[GenerateRequest | EvaluateRequest]) -> dict[str, Any]:
    """The flags that have a value, as fields of ``request``."""
    values = {field.name: getattr(flags, field.name, None) for field in fields(request)}
    return {name: value for name, value in values.items() if value is not None}


def _add_model_flags(parser: Parser, reader: Reader, *, quantized: str) -> None:
    """Add the flags that choose a model's checkpoint, precision and device."""
    newest_or_best = "checkpoint of a run: the newest, or the one with the lowest validation loss"
    for flag, allowed, default, text in (
        ("--which", WHICH_CHECKPOINT, "latest", newest_or_best),
        ("--precision", PRECISIONS, "fp32", "of weights and arithmetic"),
        ("--quantize", QUANTIZATIONS, "none", quantized),
        ("--device", DEVICES, "auto", "where to compute"),
    ):
        parser.add_argument(
            flag,
            type=reader.choice(flag, allowed, default),
            default=default,
            metavar="{" + ",".join(allowed) + "}",
            help=f"{text} (default: {default})",
        )


# ``src/generate.py``.

GENERATE_DESCRIPTION = """\
Continue prompts with the model of a run, whichever strategy trained it, of a portable folder, or of a Hugging Face
folder of a GPT-2. A text ends before an end-of-text token or a --stop text, after --max_new_tokens, or where the
model's context is full. --seed repeats the texts, at any --batch_size. Ctrl-C prints what there is."""
GENERATE_EXAMPLES = """\
examples:
  .venv/bin/python src/generate.py --checkpoint checkpoint/demo-zero1 --prompt "def main("
  .venv/bin/python src/generate.py --checkpoint checkpoint/demo-zero1/step-00000200 --prompt "import" --temperature 0
  .venv/bin/python src/generate.py --checkpoint checkpoint/demo-zero1 --prompt "import" --prompt "class" --num_samples 4
  head -9 src/gpt2.py | .venv/bin/python src/generate.py --checkpoint checkpoint/demo-zero1 - --stop "def " --stream
  .venv/bin/python src/generate.py --checkpoint exported/gpt2 --precision bf16 --interactive"""


def generate() -> None:
    """Read the flags of ``src/generate.py``, continue the prompts, print."""
    reader = Reader()
    flags = read_words(_generate_parser(reader), reader)
    if flags.stream and flags.batch_size is not None:
        reader.problems.add("--stream writes one text at a time: leave --batch_size out")
    request = GenerateRequest(**_given(flags, GenerateRequest) | {"stop": tuple(flags.stop)})
    request.check(reader.problems)
    prompts = _prompts(flags, reader.problems)
    reader.problems.raise_if_any()
    from dsgpt.inference.sample import Writer  # noqa: PLC0415 - torch takes seconds; --help should not

    writer = Writer(request)
    if flags.interactive:
        _converse(writer)
        return
    full = False
    with asked_to_stop() as stopped:
        for text in writer.texts(prompts, show=_show if flags.stream else None, stopped=stopped):
            print("" if flags.stream else text, LINE, sep="\n", flush=True)
            full |= text.ended == "context"
    if full:
        _note_context(writer)
    if stopped():
        raise KeyboardInterrupt


def _prompts(flags: "argparse.Namespace", problems: Problems) -> list[str]:
    """The prompts of all flags; the start of a document if there are none."""
    prompts: list[str] = list(flags.prompt)
    if flags.stdin not in (None, "-") and not problems:  # otherwise it may be the value of an unknown flag
        problems.add(f"{flags.stdin!r} is neither a flag nor the value of one: only - for the standard input")
    if flags.interactive and (prompts or flags.prompt_file or flags.stdin):
        problems.add("--interactive reads its prompts itself: leave other prompts out")
    elif flags.prompt_file is not None or flags.stdin == "-":
        named = flags.prompt_file is not None and str(flags.prompt_file) != "-"
        what = f"--prompt_file {flags.prompt_file}" if named else "standard input"
        try:
            data: bytes = flags.prompt_file.read_bytes() if named else sys.stdin.buffer.read()
            prompts.append(data.decode("utf-8").removesuffix("\n"))
        except OSError as error:
            problems.add(f"{what}: cannot be read ({error.strerror})")
        except UnicodeDecodeError:
            problems.add(f"{what}: is not valid UTF-8 text")
    return prompts or [""]


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
            with asked_to_stop() as stopped:
                for text in writer.texts([line], show=_show, stopped=stopped):
                    print(flush=True)
                    if text.ended == "context":
                        _note_context(writer)
        except UserError as error:
            complain(error.problems, 0)


@contextlib.contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """A context of a function that says whether Ctrl-C was pressed inside; a second one raises KeyboardInterrupt.

    So a loop that asks keeps what it has made.
    """
    asked: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


def _show(piece: str) -> None:
    print(piece, end="", flush=True)


def _note_context(writer: "Writer") -> None:
    print(f"note: a text ends where the model's context of {writer.context:,} tokens is full", file=sys.stderr)


def _generate_parser(reader: Reader) -> Parser:
    parser = Parser(description=GENERATE_DESCRIPTION, epilog=GENERATE_EXAMPLES, allow_abbrev=True)
    add = parser.add_argument
    add(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="DIR",
        help="run folder, one checkpoint in it, portable folder, or Hugging Face folder of a GPT-2",
    )
    quantized = "int8: weights in 8 bits, which lose a little, with --precision bf16"
    _add_model_flags(parser, reader, quantized=quantized)
    add("stdin", nargs="?", metavar="-", help="continue the text of the standard input")
    add(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue; may be repeated (default: none, the start of a document)",
    )
    add("--prompt_file", type=Path, metavar="FILE", help="text file to continue; - is the standard input")
    for flag, low, default, metavar, text in (
        ("--max_new_tokens", 1, 100, "N", "tokens to add"),
        ("--num_samples", 1, 1, "N", "continuations of each prompt"),
        ("--top_k", 1, 50, "K", "sample from the K likeliest"),
        ("--seed", 0, 1337, "N", "same seed, same text"),
    ):
        kind = reader.whole(flag, low=low)
        add(flag, type=kind, default=default, metavar=metavar, help=f"{text} (default: {default})")
    add(
        "--batch_size",
        type=reader.whole("--batch_size", low=1),
        metavar="N",
        help=f"texts that are generated together (default: {GenerateRequest.batch_size})",
    )
    for flag, number, metavar, text in (
        ("--temperature", 0.8, "T", "0: always the likeliest token"),
        ("--top_p", 1.0, "P", "sample from the fewest likeliest tokens whose probabilities reach this sum"),
        ("--min_p", 0.0, "P", "sample from tokens at least this share as probable as the likeliest"),
        ("--repetition_penalty", 1.0, "X", "above 1: tokens that are in the text already become less likely"),
    ):
        kind_of_number = reader.number(flag)
        add(flag, type=kind_of_number, default=number, metavar=metavar, help=f"{text} (default: {number:g})")
    add("--stop", action="append", default=[], metavar="TEXT", help="end a text before this; may be repeated")
    for flag, text in (
        ("--compile", "compile the step of a token, for GPUs; on CPUs it is slower than without"),
        ("--stream", "print each text while it is generated"),
        ("--interactive", "continue each line that is typed; Ctrl-D ends, Ctrl-C ends a text"),
    ):
        add(flag, action="store_true", help=text)
    return parser


# ``src/evaluate.py``.

EVALUATE_DESCRIPTION = """\
Measure the perplexity and the bits per byte of a text under a model, or let lm-evaluation-harness evaluate it (--tasks;
install it with `.venv/bin/python -m pip install -e '.[eval]'`). The model is that of a
run, whichever strategy trained it, of a portable folder, or of a Hugging Face folder of a GPT-2."""
EVALUATE_EXAMPLES = """\
examples:
  .venv/bin/python src/evaluate.py --checkpoint checkpoint/demo-zero1 --data data/python-stdlib/val.bin
  .venv/bin/python src/evaluate.py --checkpoint checkpoint/demo-zero1 --text README.md --stride 64
  .venv/bin/python src/evaluate.py --checkpoint exported/gpt2 --tasks lambada_openai,hellaswag --limit 100"""


def evaluate() -> None:
    """Read the flags of ``src/evaluate.py``, evaluate, print."""
    reader = Reader()
    flags = read_words(_evaluate_parser(reader), reader)
    tasks = tuple(name for name in (flags.tasks or "").split(",") if name)
    request = EvaluateRequest(**_given(flags, EvaluateRequest) | {"tasks": tasks})
    request.check(reader.problems)
    reader.problems.raise_if_any()
    from dsgpt.inference.evaluate import evaluate as figures_of  # noqa: PLC0415 - torch takes seconds
    from dsgpt.machine.console import Console  # noqa: PLC0415

    record = figures_of(request, console=Console(speaks=True))
    for task, metrics in record.get("tasks", {}).items():
        for metric, value in metrics.items():
            print(f"{task:<24} {metric:<24} {value:.4f}")
    if not flags.tasks:
        _print_figures(record)
        print(next_line(script_words("src/generate.py", "--checkpoint", flags.checkpoint, "--prompt", "The")))


def _print_figures(record: dict[str, Any]) -> None:
    windows = f"{record['windows']:,} windows of {record['seq_length']:,}, stride {record['stride']:,}"
    perplexity = record["perplexity"]
    print(f"tokens          {record['tokens']:,} in {windows}")
    print(f"loss            {record['loss']:.4f} nats per token")
    print(f"perplexity      {'infinite' if perplexity is None else format(perplexity, '.4f')}")
    if record["bytes"]:
        print(f"bits per byte   {record['bits_per_byte']:.4f} ({record['bytes']:,} bytes)")
    else:
        print("bits per byte   unknown: the model has no tokenizer")
    if not record["same_tokenizer"]:
        print("tokenizer       not compared with that of the data: one of them is not named")
    if own := record["validation"]:
        print(
            f"validation      {own['loss']:.4f} by the training itself, in {own['precision']}, on the first "
            f"{own['windows']:,} windows of {own['seq_length']:,}: the same with --windows {own['windows']}"
        )


def _evaluate_parser(reader: Reader) -> Parser:
    parser = Parser(description=EVALUATE_DESCRIPTION, epilog=EVALUATE_EXAMPLES, allow_abbrev=True)
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
    default = EvaluateRequest.batch_size
    for flag, number, text in (
        ("--limit", None, "most examples of each task (default: all)"),
        ("--seq_length", None, "tokens of a window (default: as in training; of Hugging Face's models the context)"),
        ("--stride", None, "tokens from one window to the next; a shorter stride gives each token more before it, and "
         "takes longer (default: those of a window)"),
        ("--windows", None, "predict the first N windows of --data, as a validation of training does (default: all)"),
        ("--batch_size", default, f"windows or examples at a time (default: {default})"),
    ):  # fmt: skip
        parser.add_argument(flag, type=reader.whole(flag, low=1), default=number, metavar="N", help=text)
    _add_model_flags(parser, reader, quantized="int8: weights in 8 bits, which lose a little")
    return parser


# ``src/convert.py``.

CONVERT_DESCRIPTION = """\
Write the model of a run, whichever strategy trained it, into a new folder. Needs no GPU, no network and no more memory
than its largest tensor; the run is only read.

  hf         what Hugging Face's libraries load: model.safetensors, config.json, generation_config.json and, if the
             training data had one, the tokenizer; the vocabulary's padding is cut off
  portable   the same weights under this project's own names: model.safetensors, model.json, tokenizer/ and a manifest
             with their hashes; generate.py takes it as --checkpoint. Weights alone: training cannot be resumed from it
  deepspeed  a checkpoint folder as DeepSpeed's ZeRO-2 saves it on one rank, for DeepSpeed's own zero_to_fp32.py and
             ds_to_universal.py: weights in fp32, and the optimizer's moments if there are any. Everything else
             (learning rate, loss scale, random state) is left out. The files are pickles, as DeepSpeed needs them;
             this program writes but never reads them"""

CONVERT_EXAMPLES = """\
examples:
  the newest checkpoint of a run, for transformers:
    .venv/bin/python src/convert.py --from checkpoint/demo-zero1 --to hf exported/demo
  the one with the lowest validation loss, at half the size:
    .venv/bin/python src/convert.py --from checkpoint/demo-zero1 --to hf --which best --dtype bf16 exported/demo-best
  one checkpoint of a run:
    .venv/bin/python src/convert.py --from checkpoint/demo-zero1/step-00000200 --to portable exported/demo-200
  one checkpoint for DeepSpeed's tools, and its weights by DeepSpeed's script:
    .venv/bin/python src/convert.py --from checkpoint/demo-zero1 --to deepspeed exported/demo-ds
    .venv/bin/python -m deepspeed.utils.zero_to_fp32 exported/demo-ds exported/demo-fp32
  published weights, to ask them for text with generate.py:
    .venv/bin/python src/convert.py --from downloads/gpt2 --to portable exported/gpt2

In Python: AutoModelForCausalLM.from_pretrained("exported/demo"). To train on, see --init_from of src/gpt2.py."""


def convert(words: Sequence[str] | None = None) -> None:
    """Read the flags of ``src/convert.py``, convert, and print what was done."""
    reader = Reader()
    options = read_words(_convert_parser(reader), reader, words, elsewhere={"--checkpoint": "give --from"})
    for flag, value, what in (
        ("--from", options.source, "a run folder such as checkpoint/demo-zero1"),
        ("--to", options.form, f"one of {', '.join(EXPORT_FORMS)}"),
        ("OUT", options.out, "the folder to make"),
    ):
        if value is None and not reader.problems.mention(flag):
            reader.problems.add(f"{flag} is missing: give {what}")
    reader.problems.raise_if_any()
    from dsgpt.inference.export import export  # noqa: PLC0415 - torch takes seconds; --help should not
    from dsgpt.machine.console import Console  # noqa: PLC0415

    export(
        options.source,
        options.out,
        form=options.form,
        dtype=options.dtype,
        which=options.which,
        console=Console(speaks=True),
    )


def _convert_parser(reader: Reader) -> Parser:
    parser = Parser(prog="convert.py", description=CONVERT_DESCRIPTION, epilog=CONVERT_EXAMPLES)
    folder = "run folder, one checkpoint in it, or a Hugging Face folder of a GPT-2"
    add = parser.add_argument
    add("out", nargs="?", type=Path, metavar="OUT", help="the folder to make; must not exist, or be empty")
    add("--from", dest="source", type=Path, metavar="DIR", help=folder)
    dtype = "of the weights: fp32, bf16 or fp16 (default: fp32, as trained); deepspeed is always fp32"
    which = "checkpoint of a run: latest, or best by validation loss (default: latest)"
    for flag, name, allowed, default, text in (
        ("--to", "form", EXPORT_FORMS, None, "hf, portable or deepspeed, see above"),
        ("--dtype", "dtype", EXPORT_DTYPES, "fp32", dtype),
        ("--which", "which", WHICH_CHECKPOINT, "latest", which),
    ):
        kind = reader.choice(flag, allowed, default)
        add(flag, dest=name, default=default, metavar=name.upper(), type=kind, help=text)
    return parser
