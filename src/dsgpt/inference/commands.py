"""The commands ``generate``, ``evaluate``, ``export`` and ``serve``: what they are asked for, and what they print.

Imports no torch: only a command that was understood does.
"""

import contextlib
import os
import re
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from dsgpt.common.command_line import COUNT, NUMBER, POSITIVE, choice, complain, flag, part, read_options, switch
from dsgpt.common.errors import Problems, UserError
from dsgpt.common.text import DEVICES, next_line, script_words

if TYPE_CHECKING:
    from dsgpt.inference.generation import Writer

WHICH_CHECKPOINT = ("latest", "best")
"""The newest checkpoint of a run, or the one with the lowest validation loss."""
EXPORT_FORMS = ("hf", "portable", "deepspeed")
PRECISIONS = ("fp32", "bf16", "fp16")
QUANTIZATIONS = ("none", "int8")
BATCH_SIZE = 8
LINE = "-" * 80
A_MODEL = "run folder, one checkpoint in it, portable folder, or Hugging Face folder"
A_RUN = "a run folder such as checkpoint/demo-zero1"
REPEATED: dict[str, Any] = {"default": (), "action": "append"}


def listed(allowed: Sequence[str], text: str) -> Any:
    """A flag that accepts the ``allowed`` words, which the help lists; the first of them is the default."""
    return flag(choice(allowed), "{" + ",".join(allowed) + "}", f"{text} (default: %(default)s)", default=allowed[0])


def _count(text: str = "", default: int | None = None, **more: Any) -> Any:
    return flag(POSITIVE, "N", f"{text} (default: {default:,})" if default else text, default=default, **more)


def _share(metavar: str, text: str, default: float) -> Any:
    return flag(NUMBER, metavar, f"{text} (default: %(default)g)", default=default)


def which_checkpoint() -> Any:
    """``--which``."""
    return listed(WHICH_CHECKPOINT, "checkpoint of a run: the newest, or the one with the lowest validation loss")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of the draw of the next id. Each of these narrows what the ones before it left."""

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
class GenerateRequest:
    """The options of a generation; each is the flag of its name.

    Continue prompts with the model of a run, whichever strategy trained it, of a portable folder, or of a Hugging Face
    folder of a GPT-2. A text ends before an end-of-text token or a --stop text, after --max_new_tokens, or where the
    model's context is full. --seed repeats the texts, at any --batch_size. Ctrl-C prints what there is.

    Examples:
      .venv/bin/python src/generate.py --checkpoint checkpoint/demo-zero1 --prompt "def main("
      .venv/bin/python src/generate.py --checkpoint checkpoint/demo-zero1/step-00000800 --prompt "import" --temperature 0
      .venv/bin/python src/generate.py --checkpoint checkpoint/demo-zero1 --prompt "import" --prompt "class" --num_samples 4
      head -9 src/gpt2.py | .venv/bin/python src/generate.py --checkpoint checkpoint/demo-zero1 - --stop "def " --stream
      .venv/bin/python src/generate.py --checkpoint exported/gpt2 --precision bf16 --interactive
    """  # noqa: E501

    checkpoint: Path = flag(Path, "DIR", f"{A_MODEL} of a GPT-2", required=True)
    which: str = which_checkpoint()
    precision: str = listed(PRECISIONS, "of weights and arithmetic")
    quantize: str = listed(QUANTIZATIONS, "int8: weights in 8 bits, which lose a little, with --precision bf16")
    device: str = listed(DEVICES, "where to compute")
    stdin: str | None = flag(str, "-", "continue the text of the standard input", name="stdin", nargs="?")
    prompt: tuple[str, ...] = flag(str, "TEXT", **REPEATED)
    """text to continue; may be repeated (default: none, the start of a document)"""
    prompt_file: Path | None = flag(Path, "FILE", "text file to continue; - is the standard input")
    max_new_tokens: int = _count("tokens to add", 100)
    num_samples: int = _count("continuations of each prompt", 1)
    top_k: int = flag(POSITIVE, "K", "sample from the K likeliest (default: %(default)s)", default=50)
    seed: int = flag(COUNT, "N", "same seed, same text (default: %(default)s)", default=1337)
    batch_size: int | None = _count(f"texts that are generated together (default: {BATCH_SIZE})")
    temperature: float = _share("T", "0: always the likeliest token", 0.8)
    top_p: float = _share("P", "sample from the fewest likeliest tokens whose probabilities reach this sum", 1.0)
    min_p: float = _share("P", "sample from tokens at least this share as probable as the likeliest", 0.0)
    repetition_penalty: float = _share("X", "above 1: tokens that are in the text already become less likely", 1.0)
    stop: tuple[str, ...] = flag(str, "TEXT", "end a text before this; may be repeated", **REPEATED)
    compile: bool = switch("compile the step of a token, for GPUs; on CPUs it is slower than without")
    stream: bool = switch("print each text while it is generated")
    interactive: bool = switch("continue each line that is typed; Ctrl-D ends, Ctrl-C ends a text")

    @property
    def sampling(self) -> Sampling:
        """Settings of the draw of the next id."""
        return Sampling(**{each.name: getattr(self, each.name) for each in fields(Sampling)})

    def check(self, problems: Problems) -> None:
        """Note what does not fit together, and values that the readers of the flags let pass."""
        if self.stream and self.batch_size is not None:
            problems.add("--stream writes one text at a time: leave --batch_size out")
        if self.seed >= 2**63:
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
    """The options of an evaluation; each is the flag of its name.

    Measure the perplexity and the bits per byte of a text under a model, or let lm-evaluation-harness evaluate it
    (--tasks; install it with `.venv/bin/python -m pip install -e '.[eval]'`). The model is that of a run, whichever
    strategy trained it, of a portable folder, or of a Hugging Face folder of a GPT-2.

    Examples:
      .venv/bin/python src/evaluate.py --checkpoint checkpoint/demo-zero1 --data data/python-transformers/val.bin
      .venv/bin/python src/evaluate.py --checkpoint checkpoint/demo-zero1 --text README.md --stride 64
      .venv/bin/python src/evaluate.py --checkpoint exported/gpt2 --tasks lambada_openai,hellaswag --limit 100
    """

    checkpoint: Path = flag(Path, "DIR", A_MODEL, required=True)
    data: Path | None = flag(Path, "BIN", "token file to predict")
    text: Path | None = flag(Path, "FILE", "text file to predict")
    include_path: Path | None = flag(Path, "DIR", "folder with tasks of your own, for --tasks")
    output: Path | None = flag(Path, "JSON", "also write the figures there")
    tasks: tuple[str, ...] = flag(lambda text: tuple(filter(None, text.split(","))), "NAMES", default=())
    """tasks of lm-evaluation-harness, with commas between them"""
    limit: int | None = _count("most examples of each task (default: all)")
    seq_length: int | None = _count()
    """tokens of a window (default: as in training; of Hugging Face's models the context)"""
    stride: int | None = _count()
    """tokens from one window to the next; a shorter stride gives each token more before it, and takes longer (default:
    those of a window)"""
    windows: int | None = _count()
    """predict the first N windows of --data, as a validation of training does (default: all)"""
    batch_size: int = _count("windows or examples at a time", BATCH_SIZE)
    which: str = which_checkpoint()
    precision: str = listed(PRECISIONS, "of weights and arithmetic")
    quantize: str = listed(QUANTIZATIONS, "int8: weights in 8 bits, which lose a little")
    device: str = listed(DEVICES, "where to compute")

    def check(self, problems: Problems) -> None:
        """Note what does not fit together."""
        chosen = [f"--{name}" for name in ("data", "text", "tasks") if getattr(self, name)]
        if len(chosen) != 1:
            given = f"both {' and '.join(chosen)} are given" if chosen else "none is given"
            problems.add(f"give one of --data, --text and --tasks: {given}")
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
            longer = f"--stride {self.stride} is longer than the windows of --seq_length {self.seq_length}"
            problems.add(f"{longer}: tokens between them would not count")
        if self.output is not None and self.output.is_dir():
            problems.add(f"--output {self.output}: is a folder, name a file")


# ``src/generate.py``.


def generate() -> None:
    """Read the flags of ``src/generate.py``, continue the prompts, print."""
    request, problems = read_options(GenerateRequest, allow_abbrev=True)
    request.check(problems)
    prompts = _prompts(request, problems)
    problems.raise_if_any()
    from dsgpt.inference.generation import Writer  # noqa: PLC0415 - torch takes seconds; --help should not

    writer, show = Writer(request), partial(print, end="", flush=True)
    note = f"note: a text ends where the model's context of {writer.config.block_size:,} tokens is full"
    if request.interactive:
        _converse(writer, show, note)
        return
    full = False
    with asked_to_stop() as stopped:
        for text in writer.texts(prompts, show=show if request.stream else None, stopped=stopped):
            print("" if request.stream else text, LINE, sep="\n", flush=True)
            full |= text.ended == "context"
    if full:
        print(note, file=sys.stderr)
    if stopped():
        raise KeyboardInterrupt


def _prompts(request: GenerateRequest, problems: Problems) -> list[str]:
    """The prompts of all flags; the start of a document if there are none."""
    prompts: list[str] = list(request.prompt)
    if request.stdin not in (None, "-") and not problems:  # otherwise it may be the value of an unknown flag
        problems.add(f"{request.stdin!r} is neither a flag nor the value of one: only - for the standard input")
    if request.interactive and (prompts or request.prompt_file or request.stdin):
        problems.add("--interactive reads its prompts itself: leave other prompts out")
    elif request.prompt_file is not None or request.stdin == "-":
        file = None if str(request.prompt_file) == "-" else request.prompt_file
        what = f"--prompt_file {file}" if file else "standard input"
        with problems.collect():
            prompts.append(text_of(file, what).removesuffix("\n"))
    return prompts or [""]


def text_of(file: Path | None, what: str) -> str:
    """The text in ``file``, or on the standard input.

    Raises:
        UserError: it cannot be read, or is not UTF-8; ``what`` says which it was.
    """
    try:
        return (file.read_bytes() if file else sys.stdin.buffer.read()).decode("utf-8")
    except OSError as error:
        raise UserError(f"{what}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{what}: is not valid UTF-8 text") from error


def _converse(writer: "Writer", show: Callable[[str], None], note: str) -> None:
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
                for text in writer.texts([line], show=show, stopped=stopped):
                    print(flush=True)
                    if text.ended == "context":
                        print(note, file=sys.stderr)
        except UserError as error:
            complain(error.problems, 0)


@contextlib.contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """A context of a function that says whether Ctrl-C was pressed inside; a second one raises KeyboardInterrupt.

    So a loop that asks keeps what it has made.
    """
    presses: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        if presses:
            raise KeyboardInterrupt
        presses.append(number)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(presses)
    finally:
        signal.signal(signal.SIGINT, before)


# ``src/evaluate.py``.


def evaluate() -> None:
    """Read the flags of ``src/evaluate.py``, evaluate, print."""
    request, problems = read_options(EvaluateRequest, allow_abbrev=True)
    request.check(problems)
    problems.raise_if_any()
    from dsgpt.inference.evaluate import evaluate as figures_of  # noqa: PLC0415 - torch takes seconds
    from dsgpt.machine.console import Console  # noqa: PLC0415

    record = figures_of(request, console=Console(speaks=True))
    for task, metrics in record.get("tasks", {}).items():
        for metric, value in metrics.items():
            print(f"{task:<24} {metric:<24} {value:.4f}")
    if request.tasks:
        return
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
        first = f"{own['windows']:,} windows of {own['seq_length']:,}: the same with --windows {own['windows']}"
        print(f"validation      {own['loss']:.4f} by the training itself, in {own['precision']}, on the first {first}")
    print(next_line(script_words("src/generate.py", "--checkpoint", request.checkpoint, "--prompt", "The")))


# ``src/convert.py``.


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """The command line.

    Write the model of a run, whichever strategy trained it, into a new folder. Needs no GPU, no network and no more
    memory than its largest tensor; the run is only read.

      hf         for Hugging Face's libraries: model.safetensors, config.json, generation_config.json and, if the training
                 data had one, the tokenizer. The vocabulary's padding is cut off
      portable   the same weights under this project's own names: model.safetensors, model.json, tokenizer/ and a manifest
                 with their hashes. generate.py takes it as --checkpoint. Training cannot be resumed from weights alone
      deepspeed  a checkpoint folder as DeepSpeed's ZeRO-2 saves it on one rank, for DeepSpeed's own zero_to_fp32.py and
                 ds_to_universal.py. It has weights in fp32, and the optimizer's moments if there are any. Learning rate,
                 loss scale and random state are left out. The files are pickles, as DeepSpeed needs them; this program
                 writes but never reads them

    Examples:
      the newest checkpoint of a run, for transformers:
        .venv/bin/python src/convert.py --from checkpoint/demo-zero1 --to hf exported/demo
      the one with the lowest validation loss, at half the size:
        .venv/bin/python src/convert.py --from checkpoint/demo-zero1 --to hf --which best --dtype bf16 exported/demo-best
      one checkpoint of a run:
        .venv/bin/python src/convert.py --from checkpoint/demo-zero1/step-00000800 --to portable exported/demo-800
      one checkpoint for DeepSpeed's tools, and its weights by DeepSpeed's script:
        .venv/bin/python src/convert.py --from checkpoint/demo-zero1 --to deepspeed exported/demo-ds
        .venv/bin/python -m deepspeed.utils.zero_to_fp32 exported/demo-ds exported/demo-fp32
      published weights, to ask them for text with generate.py:
        .venv/bin/python src/convert.py --from downloads/gpt2 --to portable exported/gpt2
      a model of nanoGPT, for --init_from:
        .venv/bin/python src/convert.py --from nanoGPT/out/ckpt.pt --to hf exported/nanogpt

    In Python: AutoModelForCausalLM.from_pretrained("exported/demo"). To train on, see --init_from of src/gpt2.py.
    """  # noqa: E501

    source: Path = flag(Path, "DIR", name="--from", needs=A_RUN)
    """run folder, one checkpoint in it, a Hugging Face folder of a GPT-2, or a file of weights: nanoGPT's ckpt.pt,
    llm.c's .bin, Megatron-LM's model_optim_rng.pt"""
    form: str = flag(choice(EXPORT_FORMS), "FORM", name="--to", needs=f"one of {', '.join(EXPORT_FORMS)}")
    """hf, portable or deepspeed, see above"""
    dtype: str = flag(choice(PRECISIONS), "DTYPE", default="fp32")
    """of the weights: fp32, bf16 or fp16 (default: fp32, as trained); deepspeed is always fp32"""
    which: str = flag(choice(WHICH_CHECKPOINT), "WHICH", default="latest")
    """checkpoint of a run: latest, or best by validation loss (default: latest)"""
    out: Path = flag(Path, "OUT", name="out", needs="the folder to make", nargs="?")
    """the folder to make; must not exist, or be empty"""


def convert(words: Sequence[str] | None = None) -> None:
    """Read the flags of ``src/convert.py``, convert, and print what was done."""
    elsewhere = {"--checkpoint": "give --from"}
    options, problems = read_options(ConvertOptions, words, elsewhere=elsewhere, prog="convert.py")
    problems.raise_if_any()
    from dsgpt.inference.model_files import export  # noqa: PLC0415 - torch takes seconds; --help should not
    from dsgpt.machine.console import Console  # noqa: PLC0415

    asked = {"form": options.form, "dtype": options.dtype, "which": options.which}
    export(options.source, options.out, **asked, console=Console(speaks=True))


# ``src/serve.py``: what it can be asked for, its limits, its keys, and the packages that it needs.

PACKAGES = ("starlette", "uvicorn", "h11", "prometheus_client")
"""Packages that serving imports. The extra ``serve`` of ``pyproject.toml`` installs them."""
API_KEY = "DSGPT_API_KEY"
"""The environment variable that may hold the key."""
SHORTEST_KEY = 16
_EXAMPLE = "for example the output of openssl rand -hex 32"
KEY_FORM = f"a key has at least {SHORTEST_KEY} ASCII characters and no spaces, {_EXAMPLE}"
_MAX_KEY_BYTES = 64 << 10
_KEY = re.compile(rf"[!-~]{{{SHORTEST_KEY},}}")
_LINE = re.compile(r"([A-Za-z0-9_.-]{1,64})\s+(\S+)(?:\s+([1-9][0-9]{0,5}))?")


@dataclass(frozen=True, kw_only=True)
class Key:
    """An API key."""

    name: str
    """Name in metrics and messages, which never have the key."""
    secret: str = field(repr=False)
    per_minute: int | None = None
    """The most requests for completions in any 60 seconds; None for no limit."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of what a server accepts."""

    batch: int = _count("sequences decoded together", 8, name="--max_batch")
    queue: int = flag(COUNT, "N", default=64, name="--max_queue")
    """sequences that may wait; further ones are refused with 429 (default: %(default)s)"""
    new_tokens: int | None = _count(name="--max_tokens")
    """the most tokens of a completion (default: the model's context length)"""
    body_bytes: int = _count("the largest request", 262_144, name="--max_body_bytes")
    request_sec: float = _count("seconds from a request to the end of its answer", 120, name="--request_timeout")
    stall_sec: float = flag(POSITIVE, "N", default=20, name="--stall_timeout")
    """seconds in which a client sends its request, or takes a part of the answer (default: %(default)s)"""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    r"""The command line.

    Answer requests for completions over HTTP, as OpenAI's interface does: /v1/completions, /v1/models, /health, and
    /metrics for Prometheus. Nothing that a request says is logged.

    Examples:
      .venv/bin/python src/serve.py --checkpoint checkpoint/demo-zero1
      curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
          -d '{"model": "demo-zero1", "prompt": "def main(", "max_tokens": 32}'
      DSGPT_API_KEY=$(openssl rand -hex 32) .venv/bin/python src/serve.py --checkpoint checkpoint/demo-zero1 --host 0.0.0.0
    """  # noqa: E501

    checkpoint: Path = flag(Path, "DIR", needs=A_RUN)
    """run folder, one checkpoint in it, a portable folder, or a Hugging Face folder of a GPT-2"""
    which: str = which_checkpoint()
    device: str = listed(DEVICES, "where to compute")
    model_name: str | None = flag(str, "NAME", "the model's name in requests (default: the folder's)")
    host: str = flag(str, "ADDRESS", "where to listen (default: %(default)s)", default="127.0.0.1")
    api_key_file: Path | None = flag(Path, "FILE")
    """holds the key that requests must bring, or several: NAME KEY [REQUESTS_PER_MINUTE] a line (default: DSGPT_API_KEY
    of the environment, if it is set)"""
    port: int = flag(COUNT, "N", "0 for any free port (default: 8,000)", default=8000)
    limits: Limits = part(Limits)


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach ``host``.

    Raises:
        UserError: it is not a name or an address of this machine.
    """
    import ipaddress  # noqa: PLC0415 - as socket, for serving alone
    import socket  # noqa: PLC0415

    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {host}: is not an address of this machine; use 127.0.0.1") from error
    return all(ipaddress.ip_address(str(each[4][0]).partition("%")[0]).is_loopback for each in addresses)


def keys_of(options: ServeOptions) -> list[Key]:
    """The keys of which requests must bring one; empty if they need none. Warns if others may read the file of them.

    Raises:
        UserError: a key is needed and missing, one is unusable, or others may write the file.
    """
    if options.api_key_file is not None:
        return _keys_in(options.api_key_file)
    if (key := os.environ.get(API_KEY)) is None:
        if is_loopback(options.host):
            return []
        cure = f"put one into {API_KEY} or a file for --api_key_file, or use --host 127.0.0.1"
        raise UserError(f"--host {options.host}: other machines can reach it, so requests need a key: {cure}")
    if not _KEY.fullmatch(key):
        raise UserError(f"{API_KEY}: {KEY_FORM}")
    return [Key(name=API_KEY, secret=key)]


def _keys_in(file: Path) -> list[Key]:
    from dsgpt.common.json_files import JsonError, read_bytes  # noqa: PLC0415 - takes longer than --help

    source = f"--api_key_file {file}"
    try:
        text = read_bytes(file, max_bytes=_MAX_KEY_BYTES).decode("ascii")
        mode = file.stat().st_mode
    except (JsonError, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{source}: is not a readable key ({error})") from error
    problems, keys = Problems(), list[Key]()
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        problems.add(f"{source}: other users may write it, and so choose the keys: chmod go-w {file}")
    elif mode & (stat.S_IRGRP | stat.S_IROTH):
        print(f"warning: {source}: other users may read the keys: chmod go-r {file}", file=sys.stderr, flush=True)
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    for number, line in lines:
        parts = _LINE.fullmatch(line.strip() if len(lines) > 1 or " " in line.strip() else f"{API_KEY} {line.strip()}")
        place = f"{source}: line {number}" if len(lines) > 1 else source
        if parts is None:
            problems.add(f"{place}: write NAME KEY or NAME KEY REQUESTS_PER_MINUTE, or a KEY alone")
        elif not _KEY.fullmatch(parts[2]):
            problems.add(f"{place}: {KEY_FORM}")
        elif any(parts[1] == key.name or parts[2] == key.secret for key in keys):
            problems.add(f"{place}: its name or its key is also in an earlier line")
        else:
            keys.append(Key(name=parts[1], secret=parts[2], per_minute=int(parts[3]) if parts[3] else None))
    if not lines:
        problems.add(f"{source}: {KEY_FORM}")
    problems.raise_if_any()
    return keys


def serve() -> int:
    """Read the flags of ``src/serve.py``, and serve until a signal."""
    options, problems = read_options(ServeOptions)
    if missing := [package for package in PACKAGES if find_spec(package) is None]:
        cure = 'in the root of the repository, run .venv/bin/python -m pip install -e ".[serve]"'
        problems.add(f"serving needs {' and '.join(missing)}, not installed here: {cure}")
    problems.raise_if_any()
    from dsgpt.inference.server.server import serve as run_server  # noqa: PLC0415 - torch takes seconds; --help should not

    return run_server(options)
