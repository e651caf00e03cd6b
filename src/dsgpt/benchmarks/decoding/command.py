"""``.venv/bin/python src/benchmark.py decoding``: seconds of 100 tokens, beside others in the same rounds."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dsgpt.benchmarks.decoding.page import decoding_page, missed, summary_lines, verdict
from dsgpt.benchmarks.decoding.work import NANOGPT, Work, rows
from dsgpt.benchmarks.harness.command import SuiteCommand, SuiteOptions, record_head, run_suite
from dsgpt.benchmarks.harness.pages import Record, SuitePage
from dsgpt.common.errors import UserError
from dsgpt.telemetry.console import Console

PAGE = SuitePage(name="decoding", of="decoding", text=decoding_page, summary=summary_lines)
SCHEMA_VERSION = "1.0"
SIZES = ("demo", "tiny", "small", "medium", "large", "xl")

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(SuiteOptions):
    """The options of the command line."""

    model_size: str
    rounds: int
    """Turns of every contender."""
    peer: Sequence[str]
    """``nanogpt=FOLDER``."""
    only: Sequence[str]
    """Beginnings of the keys of rows; empty for all."""
    checkpoint: Path | None
    """A trained model, to measure what rounded weights lose; None to measure times only."""
    data: Path | None
    """The token file that it predicts."""
    device: str

    @property
    def whole(self) -> bool:
        """See ``SuiteOptions``."""
        return not self.only


def run_decoding(options: DecodingOptions, *, repository: Path) -> int:
    """Measure; return 0 if every goal was reached and every id in fp32 is that of transformers.

    Raises:
        UserError: a peer's folder is wrong, or nothing is selected.
    """
    return run_suite(_DecodingCommand(options), options, repository=repository)


class _DecodingCommand(SuiteCommand[Result]):
    page: ClassVar[SuitePage] = PAGE
    unit: ClassVar[str] = "row"

    def __init__(self, options: DecodingOptions) -> None:
        self._options = options
        self._checkout = _checkout(options.peer)
        self._rows: list[Work] = []
        self._losses: Result | None = None

    def plan(self, console: Console) -> int:  # noqa: ARG002 - of the interface
        """Choose the rows; see ``SuiteCommand``."""
        if (self._options.checkpoint is None) != (self._options.data is None):
            raise UserError("--checkpoint and --data belong together: a trained model, and the token file it predicts")
        every, wanted = rows(self._options.model_size), self._options.only
        self._rows = [work for work in every if not wanted or any(work.key.startswith(word) for word in wanted)]
        if not self._rows:
            raise UserError(
                f"--only {' '.join(wanted)}: selects nothing; there are {', '.join(work.key for work in every)}"
            )
        return len(self._rows)

    def begin(self, folder: Path, console: Console) -> None:  # noqa: ARG002 - of the interface
        """Choose the device, and measure what does not depend on time; nothing is written."""
        import torch  # noqa: PLC0415 - takes seconds

        from dsgpt.runtime.device import bring_up  # noqa: PLC0415

        if self._options.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: PyTorch sees no NVIDIA GPU here; use --device cpu")
        threads = len(os.sched_getaffinity(0)) if self._options.device == "cpu" else None
        self._device = bring_up(self._options.device, local_rank=0, threads=threads)
        if self._options.checkpoint and self._options.data:
            from dsgpt.benchmarks.decoding.losses import measure_losses  # noqa: PLC0415

            self._losses = measure_losses(self._options.checkpoint, self._options.data, device=self._options.device)

    def results(self) -> Iterator[Result]:
        from dsgpt.benchmarks.decoding.measure import measure_row  # noqa: PLC0415 - torch takes seconds

        for work in self._rows:
            yield measure_row(work, rounds=self._options.rounds, device=self._device, checkout=self._checkout)

    def line(self, result: Result, *, count: str, left: str) -> str:
        return f"{count} {verdict(result)}{left}"

    def record(self, results: Sequence[Result], *, seconds: float) -> Record:
        from dsgpt.runtime.huge_pages import huge_page_setting  # noqa: PLC0415 - torch takes seconds

        return record_head(SCHEMA_VERSION, device=self._options.device) | {
            "rounds": self._options.rounds,
            "huge_pages": huge_page_setting(),
            "model_size": self._options.model_size,
            "seconds": round(seconds, 1),
            "losses": self._losses,
            "results": list(results),
        }

    def failures(self, results: Sequence[Result], record: Record) -> list[str]:  # noqa: ARG002
        return [line for result in results for line in missed(result)]


def _checkout(words: Sequence[str]) -> Path | None:
    """The checkout that ``--peer`` names; None without one.

    Raises:
        UserError: it is not ``nanogpt=FOLDER``, or no checkout.
    """
    found = None
    for word in words:
        name, equals, folder = word.partition("=")
        if not equals or name != NANOGPT:
            raise UserError(f"--peer {word}: must be {NANOGPT}=FOLDER")
        if not (Path(folder) / "model.py").is_file():
            raise UserError(f"--peer {word}: {folder} has no model.py: name a checkout of {NANOGPT}")
        found = Path(folder).resolve()
    return found
