"""``benchmark.py speed``: how fast a step is, beside other trainers on the same work."""

import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dsgpt.benchmarks import cells, frame
from dsgpt.benchmarks.launch import LineWorker, WorkerEnded, child_environment, train, training_words
from dsgpt.common.command_line import POSITIVE, flag
from dsgpt.common.errors import UserError
from dsgpt.machine.launcher import launcher_command
from dsgpt.machine.topology import free_port
from dsgpt.model.config import PRESETS, GPT2Config
from dsgpt.record.provenance import git_commit
from dsgpt.record.schema import STEPS_FILE, read_steps

# What the suite measures: models, batches and precisions, and the contenders that take steps on them.

OURS, ENGINE, DDP, HUGGING_FACE = "dsgpt", "dsgpt ZeRO-1", "dsgpt ddp", "hugging face"
PEERS = (frame.NANOGPT, HUGGING_FACE)
KEPT = ", memory kept"
"""Suffix of a peer's name when it runs with dsgpt's memory settings."""


@dataclass(frozen=True, kw_only=True)
class Shape(cells.Shape):
    """A model and the length of its sequences."""

    length: int
    positions: int = 1024
    """Positions of the model, of which the first ``length`` are used."""


NARROW = Shape(**asdict(cells.NARROW), length=256)


@dataclass(frozen=True, kw_only=True)
class StepSetup:
    """The step that one process of a contender takes."""

    shape: Shape
    batch: int
    """Sequences of a rank in a step, without accumulation."""
    precision: str
    compile: bool = False
    device: str = "cpu"
    threads: int = 2
    """CPU threads of a process; on a GPU as many as the machine gives."""

    @property
    def tokens(self) -> int:
        """Tokens of a step of one rank."""
        return self.batch * self.shape.length

    @property
    def model(self) -> GPT2Config:
        """The model."""
        return self.shape.config(self.shape.positions)

    @property
    def title(self) -> str:
        """``small, T=256, B=4, fp32``."""
        return f"{self.shape.name}, T={self.shape.length}, B={self.batch}, {self.precision}"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One contender in a row."""

    name: str
    """Unique in the row."""
    kind: str
    """``OURS``, ``ENGINE``, ``DDP`` or one of ``PEERS``."""
    ranks: int = 1
    keeps_memory: bool = False
    """Whether a peer gets this program's memory settings (``machine/probe.py``) too. Goals are set against peers as
    they are; the ratio to these is given beside it."""
    apart: bool = False
    """Whether its ranks know nothing of each other: what the machine gives to as many processes at once. No strategy
    can scale better; the row gives this limit beside its ratio."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A comparison of tokens per second and rank: the first entry against the best of the others, interleaved."""

    title: str
    work: StepSetup
    entries: tuple[Entry, ...]
    target: float
    """The ratio that the first entry should reach."""

    @property
    def key(self) -> str:
        """Name for ``--only``."""
        return "-".join(re.findall(r"[^\W_]+", self.title.lower()))


def rows(device: str, *, threads: int, peers: Sequence[str]) -> list[Row]:
    """The comparisons on ``device`` with these peers; on a CPU for as many cores as ``threads``."""
    nanogpt, hugging_face = ([peer] * (peer in peers) for peer in PEERS)
    if device == "cuda":
        on_gpu = StepSetup(shape=NARROW, batch=1, precision="bf16", compile=True, device="cuda", threads=0)
        small, medium, *larger = (
            replace(on_gpu, shape=Shape.published(name, length=1024), batch=batch)
            for name, batch in (("small", 32), ("medium", 16), ("large", 8), ("xl", 4))
        )
        every = [_against_peers(small, peers, target=1.1), _engine(small), _against_peers(medium, peers, target=1.1)]
        every += [_against_peers(work, nanogpt, target=1.1) for work in larger]
        narrow = replace(on_gpu, batch=8)  # its kernels are short: it shows what Python costs
        for work in (replace(small, batch=16), replace(medium, batch=8), narrow):
            every.append(_against_peers(replace(work, compile=False), hugging_face, target=1.5))
    else:
        small = StepSetup(shape=Shape.published("small", length=256), batch=4, precision="bf16", threads=threads)
        narrow = replace(small, shape=NARROW, batch=8)
        every = [
            _against_peers(replace(work, precision=precision), peers, target=target)
            for work in (small, narrow)
            for precision, target in (("fp32", 1.15), ("bf16", 1.2))
        ]
        every += [_against_peers(replace(work, compile=True), nanogpt, target=1.1) for work in (small, narrow)]
        every += [_engine(replace(narrow, precision="fp32")), _engine(small)]
        tiny = StepSetup(shape=Shape.published("tiny", length=256), batch=4, precision="fp32", threads=1)
        for kind in (DDP, ENGINE) if threads > 1 else ():
            entries = (
                Entry(name=f"{threads} ranks", kind=kind, ranks=threads),
                Entry(name="1 rank", kind=kind),
                Entry(name=f"{threads} apart", kind=kind, ranks=threads, apart=True),
            )
            title = f"weak scaling 1 to {threads} cores, tiny, {kind.removeprefix('dsgpt ')}"
            every.append(Row(title=title, work=tiny, entries=entries, target=0.95))
    return [row for row in every if len(row.entries) > 1]


def _against_peers(work: StepSetup, peers: Sequence[str], *, target: float) -> Row:
    entries = [Entry(name=kind, kind=kind) for kind in (OURS, *peers)]
    if work.device == "cpu" and not work.compile:
        entries += [Entry(name=f"{peer}{KEPT}", kind=peer, keeps_memory=True) for peer in peers]
    title = f"{work.title}{', compiled' if work.compile else ''}"
    return Row(title=title, work=work, entries=tuple(entries), target=target)


def _engine(work: StepSetup) -> Row:
    title = f"ZeRO-1 on one device against the plain loop, {work.shape.name}, {work.precision}"
    entries = (Entry(name=ENGINE, kind=ENGINE), Entry(name=OURS, kind=OURS))
    return Row(title=title, work=work, entries=entries, target=0.97)


# Interleaved rounds: every contender of a row takes a few steps in turn, again and again.

CONTENDER = "dsgpt.benchmarks.contenders"
"""The module that every rank of a contender runs."""
WARM_UP_STEPS = 3
SETTLING_STEPS = 1
"""Steps before every turn, not counted: while a process waits, caches and even its pages may go to others."""
SHORTEST_TURN_SEC = 1.5
"""A turn has as many steps as take this long, so that starting and ending it does not count."""
MEMORY_STEPS = 2
MEMORY_TARGET = 0.7

Result = dict[str, Any]


def _compared(row: Row, speeds: Mapping[str, Sequence[float]]) -> Result:
    """The first entry's speed divided by that of the fastest other, round by round; and the limit of weak scaling."""
    compared = {entry.name: [speed / entry.ranks for speed in speeds[entry.name]] for entry in row.entries}
    first, *others = row.entries
    result: Result = {"target": row.target}
    kinds = (("best_other", "ratio", False), ("best_with_memory_kept", "ratio_with_memory_kept", True))
    for best_key, ratio_key, keeps_memory in kinds:
        names = [entry.name for entry in others if entry.keeps_memory == keeps_memory and not entry.apart]
        if names:
            best = max(names, key=lambda name: statistics.median(compared[name]))
            result |= {best_key: best, ratio_key: frame.ratios(compared[first.name], compared[best])}
    if apart := next((entry.name for entry in others if entry.apart), None):
        result["limit"] = frame.ratios(compared[apart], compared[result["best_other"]])
    return result


# The time until a training reaches a loss, and what is around the steps.
#
# The demo's recipe against nanoGPT's settings for a model of its size. Both train the same shape in fp32, on the demo's
# text, for the demo's number of tokens. Each has its own batch, learning rate and schedule. The loss to reach is the
# one that nanoGPT has at its end. Only training counts, not validation. Validation uses windows that no search of
# settings has seen.

HELP_TARGET_SEC, AROUND_TARGET = 0.3, 0.01
FIRST_STEP_TARGET_SEC = {"baseline": 6.0, "zero1": 12.0}
FIRST_STEP_ROUNDS, OVERHEAD_STEPS = 3, 12
LENGTH, DEMO_TOKENS, DEMO_VOCABULARY, DEMO_POSITIONS = 128, 819_200, 8192, PRESETS["demo"].block_size
"""Length, tokens, vocabulary and positions of ``make demo``."""
RECIPE = "ds_configs/sizes/demo.json"
"""Recipe of the demo."""
SEARCHED_WINDOWS, VALIDATION_WINDOWS = 640, 480
"""Windows of the validation file: those at its beginning, which ``benchmark.py recipes`` uses, and those after them."""
LATER_WINDOWS = "later-windows.bin"
"""Token file of the later windows."""
VALIDATIONS = 40
"""Validations of a training, evenly spaced."""
TIME_TO_LOSS_TARGET = 0.6
TIME_TO_LOSS = "the demo's recipe: time to the loss of nanoGPT's settings"


NANOGPT_DEFAULTS = {"batch": 12, "lr": 1e-3, "beta2": 0.99, "weight_decay": 0.1, "warm_up_steps": 100}
"""nanoGPT's settings for a small model without other instructions: README of nanoGPT, the small model for a CPU, and
config/train_shakespeare_char.py, which it changes. Its warm-up is meant for 2,000 steps or more."""

Curve = Sequence[tuple[float, float]]
"""Training seconds so far, and the validation loss then."""


def seconds_to(curve: Curve, loss: float) -> float | None:
    """The seconds at which a curve first is at ``loss`` or below, on a line between two validations; None if never."""
    for (earlier, above), (seconds, value) in itertools.pairwise([(0.0, math.inf), *curve]):
        if value <= loss:
            share = 1.0 if math.isinf(above) else (above - loss) / (above - value)
            return earlier + share * (seconds - earlier)
    return None


# The page of the record, and the lines of the console.

Figures = Mapping[str, Any]


def speed_page(record: frame.Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.speed`` makes it.
        source: the record's path, for the reader.
    """
    results = record["results"]
    peers = ", ".join(f"{name} at `{commit}`" for name, commit in record["peers"].items()) or "none"
    made = frame.generated_by(source, "speed", measure="speed --peer nanogpt=FOLDER")
    head = frame.filled("speed", record, made=made, checkouts=peers, without=_missing(record))
    ceilings = {str(result["work"]): result["products_sec"] for result in results if "products_sec" in result}
    kept, speeds, limits, around = [], [], [], []
    for result in results:
        title = result["title"]
        if "ratio" not in result:
            if {"target", "failed"} & set(result):
                shown = result.get("failed") or _shown(result)
                around.append([title, shown, "yes" if reached(result) else "**no**"])
            continue
        if "ratio_with_memory_kept" in result:
            ratio = frame.ratio_words(result["ratio_with_memory_kept"], result["best_with_memory_kept"])
            kept.append([f"{title}, equal memory settings", _speeds(result, memory_kept=True), ratio, "", ""])
        ours, work = result["entries"][0], result["work"]
        goal = f"{result['target']:.2f}{'' if reached(result) else ', **not reached**'}"
        waits = ours["synchronisations"]
        beside = "" if waits is None else f"{waits} synchronisations in a turn"
        if "limit" in result:
            beside = frame.ratio_words(result["limit"], "without communication")
        ratio = frame.ratio_words(result["ratio"], result["best_other"])
        speeds.append([title, _speeds(result, memory_kept=False), ratio, goal, beside])
        # the share of a step that its matrix products alone would take, at the speed that each has alone
        if (least := ceilings.get(str({**work, "compile": False}))) is not None:
            speed = ours["tokens_per_sec"]["median"]
            step, flops = work["batch"] * work["shape"]["length"] / speed, result["flops_per_token"] * speed
            figures = [f"{step:.3f}", f"{least:.3f}", f"{least / step:.0%}", f"{flops / 1e9:,.0f}"]
            limits.append([title, ours["name"], *figures])
    of_limits = ["work", "trainer", "step, s", "its matrix products alone, s", "share", "GFLOP/s"]
    return frame.page_of(
        head,
        frame.section("Tokens per second", ["work", "tokens/s", "ratio", "goal", "beside it"], [*kept, *speeds]),
        frame.section("Distance to the machine's limit", of_limits, limits),
        frame.section("Around the steps", ["what", "measured", "reached"], around),
    )


def summary_lines(record: frame.Record) -> list[str]:
    """One line for each result, for a console, and what could not be measured."""
    return [*(verdict(result) for result in record["results"]), *filter(None, _missing(record).splitlines())]


def _missing(record: frame.Record) -> str:
    """Rows without a peer whose checkout was not given; empty if all were, and for records that do not say it."""
    return "".join(
        f"\n\nWithout a checkout of {peer} (`--peer {peer}=FOLDER`) it is missing in: {'; '.join(titles)}."
        for peer, titles in record.get("missing", {}).items()
    )


def reached(result: Figures) -> bool | None:
    """Whether a result is on the right side of its target; None if it has none."""
    if "failed" in result:
        return False
    if "ratio" in result:
        first = result["entries"][0]
        waits = first["kind"] == OURS and first["synchronisations"]  # DeepSpeed's engine reads from the GPU in a step
        return bool(result["ratio"]["median"] >= result["target"]) and not waits
    if "target" not in result:
        return None
    figure = result["seconds"] if "seconds" in result else result["share"]
    median = figure["median"] if isinstance(figure, dict) else figure  # None where a loss was never reached
    return median is not None and bool(median <= result["target"])


def verdict(result: Figures) -> str:
    """A result in one line."""
    title = result["title"]
    if "failed" in result:
        return f"{title}: FAILED: {result['failed']}"
    if "products_sec" in result:
        return f"{title}: {result['products_sec']:.3f} s of matrix products in a step"
    return f"{title}: {_shown(result)}{'' if reached(result) else ', NOT REACHED'}"


def _shown(result: Figures) -> str:
    if "ratio" in result:
        return f"{frame.ratio_words(result['ratio'], result['best_other'])} (goal {result['target']:.2f})"
    if "seconds" in result:
        return f"{frame.span_words(result['seconds'], '.2f')} s (goal at most {result['target']:.1f} s)"
    if "peak_bytes" in result:
        peaks = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in result["peak_bytes"].items())
        return f"{result['share']:.2f} of {result['other']} ({peaks}; goal at most {result['target']:.2f})"
    if "curves" in result:
        ends = ", ".join(f"{name} ends at {losses[0]:.3f}" for name, losses in result["losses"].items())
        share = "never" if result["share"] is None else f"{frame.span_words(result['share'], '.2f')} of its time"
        return f"{share} ({ends}; goal at most {result['target']:.2f})"
    return f"{frame.span_words(result['share'], '.2%')} (goal at most {result['target']:.0%})"


def _speeds(result: Figures, *, memory_kept: bool) -> str:
    """Words for the speeds of the first contender, and of those with this setting of the memory."""
    ours, *others = result["entries"]
    shown = [ours, *(entry for entry in others if entry["name"].endswith(KEPT) == memory_kept)]
    return "; ".join(f"{entry['name']} {frame.span_words(entry['tokens_per_sec'], ',.0f')}" for entry in shown)


TOKENS = 2_000_000


@dataclass(frozen=True, kw_only=True)
class SpeedOptions(frame.SuiteOptions):
    """The command line."""

    rounds: int = flag(POSITIVE, "N", "turns of every trainer in a row (default: %(default)s)", default=5)
    peer: tuple[str, ...] = frame.peers_flag("checkouts to compare with")
    only: tuple[str, ...] = frame.only_flag("KEY", "rows, by the beginnings of their keys")
    device: str = frame.device_flag("cpu or cuda")


class Speed(frame.Suite[SpeedOptions, Result]):
    """Lets trainers take turns, and measures what a run costs beside its steps.

    speed: let this program, nanoGPT and Hugging Face's GPT-2 train in turn with the same shapes, precision, threads and
    tokens, and compare their tokens per second. Then compare DeepSpeed's engine with the plain loop, and several
    devices with one. Measure peak memory, start-up, and the peak rates of this machine. Exit code 0: every goal was
    reached; 1: otherwise.

    Examples:
      git clone https://github.com/karpathy/nanoGPT /tmp/nanoGPT
      .venv/bin/python src/benchmark.py speed --peer nanogpt=/tmp/nanoGPT
      .venv/bin/python src/benchmark.py speed --peer nanogpt=/tmp/nanoGPT --only small memory --rounds 9
      .venv/bin/python src/benchmark.py speed --device cuda --peer nanogpt=/tmp/nanoGPT
    """

    name, record_of, unit = "speed", "speeds", "row"
    flags, page, summary = SpeedOptions, staticmethod(speed_page), staticmethod(summary_lines)

    def plan(self) -> int:
        """Choose the rows, limits and other measurements of this device."""
        self._peers, device = frame.read_peers(self.options.peer), self.options.device
        cores = len(os.sched_getaffinity(0))
        self._threads = 0 if device == "cuda" else cores
        present = [peer for peer in PEERS if peer == HUGGING_FACE or peer in self._peers]
        compared, every_row = (rows(device, threads=cores, peers=peers) for peers in (present, PEERS))
        titles = {row.key: row.title for row in every_row if any(entry.kind == frame.NANOGPT for entry in row.entries)}
        titles["time-to-loss"] = TIME_TO_LOSS
        missing = [title for key, title in titles.items() if key.startswith(self.options.only or ("",))]
        self._without_nanogpt = [] if self._peers else missing
        every: dict[str, Callable[[], Result]] = {row.key: partial(self._row, row) for row in compared}
        for work in dict.fromkeys(replace(row.work, compile=False) for row in compared if row.entries[0].ranks == 1):
            key = f"ceiling-{work.shape.name.replace(' ', '')}-{work.precision}-{work.tokens}"
            every[key] = partial(self._ceilings, work, title=f"ceilings, {key}")
        every |= {"memory": self._memory, "help": self._help}
        every |= {f"first-step-{kind}": partial(self._first_step, kind) for kind in FIRST_STEP_TARGET_SEC}
        every |= {"around": self._around} | ({"time-to-loss": self._time_to_loss} if self._peers else {})
        self._measurements = frame.selected(every, self.options.only)
        return len(self._measurements)

    def begin(self) -> None:
        cells.write_random_tokens(self.folder / "tokens", vocab_sizes=(8192, 50_257), count=TOKENS)

    def results(self) -> Iterator[Result]:
        for key, measure in self._measurements.items():
            try:
                yield {"key": key, **measure()}
            except UserError as error:  # the other rows took minutes, and count nevertheless
                yield {"key": key, "title": key, "failed": str(error)}

    def _start(self, row: Row, entry: Entry, folder: Path, resources: ExitStack) -> Callable[[int], Result]:
        """Start the ranks of a contender, which ``resources`` ends.

        Returns:
            A function that lets every rank take so many steps, and returns the answer of the slowest. It raises a
            ``UserError`` with the end of what a rank printed if that ended.
        """
        peer, port, workers = self._peers.get(entry.kind), free_port(), []
        job = {"kind": entry.kind, "keeps_memory": entry.keeps_memory, "work": asdict(row.work)}
        job |= {"tokens": str(self.folder / "tokens" / f"{row.work.shape.vocab_size}.bin"), "peer": peer and str(peer)}
        for number in range(entry.ranks):
            rank, ranks = (0, 1) if entry.apart else (number, entry.ranks)
            variables: dict[str, object] = dict.fromkeys(("RANK", "LOCAL_RANK"), rank)
            variables |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ranks)
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port() if entry.apart else port}
            own = folder / entry.name.replace(" ", "-") / f"rank-{number}"
            worker = LineWorker(CONTENDER, job, own, threads=row.work.threads, variables=variables)
            workers.append(resources.enter_context(worker))

        def take(steps: int) -> Result:
            try:
                for worker in workers:
                    worker.send(steps)
                return max((worker.read() for worker in workers), key=lambda answer: float(answer["seconds"]))
            except WorkerEnded as error:
                raise UserError(f"{entry.name}, {row.title}: ended: {error.output[-1500:]}") from error

        return take

    def _row(self, row: Row) -> Result:
        """Tokens per second of every contender in every round, and the ratio of the first to the best."""
        with ExitStack() as resources:
            takes = {entry.name: self._start(row, entry, self.folder / row.key, resources) for entry in row.entries}
            steps = {}
            for name, take in takes.items():
                take(WARM_UP_STEPS)
                steps[name] = max(1, math.ceil(SHORTEST_TURN_SEC / (take(2)["seconds"] / 2)))

            def turn(name: str) -> Result:
                takes[name](SETTLING_STEPS)
                return takes[name](steps[name])

            answers = frame.contest({name: partial(turn, name) for name in takes}, rounds=self.options.rounds)
        speeds, entries = {}, []
        for entry in row.entries:
            own, tokens = answers[entry.name], row.work.tokens * entry.ranks * steps[entry.name]
            speeds[entry.name] = [tokens / answer["seconds"] for answer in own]
            facts = {"name": entry.name, "kind": entry.kind, "ranks": entry.ranks}
            facts |= {"steps_per_turn": steps[entry.name], "tokens_per_sec": frame.span(speeds[entry.name])}
            entries.append(facts | {key: own[-1][key] for key in ("loss", "peak_bytes", "synchronisations")})
        flops = row.work.model.flops_per_token(row.work.shape.length)
        head = {"key": row.key, "title": row.title, "work": asdict(row.work), "flops_per_token": flops}
        return head | {"entries": entries, **_compared(row, speeds)}

    def _ceilings(self, work: StepSetup, *, title: str) -> Result:
        from dsgpt.benchmarks.contenders import products_sec  # noqa: PLC0415 - torch takes seconds

        return {"title": title, "work": asdict(work), "products_sec": products_sec(work)}

    def _memory(self) -> Result:
        """The most memory of a process that takes a few steps, and its ratio to that of nanoGPT, if it takes part.

        On a CPU all that was resident in the host, with Python and its libraries; on a GPU what torch had allocated.
        """
        shape, device = Shape.published("small", length=1024), self.options.device
        work = StepSetup(shape=shape, batch=8, precision="bf16", device=device, threads=self._threads)
        kinds = (OURS, *(peer for peer in PEERS if peer == HUGGING_FACE or peer in self._peers))
        entries = tuple(Entry(name=kind, kind=kind) for kind in kinds)
        row, peaks = Row(title=f"peak memory, {work.title}", work=work, entries=entries, target=MEMORY_TARGET), {}
        for entry in entries:
            with ExitStack() as resources:
                take = self._start(row, entry, self.folder / "memory", resources)
                peaks[entry.name] = take(MEMORY_STEPS)["peak_bytes"]
        other = kinds[1]
        measured = {"title": row.title, "work": asdict(work), "peak_bytes": peaks, "other": other}
        return measured | {"share": peaks[OURS] / peaks[other], "target": row.target}

    def _help(self) -> Result:
        seconds = []
        for _ in range(self.options.rounds):
            started = time.perf_counter()
            command = [sys.executable, "src/gpt2.py", "--help"]
            subprocess.run(command, cwd=self.repository, check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - started)
        return {"title": "src/gpt2.py --help", "seconds": frame.span(seconds), "target": HELP_TARGET_SEC}

    def _demo(self, run: str, **more: object) -> dict[str, object]:
        """The flags of a training of ``make demo``; its files are in the folder ``run``."""
        return {
            **{"run_type": "baseline", "model_size": "demo", "seq_length": LENGTH, "save_every": 0},
            **cells.file_values(self._corpus, recipe=self.repository / RECIPE, run_dir=self.folder / run),
            "device": self.options.device,
            **({"threads_per_device": self._threads} if self._threads else {}),
            **more,
        }

    def _first_step(self, kind: str) -> Result:
        """Seconds from the launch to the end of the first step; one run before is not counted."""
        launcher, run_type = ("python", "baseline") if kind == "baseline" else ("deepspeed", "optimized")
        variables = child_environment() | ({"DS_ACCELERATOR": "cpu"} if self.options.device == "cpu" else {})
        seconds = []
        for number in range(FIRST_STEP_ROUNDS + 1):
            values = self._demo(f"first-{kind}/{number}", run_type=run_type, max_train_steps=1, max_val_steps=1)
            script = str(self.repository / "src" / "gpt2.py")
            command = [*launcher_command(launcher, 1), script, *training_words(values | {"steps_per_print": 1})]
            started, pipe = time.perf_counter(), subprocess.PIPE
            with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=variables) as process:
                assert process.stdout is not None
                lines = [(time.perf_counter() - started, line) for line in process.stdout]
            at_step = [at for at, line in lines if re.search(r"step +1/1  loss", line)]
            if process.returncode or not at_step:
                raise UserError(f"{' '.join(command[:3])}: no first step: {''.join(line for _, line in lines)[-1500:]}")
            seconds.append(at_step[0])
        title = f"from launch to the end of the demo's first step, {kind}"
        return {"title": title, "seconds": frame.span(seconds[1:]), "target": FIRST_STEP_TARGET_SEC[kind]}

    def _around(self) -> Result:
        """The share of a demo run that is not forward, backward and optimizer: data, metering, logging, journal.

        From the run's own lines: the time from one step's end to the next, without the step but with its wait for data.
        """
        values = self._demo("around", max_train_steps=OVERHEAD_STEPS, max_val_steps=1, steps_per_print=10)
        train(values, repository=self.repository, what="the demo's training")
        lines = read_steps(self.folder / "around" / STEPS_FILE)
        steps = [line for line in lines if "step_time_sec" in line and not line["warm_up"]]
        shares = []
        for before, after in itertools.pairwise(steps):
            between = after["wall_time_sec"] - before["wall_time_sec"]
            shares.append((between - after["step_time_sec"] + after["dataload_time_sec"]) / between)
        title = "share of the time between two steps of the demo that is not the step"
        step_sec = frame.span([line["step_time_sec"] for line in steps])
        return {"title": title, "share": frame.span(shares), "target": AROUND_TARGET, "step_sec": step_sec}

    def _time_to_loss(self) -> Result:
        """Our time to the loss of nanoGPT's end, as a share of nanoGPT's; None if ours never reaches it."""
        first, tokens = SEARCHED_WINDOWS * LENGTH, VALIDATION_WINDOWS * LENGTH + 1
        cells.cut_tokens(self._corpus.val, self.folder / LATER_WINDOWS, first=first, end=first + tokens)
        ours, theirs = self._own_curve(), self._nanogpt_curve()
        seconds, loss = theirs[-1]
        own_seconds = seconds_to(ours, loss)
        share = None if own_seconds is None else frame.span([own_seconds / seconds])
        losses, curves = {OURS: [ours[-1][1]], frame.NANOGPT: [loss]}, {OURS: [ours], frame.NANOGPT: [theirs]}
        head = {"title": TIME_TO_LOSS, "target": TIME_TO_LOSS_TARGET, "share": share}
        return head | {"losses": losses, "curves": curves, "settings": NANOGPT_DEFAULTS}

    def _own_curve(self) -> Curve:
        batch = json.loads((self.repository / RECIPE).read_text(encoding="utf-8"))["train_batch_size"]
        steps = DEMO_TOKENS // (batch * LENGTH)
        values = self._demo("own-curve", max_train_steps=steps, eval_every=steps // VALIDATIONS, no_inference=True)
        values |= {"val_data_path": self.folder / LATER_WINDOWS, "precision": "fp32"}
        train(values, repository=self.repository, what="the demo's training")
        curve, seconds = [], 0.0
        for line in read_steps(self.folder / "own-curve" / STEPS_FILE):
            seconds = line.get("train_time_sec", seconds)
            if "val_loss" in line:
                curve.append((seconds, line["val_loss"]))
        return curve

    def _nanogpt_curve(self) -> Curve:
        shape = Shape.published("demo", length=LENGTH, vocab_size=DEMO_VOCABULARY, positions=DEMO_POSITIONS)
        device, batch = self.options.device, int(NANOGPT_DEFAULTS["batch"])
        work = StepSetup(shape=shape, batch=batch, precision="fp32", device=device, threads=self._threads)
        steps = DEMO_TOKENS // work.tokens
        schedule = {"steps": steps, "validate_every": max(1, steps // VALIDATIONS), "windows": VALIDATION_WINDOWS}
        job = {"work": asdict(work), "schedule": schedule, "peer": str(self._peers[frame.NANOGPT])}
        job |= {"tokens": str(self._corpus.train), "val": str(self.folder / LATER_WINDOWS)}
        try:
            with LineWorker(CONTENDER, job, self.folder / "nanogpt-curve", threads=self._threads) as worker:
                return [(seconds, loss) for seconds, loss in worker.read()["curve"]]
        except WorkerEnded as error:
            raise UserError(f"nanoGPT's training failed: {error.output.strip()[-1000:]}") from error

    @property
    def _corpus(self) -> cells.Corpus:
        """The demo's text, prepared once."""
        return cells.prepare_demo(self.repository, self.folder / "demo-data")

    def line(self, result: Result, *, count: str, left: str) -> str:
        return f"{count} {verdict(result)}{left}"

    def record(self, results: Sequence[Result]) -> frame.Record:
        commits = {name: git_commit(folder, mark="") for name, folder in self._peers.items()}
        missing = {frame.NANOGPT: self._without_nanogpt} if self._without_nanogpt else {}
        return {"rounds": self.options.rounds, "peers": commits, "missing": missing, "results": list(results)}

    def failures(self, record: frame.Record) -> list[str]:
        missed = (result["title"] for result in record["results"] if reached(result) is False)
        return [f"{title}: the target was not reached" for title in missed]
