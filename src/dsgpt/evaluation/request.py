"""What ``src/evaluate.py`` is asked for, and the mistakes in it. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from dsgpt.common.problems import Problems


@dataclass(frozen=True, kw_only=True)
class Request:
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
