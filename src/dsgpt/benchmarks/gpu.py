"""``benchmark.py gpu``: what holds on a rented GPU machine, proven in its first hour.

The proof consists of chunks, the most informative first. Each is a process of its own (``gpu_chunks``) and a file of
``--into``, which is written when it has ended. A second call runs what is left, what ended with an error, and what
was measured with other code or on another GPU. All files together are the record.
"""

import contextlib
import inspect
import pkgutil
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsgpt.benchmarks import frame, sweep
from dsgpt.common.command_line import POSITIVE, flag, switch
from dsgpt.common.errors import UserError
from dsgpt.common.files import remove, write_json_atomic
from dsgpt.common.json_files import JsonError, read_object
from dsgpt.common.text import counted, table
from dsgpt.record.provenance import git_commit, sources_sha256

CHUNKS_MODULE = "dsgpt.benchmarks.gpu_chunks"
MOST_SEC = 600
"""Longest time of a chunk."""
PASSED, FAILED, ERROR, DONE = "passed", "failed", "error", "done"
"""Verdicts; and the status of a chunk that ended, with whichever verdict."""


@dataclass(frozen=True)
class Chunk:
    """One part of the proof."""

    call: str
    """``module:function``, or a function of ``CHUNKS_MODULE``: gets a ``Proof``, and returns what it ``Found``. Its
    docstring is what it shows, and a paragraph with what passes."""
    seconds: int
    """Expected on one H100."""
    rehearsal: int
    """Seconds expected under the stand-in, on two cores."""
    several: bool = False
    """Whether it uses all GPUs, and needs several; otherwise it uses one."""

    @property
    def place(self) -> str:
        """``module:function``."""
        return self.call if ":" in self.call else f"{CHUNKS_MODULE}:{self.call}"

    @property
    def paragraphs(self) -> list[str]:
        """What it shows, and what passes."""
        text = inspect.getdoc(pkgutil.resolve_name(self.place)) or ""
        return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


CHUNKS = {
    "smoke": Chunk("smoke", 90, 16),
    "parity": Chunk("parity", 200, 90),
    "memory": Chunk("memory", 200, 60),
    "truth": Chunk("truth", 40, 15),
    "offload": Chunk("offload", 180, 45),
    "waits": Chunk("waits", 150, 60),
    "steps": Chunk("steps", 240, 90),
    "speed": Chunk("speed_of_small", 300, 30),
    "speed-medium": Chunk("speed_of_medium", 240, 30),
    "decoding": Chunk("decoding", 300, 45),
    "saved": Chunk("saved", 120, 90),
    "profile": Chunk("profile", 40, 15),
    "fit": Chunk("fit", 60, 20),
    "server": Chunk("server", 240, 60),
    "faster": Chunk("faster", 200, 45),
    "all-smoke": Chunk("smoke", 200, 60, several=True),
    "all-parity": Chunk("parity_of_all", 200, 120, several=True),
    "all-memory": Chunk("memory", 240, 60, several=True),
    "all-bus": Chunk("bus", 60, 15, several=True),
    "all-profile": Chunk("profile", 60, 20, several=True),
    "all-scaling": Chunk("scaling", 400, 90, several=True),
}
"""The proof in its order."""
PUBLISHED = {
    "mfu of small": ("MFU of GPT-2 small", 0.41, "llm.c on 8 H100"),
    "mfu of xl": ("MFU of GPT-2 xl", 0.49, "llm.c on 8 H100"),
    "beside nanoGPT": ("speed of GPT-2 small beside nanoGPT's, both compiled", 1.0, "nanoGPT"),
    "ddp from 1 to 8": ("DDP's efficiency from 1 to 8 GPUs", 0.98, "one machine"),
}
"""Figures that stand beside published ones, by the keys of ``Found.headline``: name, published share, by whom.
``planner/published.json`` has the sources. To miss one is a finding."""

# The page, and the sentence of the README.

Result = dict[str, Any]
UNPROVEN = """\
No GPU has run this code yet: [one command](docs/gpu.md) proves it on a rented machine in its first hour."""


def gpu_page(record: frame.Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``Gpu`` makes it.
        source: the record's path, for the reader.
    """
    chunks, title, beside = record["chunks"], "What holds on a GPU", ""
    if record["stand_in"]:
        title = "A rehearsal on a STAND-IN GPU: no figure here is of a GPU"
    else:
        measured = _headline(record)
        compared = [
            [what, f"{measured[key]:.0%}" if key in measured else "not measured", f"{share:.0%}", by]
            for key, (what, share, by) in PUBLISHED.items()
        ]
        beside = frame.section("Beside published figures", ["figure", "measured", "published", "by"], compared)
    rows = [[one["chunk"], one["says"], one["verdict"], one["limit"], f"{one['seconds']:.0f}"] for one in chunks]
    wrong, noted = (
        [f"{one['chunk']}: {why}" for one in chunks for why in one[key]] for key in ("failures", "findings")
    )
    return frame.page_of(
        f"# {title}",
        _summary(record),
        frame.made_from(record, source=source, name="gpu", page="gpu-proof"),
        frame.section("The chunks", ["chunk", "what it shows", "verdict", "limit", "seconds"], rows),
        frame.listed("Not passed", wrong),
        frame.listed("Findings", noted),
        frame.listed("Not run", record["missing"]),
        beside,
        *("\n".join([f"## {one['chunk']}\n", one["says"], "", *one["lines"]]).strip() for one in chunks),
    )


def _summary(record: frame.Record) -> str:
    """``13 of 14 chunks passed on 1 x NVIDIA H100 80GB HBM3; 2 left``, as a sentence."""
    chunks, where = record["chunks"], f"{record['gpus']} x {record['hardware']['gpu_name']}"
    passed = sum(one["verdict"] == PASSED for one in chunks)
    left = f"; {len(record['missing'])} left" if record["missing"] else ""
    return f"{passed} of {counted(len(chunks), 'chunk')} passed on {where}{left}."


def _headline(record: frame.Record) -> dict[str, float]:
    """The figures of all chunks that stand beside published ones."""
    every = (item for one in record["chunks"] for item in one["headline"].items())
    return {key: value for key, value in every if value is not None}


def summary_lines(record: frame.Record) -> list[str]:
    """The verdicts, for a console, and the README's sentence about a GPU."""
    rows = [[one["chunk"], one["verdict"], f"{one['seconds']:.0f} s", one["says"]] for one in record["chunks"]]
    lines = table(["chunk", "verdict", "time", "what it shows"], rows).splitlines()
    return [*lines, "", _summary(record) if record["stand_in"] else readme_sentence(record)]


def readme_sentence(record: frame.Record | None) -> str:
    """What the README says about GPUs.

    Args:
        record: of a GPU; None if there is none.

    Raises:
        UserError: it is of a stand-in, none of whose figures is one of a GPU.
    """
    if record is None:
        return UNPROVEN
    if record["stand_in"]:
        raise UserError("a record of a stand-in GPU says nothing about a GPU: README has no figure of it")
    known = ((*PUBLISHED[key], value) for key, value in _headline(record).items())
    figures = (f" {what}: {value:.0%} ({share:.0%}: {by})." for what, share, by, value in known)
    return f"[The proof](docs/gpu.md): {_summary(record)}{''.join(figures)}"


# The suite.


@dataclass(frozen=True, kw_only=True)
class GpuOptions(frame.SuiteOptions):
    """The command line."""

    keep: None = None  # the files of --into stay
    output: Path = flag(Path, "RECORD", "the record to write (default: gpu.json in the folder of --into)")
    into: Path = flag(Path, "DIR", default=Path("checkpoint/gpu"))
    """a file for each chunk, and the work of those that failed (default: %(default)s)"""
    budget: float | None = flag(POSITIVE, "SECONDS")
    """stop before a chunk that is not expected to end so soon; the same command continues"""
    only: tuple[str, ...] = frame.only_flag("CHUNK", "chunks, by the beginnings of their names")
    peer: tuple[str, ...] = frame.peers_flag("checkouts that speed and decoding compare with")
    stand_in: bool = switch("rehearse it without a GPU, on stand-ins of two; no figure of that is one of a GPU")


class Gpu(frame.Suite[GpuOptions, Result]):
    """Runs what is left of the proof.

    gpu: prove in the first hour on a rented machine what holds on its GPUs. Do strategies train, and the same model?
    Are memory and time as planned, and is the record true? How fast is it, beside others? Then checkpoints, profiles,
    and the server under load. It takes about 45 minutes on an H100, in chunks of at most ten. An interrupted proof is
    continued by the same command. Exit code 0: all chunks that ran have passed; 1: otherwise.

    Examples:
      .venv/bin/python src/benchmark.py gpu
      .venv/bin/python src/benchmark.py gpu --budget 540
      .venv/bin/python src/benchmark.py gpu --only speed --peer nanogpt=/tmp/nanoGPT
      .venv/bin/python src/benchmark.py gpu --stand_in --into checkpoint/gpu-rehearsal
    """

    name, record_of, unit, failure_line = frame.GPU, "a proof on GPUs", "chunk", "FAILED: {}"
    flags, page, summary = GpuOptions, staticmethod(gpu_page), staticmethod(summary_lines)
    names = f"chunks: {', '.join(CHUNKS)}"

    def __init__(self, options: GpuOptions, repository: Path) -> None:
        super().__init__(replace(options, output=options.output or options.into / "gpu.json"), repository)

    def work_folder(self, resources: ExitStack) -> Path:  # noqa: ARG002 - it stays
        return self.options.into

    def plan(self) -> int:
        self._started, self._left = time.monotonic(), list[str]()
        self._peers = [f"{name}={folder}" for name, folder in frame.read_peers(self.options.peer).items()]
        self._head = self._machine()
        hardware = self._head["hardware"]
        self._now: Result = {"git_commit": git_commit(self.repository), "sources_sha256": sources_sha256()}
        self._now |= {"stand_in": self.options.stand_in}
        self._now |= {"gpus": hardware["gpu_count_visible"], "gpu_name": hardware["gpu_name"]}
        self._every = {name: chunk for name, chunk in CHUNKS.items() if self._now["gpus"] > 1 or not chunk.several}
        self._chosen = frame.selected(self._every, self.options.only)
        return len(self._chosen)

    def _machine(self) -> frame.Record:
        """The head of a record of this machine.

        Raises:
            UserError: it has no GPU.
        """
        found, ending = self._execute("machine", f"{CHUNKS_MODULE}:machine", gpus=2, hardware={})
        if found is None:
            raise UserError(
                f"no NVIDIA GPU answers here ({ending.message}): --stand_in rehearses the proof without one"
            )
        return found

    def results(self) -> Iterator[Result]:
        budget = self.options.budget
        for number, (name, chunk) in enumerate(self._chosen.items()):
            made, again = self._earlier(name)
            if made:
                yield made | {"skipped": True}
                continue
            expected = chunk.rehearsal if self.options.stand_in else chunk.seconds
            spent = time.monotonic() - self._started
            if budget is not None and spent + expected > budget:
                self._left = list(self._chosen)[number:]
                self.console.say(f"stopped before {name}: it takes about {expected} s of {budget - spent:.0f} s left")
                return
            if again:
                self.console.say(f"{name} runs again: {again}")
            yield self._run(name, chunk)

    def _file(self, name: str) -> Path:
        return self.options.into / f"{name}.json"

    def _earlier(self, name: str) -> tuple[Result | None, str]:
        """The result of an earlier call; None if there is none that counts, and why one does not."""
        try:
            made = read_object(self._file(name), max_bytes=frame.MAX_BYTES)
        except JsonError:
            return None, f"{self._file(name)} cannot be read" if self._file(name).exists() else ""
        if made.get("status") != DONE:
            return None, f"it ended with an error: {made.get('message')}"
        changed = [key for key, value in self._now.items() if made.get(key) != value]
        return (None, f"it was made with other {', '.join(changed)}") if changed else (made, "")

    def _run(self, name: str, chunk: Chunk) -> Result:
        """Run a chunk, and write its file."""
        remove(self._file(name))
        gpus, hardware = self._now["gpus"] if chunk.several else 1, self._head["hardware"]
        found, ending = self._execute(name, chunk.place, gpus=gpus, hardware=hardware)
        says, limit, *_ = chunk.paragraphs
        result: Result = {"chunk": name, "says": says, "limit": limit, "seconds": round(ending.seconds, 1)}
        result |= {**self._now, "env": self._head["env"], "hardware": hardware}
        if found is not None:
            result |= {"status": DONE, "verdict": FAILED if found["failures"] else PASSED, **found}
        else:
            result |= {"status": ERROR, "verdict": ERROR, "message": ending.message, "figures": {}, "headline": {}}
            result |= {"failures": [f"{ending.state}: {ending.message}"], "findings": [], "lines": []}
        write_json_atomic(self._file(name), result)
        if result["verdict"] == PASSED:
            shutil.rmtree(self._work(name))
        return result

    def _work(self, name: str) -> Path:
        return self.options.into.resolve() / "work" / name

    def _execute(self, name: str, call: str, **proof: Any) -> tuple[frame.Record | None, sweep.Ending]:
        """What a process that calls ``call`` found, and how it ended; None if it wrote nothing."""
        folder = self._work(name)
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted chunk left
        folder.mkdir(parents=True)
        proof |= {"stand_in": self.options.stand_in, "peers": self._peers}
        write_json_atomic(folder / "job.json", {"call": call, "proof": proof})
        command = [sys.executable, "-m", CHUNKS_MODULE, str(folder / "job.json")]
        ending = sweep.train(command, log=folder / "log.txt", limit_sec=MOST_SEC, cwd=self.repository, device="cuda")
        with contextlib.suppress(JsonError):
            return read_object(folder / "found.json", max_bytes=frame.MAX_BYTES), ending
        return None, ending

    def line(self, result: Result, *, count: str, left: str) -> str:
        how = "before, skipped" if "skipped" in result else f"({result['seconds']:.0f} s)"
        return "\n    ".join([f"{count} {result['chunk']}: {result['verdict']} {how}{left}", *result["failures"]])

    def record(self, results: Sequence[Result]) -> frame.Record:
        chunks = {one["chunk"]: {key: one[key] for key in one if key != "skipped"} for one in results}
        for name in self._every:
            if made := self._earlier(name)[0]:
                chunks.setdefault(name, made)
        facts = {"stand_in": self.options.stand_in, "gpus": self._now["gpus"], "env": self._head["env"]}
        facts |= {"hardware": self._head["hardware"], "seconds": sum(one["seconds"] for one in chunks.values())}
        ordered = [chunks[name] for name in self._every if name in chunks]
        return facts | {"chunks": ordered, "missing": [name for name in self._every if name not in chunks]}

    def failures(self, record: frame.Record) -> list[str]:
        return [f"{one['chunk']}: {'; '.join(one['failures'])}" for one in record["chunks"] if one["verdict"] != PASSED]

    def closing_lines(self, failures: Sequence[str]) -> list[str]:
        left = [f"left: {', '.join(self._left)}; the same command continues"] if self._left else []
        return [*super().closing_lines(failures), *left]
