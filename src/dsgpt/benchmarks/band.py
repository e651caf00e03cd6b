"""``benchmark.py band``: whether the loss of a run is normal, by reference runs of the same model on the same text.

The reference runs differ in their seeds alone. At each step they have a mean and a spread. The band is the interval in
which a further seed is with a probability of 99%. A run is judged by its smoothed loss.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from dsgpt.benchmarks import cells, frame
from dsgpt.benchmarks.launch import train
from dsgpt.common.command_line import flag
from dsgpt.common.errors import EXIT_DONE, UserError
from dsgpt.common.json_files import JsonError, read_object
from dsgpt.common.text import REPOSITORY, next_line
from dsgpt.config.options import TRAINING_FACTS, WORK_FACTS
from dsgpt.data.sources import TRANSFORMERS_NAME
from dsgpt.record.equal_work import judge, show
from dsgpt.record.runs import Run, read_run, smoothed
from dsgpt.record.schema import COMPLETE_FILE, RECORD_FILE, STEPS_FILE, read_steps
from dsgpt.record.work import Worked

STEPS = {"demo": 200, "tiny": 40}
"""Sizes that have a band, and the steps of their reference runs."""
SEEDS, LENGTH = (1, 2, 3, 4, 5), 128
WINDOW, FLOOR = 25, 0.02
"""Steps of the trailing mean; nats from the middle of the band to its edge at least."""
OFTEN = 100
"""Steps between two checks of a long run, as docs/training.md advises."""
WIDTHS = {4: 6.53, 5: 5.04}
"""Number of seeds n to the standard deviations from the middle of the band to its edge, as of a prediction interval:
sqrt(1 + 1/n) times the 99.5% quantile of Student's t. Four seeds are those beside a fifth."""
STREAK = 5
"""Steps outside in a row that count: one batch may be unusual text."""
BANDS = REPOSITORY / "checkpoint" / "reference" / "cpu-2-cores" / "band.json"
FREE = (*("seed", "optimizer steps", "tokens"), *(fact for fact in WORK_FACTS if "validation" in fact))
"""Facts in which a run may differ from the reference without a change of its curve. If the planned length differs, the
schedule does."""


SHAPE = ("model n_layer", "model n_embd")
"""Facts by which the reference of a run is found."""
UNEXPLAINED = "no recorded setting differs from the reference but the seed: look at the data order and the code"


def band_of(curves: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """The band of losses (seeds, steps): its edges and its middle at each step.

    The variance over a few seeds is itself uncertain, so it is that of all steps within ``WINDOW``.
    """
    import numpy as np  # noqa: PLC0415 - takes a sixth of the time of --help

    smooth = np.stack([smoothed(np.array(curve), window=WINDOW) for curve in curves])
    mean, variance = smooth.mean(axis=0), smooth.var(axis=0, ddof=1)
    near = [variance[max(0, step - WINDOW) : step + WINDOW + 1].mean() for step in range(len(mean))]
    half = np.maximum(WIDTHS[len(curves)] * np.sqrt(near), FLOOR)
    edges = {"low": mean - half, "mean": mean, "high": mean + half}
    return {name: [round(float(value), 4) for value in values] for name, values in edges.items()}


def first_outside(losses: Sequence[float], band: Mapping[str, Sequence[float]]) -> int | None:
    """The first of ``STREAK`` steps in a row, counted from 1, at which the smoothed loss is outside; None if none is.

    A loss that is not a number is outside.
    """
    import numpy as np  # noqa: PLC0415 - as above

    own = np.array(losses[: len(band["low"])])
    smooth, in_a_row = np.where(np.isnan(own), own, smoothed(own, window=WINDOW)), 0
    for step, (low, loss, high) in enumerate(zip(band["low"], smooth, band["high"], strict=False), start=1):
        in_a_row = 0 if low <= loss <= high else in_a_row + 1
        if in_a_row == STREAK:
            return step - STREAK + 1
    return None


def checked_in(folder: Path) -> float:
    """How many times as long as the step before it a checked step takes: the median of a run."""
    times = [line["step_time_sec"] for line in read_steps(folder / STEPS_FILE) if "loss" in line]
    return float(median(second / first for first, second in zip(times[::2], times[1::2], strict=False)))


def losses_of(run: Run) -> list[float]:
    """The loss of each step from the first.

    Raises:
        UserError: the record has no loss of each step.
    """
    steps = run.train_curve.at_steps()
    if not steps or sorted(steps) != list(range(1, len(steps) + 1)):
        missing = "has no loss of each step from the first"
        raise UserError(f"{run.name}: {missing}: give a run folder with its metrics.jsonl")
    return [steps[step] for step in sorted(steps)]


def source_of(folder: Path) -> str:
    """The text that a run was trained on, in the words of its token file."""
    return str((read_object(folder / RECORD_FILE).get("data") or {}).get("train_source"))


def verdict(folder: Path, bands: Path) -> tuple[list[str], bool, dict[str, Any], list[float]]:
    """What is to be said of the run in ``folder``: lines, whether it is normal, its reference, and its losses.

    Raises:
        UserError: the run or the bands cannot be read, or no reference is of this text and model.
    """
    try:
        sizes = read_object(bands)["sizes"]
        run, source = read_run(folder, name=str(folder)), source_of(folder)
    except (JsonError, KeyError) as error:
        raise UserError(f"--bands {bands}: is no record of reference runs ({error})") from error
    expected = {one["source"] for one in sizes.values()}
    if source not in expected:
        todo = f"prepare the corpus {TRANSFORMERS_NAME} with data_prep/preprocess.py, and train on it"
        raise UserError(f"{folder}: was trained on {source}, and the bands are of {', '.join(expected)}: {todo}")
    shapes = {tuple(one["work"][fact] for fact in SHAPE): name for name, one in sizes.items()}
    size = shapes.get(tuple(run.work[fact] for fact in SHAPE))
    if size is None:
        there = f"there are {', '.join(sizes)}: train one of --model_size"
        raise UserError(f"{folder}: no reference has its model; {there}")
    reference, losses = sizes[size], losses_of(run)
    lines = [
        f"{one.fact}: {show(one.values[1])}; the reference has {show(one.values[0])}"
        for one in judge([Worked(name=size, work=reference["work"]), run]).differences
        if one.fact not in FREE
    ]
    step, judged = first_outside(losses, reference["band"]), min(len(losses), len(reference["band"]["low"]))
    if step is None:
        said = f"normal: the loss of steps 1 to {judged} is inside the band of {size}"
    else:
        low, high = (reference["band"][edge][step - 1] for edge in ("low", "high"))
        said = f"not normal: from step {step} on the loss is outside the band of {size}, there {low:.3f} to {high:.3f}"
        lines = lines or [UNEXPLAINED]
    return [said, *lines], step is None, reference, losses


def band_page(record: frame.Record, *, source: str) -> str:
    """The page; ``source`` is the record's path, for the reader."""
    fields: dict[str, Any] = {"seeds": len(SEEDS), "width": WIDTHS[len(SEEDS)]}
    fields |= {"window": WINDOW, "streak": STREAK, "floor": FLOOR}
    return frame.page_of(frame.filled("band", record, record_at=source, **fields), _table(record))


def summary_lines(record: frame.Record) -> list[str]:
    """The table, for a console."""
    return _table(record).removeprefix("## ").splitlines()


def _table(record: frame.Record) -> str:
    rows = []
    for size, one in record["sizes"].items():
        for step in sorted({1, *(one["steps"] * part // 4 for part in (1, 2, 3, 4))}):
            low, mean, high = (f"{one['band'][edge][step - 1]:.3f}" for edge in ("low", "mean", "high"))
            rows.append([size, step, low, mean, high])
    costs = [
        [size, frame.span_words(one["checked"], ".2f"), f"{(one['checked']['median'] - 1) / OFTEN:.2%}"]
        for size, one in record["sizes"].items()
    ]
    columns = ["size", "times as long as the step before", f"time of a run that checks every {OFTEN} steps"]
    bands = frame.section("Bands", ["size", "step", "from", "mean", "to"], rows)
    return f"{bands}\n\n{frame.section('What a checked step costs', columns, costs)}"


@dataclass(frozen=True, kw_only=True)
class BandOptions(frame.SuiteOptions):
    """The command line."""

    run: Path | None = flag(Path, "RUN", name="run", nargs="?")
    """a run folder to judge; without it, the reference is made"""
    bands: Path = flag(Path, "RECORD", "the bands to judge by (default: the committed ones)", default=BANDS)
    plot: Path | None = flag(Path, "FILE", "with RUN: draw band and curve, a .png or .svg")
    size: tuple[str, ...] = frame.only_flag("SIZE", "sizes")


class Band(frame.Suite[BandOptions, dict[str, Any]]):
    """Trains the reference runs.

    band: is the loss of a run normal? RUN was trained on the corpus python-transformers with `--model_size` demo or
    tiny. It prints whether its loss stays in the band of reference runs, or from which step not, and which settings
    differ from the reference. Without RUN, it trains the reference with five seeds; an interrupted call continues. Exit
    code 0: normal; 1: not.

    Examples:
      .venv/bin/python src/benchmark.py band checkpoint/run
      .venv/bin/python src/benchmark.py band checkpoint/run --plot band.png
      .venv/bin/python src/benchmark.py band --size demo
    """

    name, record_of, unit = "band", "loss bands", "training"
    flags, page, summary = BandOptions, staticmethod(band_page), staticmethod(summary_lines)
    names = f"sizes: {', '.join(STEPS)}"

    def plan(self) -> int:
        self._sizes = frame.selected(STEPS, self.options.size)
        return len(self._sizes) * len(SEEDS)

    def begin(self) -> None:
        self._runs = (self.options.output.parent / "band-runs").resolve()  # kept: an interrupted call continues
        self._corpus = cells.prepare_demo(self.repository, self._runs / "data")

    def results(self) -> Iterator[dict[str, Any]]:
        for size, steps in self._sizes.items():
            for seed in SEEDS:
                folder = self._runs / f"{size}-{seed}"
                if frame.record_changes(_record_of(folder), self.name, repository=self.repository).line():
                    shutil.rmtree(folder, ignore_errors=True)  # an earlier call trained it from other sources
                if not (folder / COMPLETE_FILE).exists():
                    recipe = self.repository / f"ds_configs/sizes/{size}.json"
                    values = cells.file_values(self._corpus, recipe=recipe, run_dir=folder)
                    values |= {"run_type": "baseline", "model_size": size, "seq_length": LENGTH, "device": "cpu"}
                    values |= {"max_train_steps": steps, "seed": seed, "max_val_steps": 10, "no_inference": True}
                    values |= {"check_invariants": 2} | ({"resume": True} if folder.exists() else {})
                    train(values | {"save_every": 50}, repository=self.repository, what=f"{size}, seed {seed}")
                run = read_run(folder, name=f"{size}, seed {seed}")
                seconds = _record_of(folder)["summary"]["total_wall_time_sec"]
                facts = {
                    "size": size,
                    "seed": seed,
                    "folder": folder,
                    "seconds": seconds,
                    "checked": checked_in(folder),
                }
                yield facts | {"work": dict(run.work), "losses": losses_of(run)}

    def line(self, result: dict[str, Any], *, count: str, left: str) -> str:
        return f"{count} {result['size']}, seed {result['seed']}: last loss {result['losses'][-1]:.3f}{left}"

    def record(self, results: Sequence[dict[str, Any]]) -> frame.Record:
        sizes = {}
        for size, steps in self._sizes.items():
            own = [one for one in results if one["size"] == size]
            pair = judge([Worked(name=str(one["seed"]), work=one["work"]) for one in own])
            if others := [one.fact for one in pair.differences if one.fact != "seed"]:  # a recipe changed meanwhile
                raise UserError(f"{self._runs}: the runs of {size} differ in {', '.join(others)}: remove them")
            work = {fact: own[0]["work"][fact] for fact in (*WORK_FACTS, *TRAINING_FACTS)}
            band = band_of([one["losses"] for one in own])
            left_out = [band_of([other["losses"] for other in own if other is not one]) for one in own]
            outside = [
                one["seed"] for one, others in zip(own, left_out, strict=True) if first_outside(one["losses"], others)
            ]
            text = source_of(own[0]["folder"])
            sizes[size] = {"outside_the_others": outside, "steps": steps, "source": text, "work": work, "band": band}
            sizes[size]["checked"] = frame.span([one["checked"] for one in own])
        return {"seconds": round(sum(one["seconds"] for one in results), 1), "seeds": list(SEEDS), "sizes": sizes}

    def failures(self, record: frame.Record) -> list[str]:
        """Seeds that the band of the other seeds would call not normal: it is too narrow."""
        return [f"{size}, seed {seed}" for size, one in record["sizes"].items() for seed in one["outside_the_others"]]


def _record_of(folder: Path) -> frame.Record:
    """The record of a training; empty if it has none yet."""
    try:
        return read_object(folder / RECORD_FILE)
    except JsonError:
        return {}


def judge_run(options: BandOptions) -> int:
    """Print the verdict on a run, and draw it; returns the exit code."""
    assert options.run is not None
    lines, normal, reference, losses = verdict(options.run, options.bands)
    if options.plot:
        from dsgpt.charts.runs import draw_band  # noqa: PLC0415 - matplotlib takes seconds

        draw_band(losses, reference["band"], options.plot, window=WINDOW, name=str(options.run))
    print("\n".join(lines))
    shown = ["charts/generate_charts.py", "--run", f"run={options.run}"]
    drawn = ["src/benchmark.py", "band", options.run, "--plot", "band.png"]
    print(next_line([".venv/bin/python", *(shown if options.plot else drawn)]))
    return EXIT_DONE if normal else frame.EXIT_FAILED
