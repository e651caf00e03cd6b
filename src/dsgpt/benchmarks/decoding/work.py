"""The rows of the suite: what is generated, and the goals. Imports no torch."""

from dataclasses import asdict, dataclass
from typing import Any

OURS, HUGGING_FACE, NANOGPT = "dsgpt", "transformers", "nanogpt"
RATIO_GOAL = 1.3
"""How many times as fast as transformers."""
SHARE_GOAL = 0.7
"""The time of reading the weights once, as a share of the time of a token."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Prompts of equal length that are continued together."""

    model_size: str
    precision: str
    batch_size: int
    quantize: str = "none"
    """``int8`` for our weights in 8 bits; the peers keep theirs."""
    prompt_tokens: int = 32
    new_tokens: int = 100

    @property
    def key(self) -> str:
        """Its name for ``--only``."""
        return f"{self._weights}-{self.batch_size}"

    @property
    def title(self) -> str:
        """Its name on the page."""
        return f"{self.model_size}, {self._weights}, batch {self.batch_size}"

    @property
    def _weights(self) -> str:
        return self.precision if self.quantize == "none" else self.quantize

    @property
    def has_goals(self) -> bool:
        """Whether the row must reach the goals; weights in 8 bits are for memory."""
        return self.quantize == "none"

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, for the record."""
        return asdict(self)


def rows(model_size: str) -> list[Work]:
    """Every row: two precisions and 8 bits, one text and eight."""
    return [
        Work(model_size=model_size, precision=precision, quantize=quantize, batch_size=batch_size)
        for precision, quantize in (("fp32", "none"), ("bf16", "none"), ("bf16", "int8"))
        for batch_size in (1, 8)
    ]


def peers_of(work: Work, *, nanogpt: bool) -> list[str]:
    """The contenders of a row. NanoGPT reads all tokens again for each new one, so it takes part at batch 1 only."""
    return [OURS, HUGGING_FACE, *([NANOGPT] if nanogpt and work.batch_size == 1 else [])]
