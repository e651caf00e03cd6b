"""``.venv/bin/python src/benchmark.py speed``: how fast a step is, beside other trainers on the same work."""

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from dsgpt.benchmarks.harness.command import SuiteCommand, SuiteOptions, record_head, run_suite
from dsgpt.benchmarks.harness.pages import Record, SuitePage
from dsgpt.benchmarks.speed.around import measure_around, measure_first_step, measure_help
from dsgpt.benchmarks.speed.measure import measure_memory, measure_row
from dsgpt.benchmarks.speed.page import reached, speed_page, summary_lines, verdict
from dsgpt.benchmarks.speed.workloads import HUGGING_FACE, NANOGPT, PEERS, Row, Work, published, rows
from dsgpt.common.errors import UserError
from dsgpt.telemetry.console import Console

PAGE = SuitePage(name="speed", of="speeds", text=speed_page, summary=summary_lines)
SCHEMA_VERSION = "1.0"
NEEDED = {NANOGPT: "model.py"}
"""The file that a checkout of a peer must have."""
TOKENS = 2_000_000
MEMORY_STEPS = 2
MEMORY_TARGET = 0.7
TIME_TO_LOSS = "the demo's recipe: time to the loss of nanoGPT's settings"
LOSS_ROUNDS = 1
"""Trainings to a loss take minutes; on a CPU only their times differ."""

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SpeedOptions(SuiteOptions):
    """The options of the command line."""

    rounds: int
    """Turns of every contender."""
    peer: Sequence[str]
    """``NAME=FOLDER``."""
    only: Sequence[str]
    """Beginnings of the keys of results; empty for all."""
    device: str

    @property
    def whole(self) -> bool:
        """See ``SuiteOptions``."""
        return not self.only


def run_speed(options: SpeedOptions, *, repository: Path) -> int:
    """Measure; return 0 if every target was reached.

    Raises:
        UserError: a peer's folder is wrong, nothing is selected, or a contender failed.
    """
    return run_suite(_SpeedCommand(options, repository), options, repository=repository)


def read_peers(words: Sequence[str]) -> dict[str, Path]:
    """The checkouts that ``--peer`` names.

    Raises:
        UserError: one is not ``NAME=FOLDER``, unknown, or not a checkout.
    """
    found = {}
    for word in words:
        name, equals, folder = word.partition("=")
        if not equals or name not in NEEDED:
            raise UserError(f"--peer {word}: must be NAME=FOLDER; names are {', '.join(NEEDED)}")
        if not (Path(folder) / NEEDED[name]).is_file():
            raise UserError(f"--peer {word}: {folder} has no {NEEDED[name]}: name a checkout of {name}")
        found[name] = Path(folder).resolve()
    return found


class _SpeedCommand(SuiteCommand[Result]):
    page: ClassVar[SuitePage] = PAGE
    unit: ClassVar[str] = "row"

    def __init__(self, options: SpeedOptions, repository: Path) -> None:
        self._options, self._repository = options, repository
        self._peers = read_peers(options.peer)
        self._folder: Path
        self._measurements: dict[str, Callable[[], Result]] = {}
        self._missing: dict[str, list[str]] = {}

    def plan(self, console: Console) -> int:  # noqa: ARG002 - of the interface
        """Choose the rows, limits and other measurements of this device; see ``SuiteCommand``."""
        cores, device = len(os.sched_getaffinity(0)), self._options.device
        present = tuple(peer for peer in PEERS if peer == HUGGING_FACE or peer in self._peers)
        compared = rows(device, cores=cores, peers=present)
        every_row = rows(device, cores=cores, peers=PEERS)
        self._missing = {peer: self._rows_with(peer, every_row) for peer in PEERS if peer not in present}
        every: dict[str, Callable[[], Result]] = {row.key: partial(self._row, row) for row in compared}
        for work in dict.fromkeys(replace(row.work, compile=False) for row in compared if not row.per_rank):
            every[_ceiling_key(work)] = partial(self._ceilings, work)
        every["memory"] = self._memory
        every["help"] = self._help
        for kind in ("baseline", "zero1"):
            every[f"first-step-{kind}"] = partial(self._first_step, kind)
        every["around"] = self._around
        if NANOGPT in self._peers:
            every["time-to-loss"] = self._time_to_loss
        wanted = self._options.only
        self._measurements = {key: call for key, call in every.items() if _selected(key, wanted)}
        if not self._measurements:
            raise UserError(f"--only {' '.join(wanted)}: selects nothing; there are {', '.join(every)}")
        return len(self._measurements)

    def _rows_with(self, peer: str, every_row: Sequence[Row]) -> list[str]:
        """The titles of what was selected and compares with ``peer``."""
        titles = {row.key: row.title for row in every_row if any(entry.kind == peer for entry in row.entries)}
        titles |= {"time-to-loss": TIME_TO_LOSS} if peer == NANOGPT else {}
        return [title for key, title in titles.items() if _selected(key, self._options.only)]

    def begin(self, folder: Path, console: Console) -> None:  # noqa: ARG002
        from dsgpt.benchmarks.harness.random_tokens import write_random_tokens  # noqa: PLC0415 - numpy takes its time

        self._folder = folder.resolve()
        write_random_tokens(self._folder / "tokens", vocab_sizes=(8192, 50_257), count=TOKENS)

    def results(self) -> Iterator[Result]:
        for key, measure in self._measurements.items():
            try:
                yield {"key": key, **measure()}
            except UserError as error:  # the other rows took minutes, and count nevertheless
                yield {"key": key, "title": key, "failed": str(error)}

    def _row(self, row: Row) -> Result:
        return measure_row(
            row,
            rounds=self._options.rounds,
            tokens=self._tokens(row.work),
            folder=self._folder / row.key,
            peers=self._peers,
        )

    def _tokens(self, work: Work) -> Path:
        return self._folder / "tokens" / f"{work.shape.vocab_size}.bin"

    def _ceilings(self, work: Work) -> Result:
        from dsgpt.benchmarks.speed.ceilings import measure_ceilings  # noqa: PLC0415 - torch takes seconds

        return {"title": f"ceilings, {_ceiling_key(work)}", "work": work.as_dict(), **measure_ceilings(work)}

    def _memory(self) -> Result:
        small = published("small", length=1024)
        work = Work(shape=small, batch=8, precision="bf16", device=self._options.device, threads=_threads(self))
        return measure_memory(
            work, steps=MEMORY_STEPS, tokens=self._tokens(work), folder=self._folder / "memory", peers=self._peers
        ) | {"target": MEMORY_TARGET}

    def _help(self) -> Result:
        return {"title": "src/gpt2.py --help", **measure_help(self._repository, rounds=self._options.rounds)}

    def _first_step(self, kind: str) -> Result:
        folder = self._folder / f"first-{kind}"
        measured = measure_first_step(
            self._repository, folder, kind=kind, device=self._options.device, data=self._demo_data(), rounds=3
        )
        return {"title": f"from launch to the end of the demo's first step, {kind}", **measured}

    def _around(self) -> Result:
        folder = self._folder / "around"
        measured = measure_around(self._repository, folder, device=self._options.device, data=self._demo_data())
        return {"title": "share of the time between two steps of the demo that is not the step", **measured}

    def _time_to_loss(self) -> Result:
        from dsgpt.benchmarks.speed.time_to_loss import measure_time_to_loss  # noqa: PLC0415 - numpy takes its time

        measured = measure_time_to_loss(
            self._repository,
            self._folder / "time-to-loss",
            device=self._options.device,
            threads=_threads(self),
            data=self._demo_data(),
            peer=self._peers[NANOGPT],
            rounds=LOSS_ROUNDS,
        )
        return {"title": TIME_TO_LOSS, **measured}

    def _demo_data(self) -> Path:
        from dsgpt.benchmarks.harness.corpus import prepare_demo  # noqa: PLC0415 - numpy takes its time

        return prepare_demo(self._repository, self._folder / "demo-data")

    def line(self, result: Result, *, count: str, left: str) -> str:
        return f"{count} {verdict(result)}{left}"

    def record(self, results: Sequence[Result], *, seconds: float) -> Record:
        return record_head(SCHEMA_VERSION, device=self._options.device) | {
            "rounds": self._options.rounds,
            "peers": {name: _commit(folder) for name, folder in self._peers.items()},
            "missing": {peer: titles for peer, titles in self._missing.items() if titles},
            "seconds": round(seconds, 1),
            "results": list(results),
        }

    def failures(self, results: Sequence[Result], record: Record) -> list[str]:  # noqa: ARG002
        return [f"{result['title']}: the target was not reached" for result in results if missed(result)]


def _selected(key: str, wanted: Sequence[str]) -> bool:
    return not wanted or any(key.startswith(word) for word in wanted)


def missed(result: Mapping[str, Any]) -> bool:
    """Whether a result with a target is on the wrong side of it."""
    return reached(result) is False


def _threads(command: _SpeedCommand) -> int:
    return 0 if command._options.device == "cuda" else len(os.sched_getaffinity(0))


def _ceiling_key(work: Work) -> str:
    return f"ceiling-{work.shape.name.replace(' ', '')}-{work.precision}-{work.tokens}"


def _commit(checkout: Path) -> str | None:
    """The commit of a peer's checkout; None if it is no git repository."""
    done = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None
