"""What ``src/generate.py`` is asked for, and the mistakes in it. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from dsgpt.common.problems import Problems

PRECISIONS = ("fp32", "bf16", "fp16")
QUANTIZATIONS = ("none", "int8")
LARGEST_SEED = 2**63


@dataclass(frozen=True, kw_only=True)
class Request:
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
