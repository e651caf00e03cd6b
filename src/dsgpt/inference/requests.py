"""What ``src/generate.py`` and ``src/evaluate.py`` are asked for, and the mistakes in it."""

from dataclasses import dataclass
from pathlib import Path

from dsgpt.common.errors import Problems

PRECISIONS = ("fp32", "bf16", "fp16")
QUANTIZATIONS = ("none", "int8")
LARGEST_SEED = 2**63


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """The options of a generation; each is the flag of its name."""

    checkpoint: Path
    which: str = "latest"
    max_new_tokens: int = 100
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
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
