"""What ``src/generate.py`` and ``src/evaluate.py`` are asked for: their flags, and the mistakes in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgpt.common.command_line import COUNT, NUMBER, POSITIVE, choice, flag, switch
from dsgpt.common.errors import Problems
from dsgpt.config.options import DEVICES, WHICH_CHECKPOINT

PRECISIONS = ("fp32", "bf16", "fp16")
QUANTIZATIONS = ("none", "int8")
LARGEST_SEED = 2**63
BATCH_SIZE = 8


def listed(allowed: Sequence[str], text: str) -> Any:
    """A flag that accepts the ``allowed`` words, which the help lists; the first of them is the default."""
    metavar = "{" + ",".join(allowed) + "}"
    return flag(choice(allowed), metavar, f"{text} (default: %(default)s)", default=allowed[0])


def which_checkpoint() -> Any:
    """``--which``."""
    return listed(WHICH_CHECKPOINT, "checkpoint of a run: the newest, or the one with the lowest validation loss")


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """The options of a generation; each is the flag of its name."""

    checkpoint: Path = flag(
        Path,
        "DIR",
        "run folder, one checkpoint in it, portable folder, or Hugging Face folder of a GPT-2",
        required=True,
    )
    which: str = which_checkpoint()
    precision: str = listed(PRECISIONS, "of weights and arithmetic")
    quantize: str = listed(QUANTIZATIONS, "int8: weights in 8 bits, which lose a little, with --precision bf16")
    device: str = listed(DEVICES, "where to compute")
    stdin: str | None = flag(str, "-", "continue the text of the standard input", name="stdin", nargs="?")
    prompt: tuple[str, ...] = flag(
        str,
        "TEXT",
        "text to continue; may be repeated (default: none, the start of a document)",
        default=(),
        action="append",
    )
    prompt_file: Path | None = flag(Path, "FILE", "text file to continue; - is the standard input")
    max_new_tokens: int = flag(POSITIVE, "N", "tokens to add (default: %(default)s)", default=100)
    num_samples: int = flag(POSITIVE, "N", "continuations of each prompt (default: %(default)s)", default=1)
    top_k: int = flag(POSITIVE, "K", "sample from the K likeliest (default: %(default)s)", default=50)
    seed: int = flag(COUNT, "N", "same seed, same text (default: %(default)s)", default=1337)
    batch_size: int | None = flag(POSITIVE, "N", f"texts that are generated together (default: {BATCH_SIZE})")
    temperature: float = flag(NUMBER, "T", "0: always the likeliest token (default: %(default)g)", default=0.8)
    top_p: float = flag(
        NUMBER,
        "P",
        "sample from the fewest likeliest tokens whose probabilities reach this sum (default: %(default)g)",
        default=1.0,
    )
    min_p: float = flag(
        NUMBER,
        "P",
        "sample from tokens at least this share as probable as the likeliest (default: %(default)g)",
        default=0.0,
    )
    repetition_penalty: float = flag(
        NUMBER,
        "X",
        "above 1: tokens that are in the text already become less likely (default: %(default)g)",
        default=1.0,
    )
    stop: tuple[str, ...] = flag(str, "TEXT", "end a text before this; may be repeated", default=(), action="append")
    compile: bool = switch("compile the step of a token, for GPUs; on CPUs it is slower than without")
    stream: bool = switch("print each text while it is generated")
    interactive: bool = switch("continue each line that is typed; Ctrl-D ends, Ctrl-C ends a text")

    def check(self, problems: Problems) -> None:
        """Note the values that make no sense."""
        if self.stream and self.batch_size is not None:
            problems.add("--stream writes one text at a time: leave --batch_size out")
        for name in ("num_samples", "max_new_tokens", "top_k", "batch_size"):
            if (given := getattr(self, name)) is not None and given < 1:
                problems.add(f"--{name} must be at least 1, not {given}")
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

    checkpoint: Path = flag(
        Path, "DIR", "run folder, one checkpoint in it, portable folder, or Hugging Face folder", required=True
    )
    data: Path | None = flag(Path, "BIN", "token file to predict")
    text: Path | None = flag(Path, "FILE", "text file to predict")
    include_path: Path | None = flag(Path, "DIR", "folder with tasks of your own, for --tasks")
    output: Path | None = flag(Path, "JSON", "also write the figures there")
    tasks: tuple[str, ...] = flag(
        lambda text: tuple(filter(None, text.split(","))),
        "NAMES",
        "tasks of lm-evaluation-harness, with commas between them",
        default=(),
    )
    limit: int | None = flag(POSITIVE, "N", "most examples of each task (default: all)")
    seq_length: int | None = flag(
        POSITIVE, "N", "tokens of a window (default: as in training; of Hugging Face's models the context)"
    )
    stride: int | None = flag(
        POSITIVE,
        "N",
        "tokens from one window to the next; a shorter stride gives each token more before it, and takes longer "
        "(default: those of a window)",
    )
    windows: int | None = flag(
        POSITIVE, "N", "predict the first N windows of --data, as a validation of training does (default: all)"
    )
    batch_size: int = flag(POSITIVE, "N", "windows or examples at a time (default: %(default)s)", default=BATCH_SIZE)
    which: str = which_checkpoint()
    precision: str = listed(PRECISIONS, "of weights and arithmetic")
    quantize: str = listed(QUANTIZATIONS, "int8: weights in 8 bits, which lose a little")
    device: str = listed(DEVICES, "where to compute")

    def check(self, problems: Problems) -> None:
        """Note what does not fit together."""
        chosen = [
            flag for flag, value in (("--data", self.data), ("--text", self.text), ("--tasks", self.tasks)) if value
        ]
        if len(chosen) != 1:
            found = f"both {' and '.join(chosen)} are given" if chosen else "none is given"
            problems.add(f"give one of --data, --text and --tasks: {found}")
        if not self.tasks:
            problems.add(
                *(
                    f"--{name} needs --tasks"
                    for name, value in (("include_path", self.include_path), ("limit", self.limit))
                    if value is not None
                )
            )
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
