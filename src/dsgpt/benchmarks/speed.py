"""``benchmark.py speed``: how fast a step is, beside other trainers on the same work."""

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.frame import Record, Suite, SuiteOptions, device_flag, judged, only_flag, peers_flag, selected
from dsgpt.benchmarks.speed_rounds import measure_around, measure_first_step, measure_help, measure_memory, measure_row
from dsgpt.benchmarks.speed_work import HUGGING_FACE, NANOGPT, OURS, PEERS, Row, Work, published, rows
from dsgpt.common.command_line import POSITIVE, flag
from dsgpt.common.errors import UserError
from dsgpt.common.text import machine_words, table

Figures = Mapping[str, Any]
KEPT = ", memory kept"
"""How the names of peers end that get this program's memory settings."""


def speed_page(record: Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.speed`` makes it.
        source: the record's path, for the reader.
    """
    hardware = record["hardware"]
    peers = ", ".join(f"{name} at `{commit}`" for name, commit in record["peers"].items()) or "none"
    env = record["env"]
    software = f"torch {env['torch_version']}, transformers {env['transformers_version']}"
    head = f"""# How fast a step is

Generated from `{source}` by
`.venv/bin/python src/benchmark.py speed --table-from {source} --page docs/speed.md`;
`.venv/bin/python src/benchmark.py speed --peer nanogpt=FOLDER` measures it on your machine.

Every row compares trainers that take whole optimizer steps with the same shapes, precision, threads and tokens. They
run in turn, {record["rounds"]} turns each, so that all meet the same machine. A ratio is that of one turn to the turn
beside it; the table has its median and its range. The loops of the others are those of their own trainers; in bf16 they
compute under autocast. On a CPU this program keeps freed memory ([performance.md](performance.md)), which would help
the others too: "memory kept" is a peer with the same setting, and the first rows compare with these. Goals are set
against peers as they are. A ratio whose range holds 1 reads "no difference". Weak scaling compares tokens per second
and rank; "apart" are as many processes at once that send each other nothing, and no strategy can do better. `4 x 256`
is a model of 4 blocks of width 256, T the tokens of a sequence, B the sequences of a step.

Machine: {machine_words(hardware)}; {hardware["device"]}. {software}.
Checkouts: {peers}. Commit `{record["git_commit"]}`, {record["timestamp_utc"]}.{_missing(record)}"""
    sections = [
        ("Tokens per second", _speed_table(record)),
        ("Distance to the machine's limit", _limit_table(record)),
        ("Around the steps", _other_table(record)),
    ]
    return "\n".join([head, *(f"\n## {title}\n\n{text}" for title, text in sections if text), ""])


def summary_lines(record: Record) -> list[str]:
    """One line for each result, for a console, and what could not be measured."""
    return [*(verdict(result) for result in record["results"]), *filter(None, _missing(record).splitlines())]


def _missing(record: Record) -> str:
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
    figure = _figure(result)
    return figure is not None and bool(figure <= result["target"])


def verdict(result: Figures) -> str:
    """A result in one line."""
    title = result["title"]
    if "failed" in result:
        return f"{title}: FAILED: {result['failed']}"
    if "ratio" in result:
        return f"{title}: {_ratio(result)} (goal {result['target']:.2f}){_mark(result)}"
    if "products_sec" in result:
        return f"{title}: {result['products_sec']:.3f} s of matrix products in a step"
    return f"{title}: {_shown(result)}{_mark(result)}"


def _mark(result: Figures) -> str:
    return "" if reached(result) else ", NOT REACHED"


def _figure(result: Figures) -> float | None:
    """What is compared with the target; None where a loss was never reached."""
    if "seconds" in result:
        return float(result["seconds"]["median"])
    share = result["share"]
    return share if share is None or isinstance(share, float) else float(share["median"])


def _shown(result: Figures) -> str:
    if "seconds" in result:
        return f"{_span(result['seconds'], '.2f')} s (goal at most {result['target']:.1f} s)"
    if "peak_bytes" in result:
        peaks = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in result["peak_bytes"].items())
        return f"{result['share']:.2f} of {result['other']} ({peaks}; goal at most {result['target']:.2f})"
    if "curves" in result:
        ends = ", ".join(f"{name} ends at {losses[0]:.3f}" for name, losses in result["losses"].items())
        share = "never" if result["share"] is None else f"{_span(result['share'], '.2f')} of its time"
        return f"{share} ({ends}; goal at most {result['target']:.2f})"
    return f"{_span(result['share'], '.2%')} (goal at most {result['target']:.0%})"


def _ratio(result: Figures, *, key: str = "ratio", other: str = "best_other") -> str:
    return f"{_span(result[key], '.2f')}x {result[other]}{judged(result[key])}"


def _span(figures: Mapping[str, Any], form: str) -> str:
    """``1.20 (1.18 to 1.23)``."""
    median, smallest, largest = (format(figures[key], form) for key in ("median", "smallest", "largest"))
    return f"{median} ({smallest} to {largest})"


def _speed_table(record: Record) -> str:
    compared = [result for result in record["results"] if "ratio" in result]
    rows = []
    for result in compared:
        if "ratio_with_memory_kept" in result:
            ratio = _ratio(result, key="ratio_with_memory_kept", other="best_with_memory_kept")
            rows.append([f"{result['title']}, equal memory settings", _speeds(result, kept=True), ratio, "", ""])
    for result in compared:
        goal = f"{result['target']:.2f}{'' if reached(result) else ', **not reached**'}"
        rows.append([result["title"], _speeds(result, kept=False), _ratio(result), goal, _beside(result)])
    return table(["work", "tokens/s", "ratio", "goal", "beside it"], rows) if rows else ""


def _speeds(result: Figures, *, kept: bool) -> str:
    """Of the first contender, and of those with this setting of the memory."""
    ours, *others = result["entries"]
    shown = [ours, *(entry for entry in others if entry["name"].endswith(KEPT) == kept)]
    return "; ".join(f"{entry['name']} {_span(entry['tokens_per_sec'], ',.0f')}" for entry in shown)


def _beside(result: Figures) -> str:
    """The ratio of ranks that send nothing; on GPUs, how often a turn waited."""
    if "limit" in result:
        return f"{_span(result['limit'], '.2f')}x without communication{judged(result['limit'])}"
    waits = result["entries"][0]["synchronisations"]
    return "" if waits is None else f"{waits} synchronisations in a turn"


def _limit_table(record: Record) -> str:
    """The share of each step that its matrix products alone would take, at the speed that each has alone."""
    ceilings = {str(result["work"]): result for result in record["results"] if "products_sec" in result}
    rows = []
    for result in record["results"]:
        ceiling = ceilings.get(str({**result.get("work", {}), "compile": False}))
        if "ratio" not in result or ceiling is None:
            continue
        ours = result["entries"][0]
        step = result["work"]["batch"] * result["work"]["shape"]["length"] / ours["tokens_per_sec"]["median"]
        flops = result["flops_per_token"] * ours["tokens_per_sec"]["median"]
        rows.append(
            [
                result["title"],
                ours["name"],
                f"{step:.3f}",
                f"{ceiling['products_sec']:.3f}",
                f"{ceiling['products_sec'] / step:.0%}",
                f"{flops / 1e9:,.0f}",
            ]
        )
    header = ["work", "trainer", "step, s", "its matrix products alone, s", "share", "GFLOP/s"]
    return table(header, rows) if rows else ""


def _other_table(record: Record) -> str:
    others = [result for result in record["results"] if {"target", "failed"} & set(result) and "ratio" not in result]
    rows = [
        [result["title"], result.get("failed") or _shown(result), "yes" if reached(result) else "**no**"]
        for result in others
    ]
    return table(["what", "measured", "reached"], rows) if rows else ""


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
    """The command line."""

    rounds: int = flag(POSITIVE, "N", "turns of every trainer in a row (default: %(default)s)", default=5)
    peer: tuple[str, ...] = peers_flag("checkouts to compare with")
    only: tuple[str, ...] = only_flag("KEY", "rows, by the beginnings of their keys")
    device: str = device_flag("cpu or cuda")


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


class Speed(Suite[SpeedOptions, Result]):
    """Lets trainers take turns, and measures what a run costs beside its steps."""

    name, record_of, schema_version, unit = "speed", "speeds", SCHEMA_VERSION, "row"
    flags, page, summary = SpeedOptions, staticmethod(speed_page), staticmethod(summary_lines)
    description = """\
speed: let this program, nanoGPT and Hugging Face's GPT-2 train in turn with the same shapes, precision, threads and
tokens, and compare their tokens per second; compare DeepSpeed's engine with the plain loop, and several devices with
one; measure peak memory, start-up, and what this machine can do. Exit code 0: every goal was reached; 1: otherwise."""
    examples = """\
examples:
  git clone https://github.com/karpathy/nanoGPT /tmp/nanoGPT
  .venv/bin/python src/benchmark.py speed --peer nanogpt=/tmp/nanoGPT
  .venv/bin/python src/benchmark.py speed --peer nanogpt=/tmp/nanoGPT --only small memory --rounds 9
  .venv/bin/python src/benchmark.py speed --device cuda --peer nanogpt=/tmp/nanoGPT"""

    def plan(self) -> int:
        """Choose the rows, limits and other measurements of this device."""
        self._peers = read_peers(self.options.peer)
        cores, device = len(os.sched_getaffinity(0)), self.options.device
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
        self._measurements = selected(every, self.options.only)
        return len(self._measurements)

    def _rows_with(self, peer: str, every_row: Sequence[Row]) -> list[str]:
        """The titles of what was selected and compares with ``peer``."""
        titles = {row.key: row.title for row in every_row if any(entry.kind == peer for entry in row.entries)}
        titles |= {"time-to-loss": TIME_TO_LOSS} if peer == NANOGPT else {}
        only = self.options.only
        return [title for key, title in titles.items() if not only or key.startswith(only)]

    def begin(self) -> None:
        from dsgpt.benchmarks.random_tokens import write_random_tokens  # noqa: PLC0415 - numpy takes its time

        self.folder = self.folder.resolve()
        write_random_tokens(self.folder / "tokens", vocab_sizes=(8192, 50_257), count=TOKENS)

    def results(self) -> Iterator[Result]:
        for key, measure in self._measurements.items():
            try:
                yield {"key": key, **measure()}
            except UserError as error:  # the other rows took minutes, and count nevertheless
                yield {"key": key, "title": key, "failed": str(error)}

    def _row(self, row: Row) -> Result:
        return measure_row(
            row,
            rounds=self.options.rounds,
            tokens=self._tokens(row.work),
            folder=self.folder / row.key,
            peers=self._peers,
        )

    def _tokens(self, work: Work) -> Path:
        return self.folder / "tokens" / f"{work.shape.vocab_size}.bin"

    def _ceilings(self, work: Work) -> Result:
        from dsgpt.benchmarks.speed_trainers import measure_ceilings  # noqa: PLC0415 - torch takes seconds

        return {"title": f"ceilings, {_ceiling_key(work)}", "work": work.as_dict(), **measure_ceilings(work)}

    def _memory(self) -> Result:
        small = published("small", length=1024)
        work = Work(shape=small, batch=8, precision="bf16", device=self.options.device, threads=_threads(self))
        return measure_memory(
            work, steps=MEMORY_STEPS, tokens=self._tokens(work), folder=self.folder / "memory", peers=self._peers
        ) | {"target": MEMORY_TARGET}

    def _help(self) -> Result:
        return {"title": "src/gpt2.py --help", **measure_help(self.repository, rounds=self.options.rounds)}

    def _first_step(self, kind: str) -> Result:
        folder = self.folder / f"first-{kind}"
        measured = measure_first_step(
            self.repository, folder, kind=kind, device=self.options.device, data=self._demo_data(), rounds=3
        )
        return {"title": f"from launch to the end of the demo's first step, {kind}", **measured}

    def _around(self) -> Result:
        folder = self.folder / "around"
        measured = measure_around(self.repository, folder, device=self.options.device, data=self._demo_data())
        return {"title": "share of the time between two steps of the demo that is not the step", **measured}

    def _time_to_loss(self) -> Result:
        from dsgpt.benchmarks.time_to_loss import measure_time_to_loss  # noqa: PLC0415 - numpy takes its time

        measured = measure_time_to_loss(
            self.repository,
            self.folder / "time-to-loss",
            device=self.options.device,
            threads=_threads(self),
            data=self._demo_data(),
            peer=self._peers[NANOGPT],
            rounds=LOSS_ROUNDS,
        )
        return {"title": TIME_TO_LOSS, **measured}

    def _demo_data(self) -> Path:
        from dsgpt.benchmarks.cells import prepare_demo  # noqa: PLC0415 - numpy takes its time

        return prepare_demo(self.repository, self.folder / "demo-data")

    def line(self, result: Result, *, count: str, left: str) -> str:
        return f"{count} {verdict(result)}{left}"

    def record(self, results: Sequence[Result]) -> Record:
        return {
            "rounds": self.options.rounds,
            "peers": {name: _commit(folder) for name, folder in self._peers.items()},
            "missing": {peer: titles for peer, titles in self._missing.items() if titles},
            "results": list(results),
        }

    def failures(self, record: Record) -> list[str]:
        return [f"{result['title']}: the target was not reached" for result in record["results"] if missed(result)]


def missed(result: Mapping[str, Any]) -> bool:
    """Whether a result with a target is on the wrong side of it."""
    return reached(result) is False


def _threads(command: Speed) -> int:
    return 0 if command.options.device == "cuda" else len(os.sched_getaffinity(0))


def _ceiling_key(work: Work) -> str:
    return f"ceiling-{work.shape.name.replace(' ', '')}-{work.precision}-{work.tokens}"


def _commit(checkout: Path) -> str | None:
    """The commit of a peer's checkout; None if it is no git repository."""
    done = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None
