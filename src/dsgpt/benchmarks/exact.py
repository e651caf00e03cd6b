"""``benchmark.py exact``: the hash of the weights under every strategy on every number of ranks, and its price.

The control trains without the flag: its hashes must differ, or the comparison could not see a difference.
"""

import contextlib
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from dsgpt.benchmarks import cells as shared
from dsgpt.benchmarks import frame, launch
from dsgpt.benchmarks.cells import STRATEGIES, Cell, CellEnd, by
from dsgpt.common.command_line import COUNT, flag
from dsgpt.common.text import bullets, counted
from dsgpt.machine.launcher import launcher_command
from dsgpt.model.config import PRESETS

STEPS, SAVED = 20, 10
BATCH, SEQUENCE = 8, 64
RANKS = (1, 2, 4, 8)
NAMES = ("baseline", "ddp", "fsdp", "zero0", "zero1", "zero2", "zero3", "pipeline2-zero0", "pipeline2-zero1")
RESUMES = ((("baseline", 1), ("zero3", 4)), (("zero2", 8), ("pipeline2-zero1", 2)), (("fsdp", 2), ("baseline", 1)))
KILLED = ("zero1", 2)
CONTROL = (("baseline", 1), ("ddp", 2), ("zero3", 4))
SAME, RESUMED, KILL, PLAIN, PRICE = "exact", "resumed", "killed and resumed", "without --exact", "price"

Result = dict[str, Any]


def cell_of(strategy: str, ranks: int) -> Cell:
    """The cell that computes one sequence at a time."""
    return Cell(strategy=strategy, ranks=ranks, accumulation=BATCH // (ranks // STRATEGIES[strategy].model_ranks))


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to the weights of the last step."""

    kind: str
    cell: Cell
    source: Cell | None = None
    """Where the run began, whose checkpoint this cell resumes."""


def exact_page(record: frame.Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``Exact`` makes it.
        source: the record's path, for the reader.
    """
    by_place = {(one["strategy"], one["ranks"]): one for one in record["ends"] if one["kind"] == SAME}
    strategies = dict.fromkeys(strategy for strategy, _ in by_place)

    def short(one: Result | None) -> str:
        return "" if one is None else f"`{one['sha256'][:8]}`" if one["sha256"] else f"**{one['message']}**"

    rows = [[name, *(short(by_place.get((name, ranks))) for ranks in RANKS)] for name in strategies]
    others = [[one["name"], one["kind"], short(one)] for one in record["ends"] if one["kind"] != SAME]
    return frame.page_of(
        frame.filled("exact", record, record_at=source, summary=bullets(summary_lines(record))),
        frame.section("Strategies by ranks", ["strategy", *(counted(ranks, "rank") for ranks in RANKS)], rows),
        frame.section("Resumed, killed, and without the flag", ["training", "how", "hash"], others),
    )


def summary_lines(record: frame.Record) -> list[str]:
    """The result in words, for a console."""
    exact = [one for one in record["ends"] if one["kind"] != PLAIN]
    hashes = {one["sha256"] for one in exact}
    plain = {one["sha256"] for one in record["ends"] if one["kind"] == PLAIN}
    lines = [f"{counted(len(exact), 'training')} with --exact: {counted(len(hashes), 'set')} of weights"]
    if plain:
        lines.append(f"without it, the control: {counted(len(plain), 'set')} of weights")
    if record["price"]:
        lines.append(f"a baseline takes {frame.span_words(record['price'], '.2f')} times as long with it")
    return lines


@dataclass(frozen=True, kw_only=True)
class ExactOptions(frame.SuiteOptions):
    """The command line."""

    only: tuple[str, ...] = frame.only_flag("STRATEGY", "strategies")
    rounds: int = flag(COUNT, "N", "pairs of trainings that measure the price (default: %(default)s)", default=5)


class Exact(frame.Suite[ExactOptions, Result]):
    """Compares the hashes of weights that were trained with --exact.

    exact: train 20 steps of the model `tiny` with --exact under every strategy on 1, 2, 4 and 8 ranks, resume some runs
    under others, kill one, and compare the sha256 of all weights. Then measure what the flag costs a baseline. Exit
    code 0: all hashes are equal; 1: otherwise.

    Examples:
      .venv/bin/python src/benchmark.py exact
      .venv/bin/python src/benchmark.py exact --only baseline ddp zero3 --rounds 0
    """

    name, record_of, unit = "exact", "the exact suite", "training"
    flags, page, summary = ExactOptions, staticmethod(exact_page), staticmethod(summary_lines)
    model = PRESETS["tiny"]

    def plan(self) -> int:
        names = frame.selected({name: name for name in NAMES}, self.options.only)
        self._ways = [
            Way(kind=SAME, cell=cell_of(name, ranks))
            for name in names
            for ranks in (RANKS if name != "baseline" else (1,))
            if ranks >= STRATEGIES[name].model_ranks
        ]
        self._ways += [
            Way(kind=RESUMED, cell=cell_of(*target), source=cell_of(*source))
            for source, target in RESUMES
            if source[0] in names and target[0] in names
        ]
        self._ways += [Way(kind=KILL, cell=cell_of(*KILLED))] if KILLED[0] in names else []
        self._ways += [
            Way(kind=PLAIN, cell=replace(cell_of(*place), accumulation=1)) for place in CONTROL if place[0] in names
        ]
        return len(self._ways) + 2 * self.options.rounds

    def begin(self) -> None:
        self._runner = shared.CellRunner(self.folder, repository=self.repository, device="cpu", steps=STEPS)
        shape = launch.shape_values(replace(self.model, vocab_size=shared.VOCABULARY, block_size=SEQUENCE))
        self._work: dict[str, object] = {
            **{name: size for name, size in shape.items() if name != "vocab_size"},
            **{"seq_length": SEQUENCE, "global_batch_size": BATCH, "save_every": SAVED, "keep_checkpoints": 9},
            "no_inference": True,
        }

    def results(self) -> Iterator[Result]:
        for kind in (SAME, PLAIN, RESUMED):  # which resumes what was trained before
            subjects = [way for way in self._ways if way.kind == kind]
            for way, end in self._runner.run(
                subjects, place=lambda way: way.cell.place, assign=self._assigned, imports=launch.ALL_IMPORTS
            ):
                yield self._ended(way, end)
        for way in self._ways:
            if way.kind == KILL:
                yield self._ended(way, self._killed(way))
        recipes = self.repository / "ds_configs"
        recipe = shared.write_recipe(self.folder / "recipe.json", cell_of("baseline", 1), recipes=recipes)
        values = self._work | {"run_type": "baseline", "deepspeed_config": recipe, "device": "cpu"}
        values |= {"train_data_path": self._runner.corpus.train, "val_data_path": self._runner.corpus.val}
        for number, how in frame.turns((SAME, PLAIN), rounds=self.options.rounds):
            own = {"checkpoint_path": self.folder / f"price-{number}-{how[:5]}", "max_train_steps": STEPS}
            own |= {"exact": True} if how == SAME else {"micro_batch_size_per_gpu": BATCH}
            record = launch.train(values | own, repository=self.repository, what="a training")
            seconds = BATCH * SEQUENCE / record["summary"]["mean_tokens_per_sec_global"]
            yield {"kind": PRICE, "name": f"baseline, {how}", "round": number, "how": how, "step_sec": seconds}

    def _assigned(self, way: Way) -> launch.Assignment:
        words, arguments = launch.training_words(self._work), {}
        if way.kind != PLAIN:
            words.append("--exact")
        if way.source is not None:
            words.append("--resume")
            source = Way(kind=SAME, cell=way.source)
            arguments = {"checkpoint": str(self.folder / _folder(source) / "run" / f"step-{SAVED:08d}")}
        call = "dsgpt.benchmarks.resume:train"
        return self._runner.assignment(way.cell, call=call, name=_folder(way), more=words, arguments=arguments)

    def _killed(self, way: Way) -> CellEnd:
        """The end of a run whose processes are all killed after its first checkpoint, and that is then resumed."""
        assigned = self._assigned(way)
        folder, launcher = Path(assigned.folder), launcher_command("torchrun", way.cell.ranks)
        command = [*launcher, str(self.repository / "src" / "gpt2.py"), *assigned.flags]
        with (folder / "log").open("wb") as log:
            with launch.own_group(command, log, device="cpu") as process:
                while process.poll() is None and not (folder / "run" / f"step-{SAVED:08d}").exists():
                    time.sleep(0.005)
                if process.poll() is None:
                    for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
                        with contextlib.suppress(psutil.NoSuchProcess):
                            one.kill()
            wrong = "it ended before it could be killed" if (folder / "run" / "RUN_COMPLETE.txt").exists() else ""
            again = [*command, "--resume"]
            done = subprocess.run(again, env=launch.child_environment("cpu"), stdout=log, stderr=log, check=False)
        message = wrong or ("" if done.returncode == 0 else f"the resume ended with code {done.returncode}")
        return CellEnd(folder=folder, ranks=[], status="error" if message else "done", message=message)

    def _ended(self, way: Way, end: CellEnd) -> Result:
        from dsgpt.training.trainer import weights_hash  # noqa: PLC0415 - torch takes seconds

        sha256 = weights_hash(end.folder / "run" / f"step-{STEPS:08d}") if end.status == "done" else None
        name = by(way.cell) if way.source is None else f"{by(way.source)} to {by(way.cell)}"
        facts = {"strategy": way.cell.strategy, "ranks": way.cell.ranks, "seconds": round(end.seconds, 2)}
        return {"kind": way.kind, "name": name, "sha256": sha256, "message": end.message, **facts}

    def line(self, result: Result, *, count: str, left: str) -> str:
        if result["kind"] == PRICE:
            return f"{count} {result['name']}: {result['step_sec']:.3f} s a step"
        return f"{count} {result['name']}, {result['kind']}: {result['sha256'] or result['message']}{left}"

    def record(self, results: Sequence[Result]) -> frame.Record:
        steps = {how: [one["step_sec"] for one in results if one.get("how") == how] for how in (SAME, PLAIN)}
        return {
            "work": {"steps": STEPS, "saved": SAVED, "global_batch_size": BATCH, "seq_len": SEQUENCE},
            "ends": [one for one in results if one["kind"] != PRICE],
            "step_sec": {how: frame.span(times) for how, times in steps.items() if times},
            "price": frame.ratios(steps[SAME], steps[PLAIN]) if steps[SAME] else None,
        }

    def failures(self, record: frame.Record) -> list[str]:
        ends = [one for one in record["ends"] if one["kind"] != PLAIN]
        expected = ends[0]["sha256"]
        wrong = [f"{one['name']}, {one['kind']}" for one in ends if one["sha256"] is None or one["sha256"] != expected]
        plain = [one["sha256"] for one in record["ends"] if one["kind"] == PLAIN]
        return wrong + (["the control, which has one hash"] if len(plain) > 1 and len(set(plain)) == 1 else [])


def _folder(way: Way) -> str:
    words = f"{way.kind} {way.cell.folder}" + (f" from {way.source.folder}" if way.source else "")
    return words.replace(" ", "-")
