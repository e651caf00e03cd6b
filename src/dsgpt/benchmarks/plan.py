"""``benchmark.py plan``: compares the planner's predictions with measurements."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dsgpt.benchmarks import cells as shared
from dsgpt.benchmarks import frame
from dsgpt.benchmarks.cells import NARROW, CellEnd, Shape
from dsgpt.benchmarks.launch import Assignment, shape_values, training_words
from dsgpt.common.command_line import COUNT, flag
from dsgpt.common.files import write_json_atomic
from dsgpt.common.text import counted, megabytes
from dsgpt.config.recipe import merged, sound_recipe
from dsgpt.machine.launcher import LAUNCHERS
from dsgpt.planner.formulas import STEP, model_state, peak_memory, sent_bytes
from dsgpt.planner.rates import Calibration, calibrated_machine, read_calibration
from dsgpt.planner.setup import Setup
from dsgpt.planner.step_time import Factors, MeasuredStep, StepTime, fit, predict_step

# The cells of the suite: one strategy on one model each, as the product trains it and as the planner predicts it.

BUCKET = 5_000_000
"""Elements of DeepSpeed's reduce bucket in most cells, so that several are filled. One cell keeps the shipped recipe's,
of which the whole model is one bucket."""


TINY = Shape(name="tiny", n_layer=8, n_head=6, n_embd=192, vocab_size=50_257)
WIDE = Shape(name="6 x 512", n_layer=6, n_head=8, n_embd=512, vocab_size=8192)
SHORT = Shape(name="2 x 128", n_layer=2, n_head=2, n_embd=128, vocab_size=8192)
SMALL, MEDIUM = map(Shape.published, ("small", "medium"))
VOCABULARIES = (8192, 50_257)


@dataclass(frozen=True, kw_only=True)
class PlanCell:
    """One training to predict and to measure."""

    strategy: str
    shape: Shape
    precision: str
    micro: int
    """Sequences of a micro batch."""
    run_type: str = "optimized"
    recipe: str = "zero1.json"
    """The shipped recipe that it starts from."""
    ranks: int = 2
    copy: int = 1
    """Ranks that share a copy of the model."""
    accumulation: int = 1
    checkpointing: bool = False
    length: int = 256
    """Tokens of a sequence."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the recipe."""
    note: str = ""
    fit: bool = False
    """Whether models of time may be fitted to the cell; the others only test them."""

    @property
    def key(self) -> str:
        """The cell's name on command lines, and its folder."""
        words = [self.strategy, self.shape.name.replace(" ", ""), self.precision, f"b{self.micro}"]
        words += [f"a{self.accumulation}"] * (self.accumulation > 1) + ["checkpointing"] * self.checkpointing
        words += ["alone"] * (self.ranks == 1 and self.run_type != "baseline")
        return "-".join([*words, *([self.note.replace(" ", "-")] if self.note else [])])

    @property
    def title(self) -> str:
        """The cell in a table."""
        words = [f"{self.strategy} on {counted(self.ranks, 'rank')}", self.shape.name, self.precision]
        words += [f"B={self.micro}"] + [f"accumulation {self.accumulation}"] * (self.accumulation > 1)
        words += ["checkpointing"] * self.checkpointing + [self.note] * bool(self.note)
        return ", ".join(words)

    @property
    def sequences(self) -> int:
        """Sequences of an optimizer step."""
        return self.micro * self.accumulation * self.ranks // self.copy

    @property
    def settings(self) -> dict[str, Any]:
        """What the record and the planner name alike."""
        how = {"run_type": self.run_type, "precision": self.precision, "activation_checkpointing": self.checkpointing}
        batch = {"micro_batch_size": self.micro, "gradient_accumulation_steps": self.accumulation}
        return how | batch | {"seq_length": self.length}

    def write_recipe(self, path: Path, *, recipes: Path) -> Path:
        """Write the shipped recipe, found in ``recipes``, with the cell's changes to ``path``."""
        recipe = json.loads((recipes / self.recipe).read_text(encoding="utf-8"))
        recipe["train_batch_size"] = self.sequences
        write_json_atomic(path, merged(recipe, self.changes))
        return path

    def setup(self, recipe: Path) -> Setup:
        """The planner's setup, with the recipe that ``write_recipe`` wrote."""
        model = self.shape.config(self.length)
        return Setup(model=model, recipe=sound_recipe(recipe), world_size=self.ranks, **self.settings)

    def flags(self, *, recipe: Path, tokens: Path, folder: Path, device: str = "cpu") -> list[str]:
        """The flags of ``src/gpt2.py`` for this cell; ``tokens`` holds a file for each vocabulary."""
        data = tokens / f"{self.shape.vocab_size}.bin"
        files = shared.file_values(shared.Corpus(train=data, val=data), recipe=recipe, run_dir=folder / "run")
        model = {"seq_length": self.length, "dropout": 0, **shape_values(self.shape.config(self.length))}
        batch = {"micro_batch_size_per_gpu": self.micro, "grad_accum_steps": self.accumulation}
        how: dict[str, Any] = {"run_type": self.run_type, "precision": self.precision, "device": device}
        how |= {"threads_per_device": 1} if device == "cpu" else {}
        how |= {"activation_checkpointing": True} if self.checkpointing else {}
        return training_words({**files, **model, **batch, **how, "max_train_steps": 1000})


def _cell(strategy: str, shape: Shape, precision: str, micro: int, **more: Any) -> PlanCell:
    """A cell with the shipped recipe of that name. Tensor, sequence and pipeline ranks share a copy of the model."""
    settings: dict[str, Any] = {"copy": 2 if strategy in {"tensor", "sequence", "pipeline"} else 1}
    if strategy in LAUNCHERS:
        settings |= {"run_type": strategy, "ranks": 1 if strategy == "baseline" else 2}
    else:
        settings["recipe"] = f"{strategy.replace('-', '_')}.json"
        settings["changes"] = {"zero_optimization": {"reduce_bucket_size": BUCKET}} if strategy != "zero0" else {}
    return PlanCell(**settings | more, strategy=strategy, shape=shape, precision=precision, micro=micro)


MEMORY, WAITS, STEPS = "memory", "waits", "steps"
"""Groups of the cells on GPUs."""


def gpu_cells(gpus: int) -> dict[str, list[PlanCell]]:
    """The cells of each group on so many GPUs.

    Peak memory of a published model under five strategies in each precision. Waits of the host of every strategy that
    runs on one rank. Steps of two models, every second one to fit to.
    """
    kinds = [("baseline", 1), *((name, gpus) for name in ("ddp", "fsdp", "zero1", "zero3"))]
    names = [*(name for name, _ in kinds), "zero0", "zero2", "zero2-offload", "zero3-offload"]
    steps = [
        _cell(name, shape, precision, micro, ranks=gpus, length=1024, accumulation=accumulation)
        for shape, micro in ((SMALL, 16), (MEDIUM, 8))
        for name, precision, accumulation in (("ddp", "bf16", 1), ("zero1", "bf16", 2), ("fsdp", "fp32", 1))
    ]
    return {
        MEMORY: [
            _cell(name, SMALL, precision, 8, ranks=ranks, length=1024)
            for name, ranks in kinds
            for precision in ("fp32", "bf16", "fp16")
        ],
        WAITS: [
            _cell(name, SHORT, precision, 2, ranks=1, length=64, fit=precision == "bf16")
            for name in names
            for precision in ("bf16", "fp16")
        ],
        STEPS: [replace(cell, fit=number % 2 == 0) for number, cell in enumerate(steps)],
    }


def cells() -> list[PlanCell]:
    """Every cell on a CPU, in the order of the page. Every second one may be fitted to."""
    every = (
        _cell("baseline", NARROW, "fp32", 8),
        _cell("baseline", NARROW, "bf16", 4),
        _cell("baseline", NARROW, "fp32", 8, checkpointing=True),
        _cell("baseline", NARROW, "bf16", 1, accumulation=2),
        _cell("baseline", TINY, "bf16", 4),
        _cell("baseline", TINY, "fp32", 2, checkpointing=True),
        _cell("baseline", WIDE, "fp32", 1),
        _cell("ddp", NARROW, "fp32", 4),
        _cell("ddp", NARROW, "bf16", 1, accumulation=2),
        _cell("ddp", WIDE, "bf16", 2),
        _cell("fsdp", NARROW, "fp32", 4),
        _cell("fsdp", NARROW, "bf16", 4),
        _cell("fsdp", WIDE, "fp32", 1, accumulation=2),
        _cell("fsdp", TINY, "bf16", 2, checkpointing=True),
        _cell("zero0", NARROW, "fp32", 4),
        _cell("zero0", WIDE, "bf16", 1, accumulation=2),
        _cell("zero1", NARROW, "fp32", 4, ranks=1),
        _cell("zero1", NARROW, "fp32", 4),
        _cell("zero1", NARROW, "bf16", 4),
        _cell("zero1", TINY, "bf16", 2, accumulation=2),
        _cell("zero2", NARROW, "fp32", 4),
        _cell("zero2", NARROW, "bf16", 1, accumulation=2),
        _cell("zero2", WIDE, "fp32", 1, changes={}, note="bucket as shipped"),
        _cell("zero3", NARROW, "fp32", 4),
        _cell("zero3", NARROW, "bf16", 1),
        _cell("zero3", WIDE, "fp32", 2, checkpointing=True),
        _cell("tensor", NARROW, "fp32", 4),
        _cell("tensor", WIDE, "bf16", 2),
        _cell("sequence", NARROW, "fp32", 4),
        _cell("sequence", WIDE, "bf16", 2),
        _cell("pipeline", NARROW, "fp32", 4, accumulation=4),
        _cell("pipeline", WIDE, "bf16", 1, accumulation=4),
        _cell("zero2-offload", NARROW, "fp32", 4),
        _cell("zero3-offload", NARROW, "bf16", 2),
    )
    return [replace(cell, fit=number % 2 == 0) for number, cell in enumerate(every)]


Figures = Mapping[str, Any]

LEAST = 3
"""Cells of the same work from which the planner would choose."""
MOST_SLOWER = 0.05
"""Goal: the setup that it would choose is at most this much slower than the fastest."""
MOST_OFF = 0.10
"""Goal: a predicted peak is at most this share away from the measured one."""
MOST_UNDER = 0.03
"""Goal: it is at most this share below it, because a plan that is too low runs out of memory."""
LEFT_OUT_BYTES = 64
"""Most bytes of losses, norms and counters that a rank sends in a step, which the formulas leave out."""
MOST_OFF_TIME, MEDIAN_OFF_TIME = 0.30, 0.15
"""Goals for predicted step times, where there are some."""
MOMENTS = {
    "forward": "the end of the forward pass",
    "loss": "the loss",
    "backward": "the backward pass",
    "reduction": "the reduction of gradients",
    "step": "the optimizer's step",
}
PARTS_OF_STEP = {"forward": ("forward", "loss"), "rest": ("backward", "reduction", "step")}
"""Moments of the planner up to the end of the forward pass, and after it: a GPU's allocator knows the peak of each."""


def plan_page(record: frame.Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.plan`` makes it.
        source: the record's path, for the reader.
    """
    measured = [result for result in record["cells"] if result["status"] == "done"]
    estimates, traffic = [], []
    for result in measured:
        sent, worst, estimate = result["ring_bytes"], largest(result), result["estimate_bytes"]
        if estimate is not None:
            off = f"{estimate / worst['measured'] - 1:+.0%}"
            estimates.append([result["title"], megabytes(estimate), off, _off(worst)])
        if result["ranks"] > 1:
            other = "**not known**" if sent["measured"] is None else f"**{megabytes(max(sent['measured']))}**"
            traffic.append([result["title"], megabytes(max(sent["predicted"])), "the same" if _exact(sent) else other])
    of_estimates = ["cell", "DeepSpeed's estimate, MB", "off the measured peak", "this planner"]
    of_traffic, left_out = ["cell", "predicted, MB of a rank", "measured"], {"least": LEFT_OUT_BYTES}
    return frame.page_of(
        "# What the planner predicts, and what is measured",
        _verdict(measured),
        "[How memory is predicted, and how it was measured](planner-method.md).",
        frame.made_from(record, source=source, name="plan", page="planner"),
        _memory(measured),
        _parts(measured),
        frame.section("DeepSpeed's estimator", of_estimates, estimates, text=frame.filled("plan-estimates", {})),
        frame.section("Bytes sent in a step", of_traffic, traffic, text=frame.filled("plan-traffic", left_out)),
        _times(measured, record["factors"]),
        _choices(measured),
        frame.listed("Cells that failed", [why for result in record["cells"] for why in failed(result)]),
    )


def summary_lines(record: frame.Record) -> list[str]:
    """The verdict, for a console."""
    return _verdict([result for result in record["cells"] if result["status"] == "done"]).splitlines()


def largest(result: Figures) -> Mapping[str, Any]:
    """The rank with the highest measured peak."""
    worst: Mapping[str, Any] = max(result["peak_memory"], key=lambda rank: rank["measured"])
    return worst


def failed(result: Figures) -> list[str]:
    """Figures of a cell that are outside of the bounds."""
    if result["status"] != "done":
        return [f"{result['title']}: {result['message']}"]
    reasons = [
        f"{result['title']}: peak of rank {rank['rank']} is {_off(rank)}"
        for rank in result["peak_memory"]
        if not -MOST_UNDER <= rank["ratio"] - 1 <= MOST_OFF
    ]
    reasons += [
        f"{result['title']}: peak of its part {name} is {measured / 1e6:,.1f} MB, predicted {predicted / 1e6:,.1f} MB"
        for name, (measured, predicted) in result["peak_memory"][0].get("by_part", {}).items()
        if not -MOST_UNDER <= predicted / measured - 1 <= MOST_OFF
    ]
    if not _exact(result["ring_bytes"]):
        reasons.append(f"{result['title']}: sends {result['ring_bytes']}")
    state = result["model_state"]
    return reasons + ([f"{result['title']}: model state {state}"] if state["measured"] != state["predicted"] else [])


def _exact(sent: Mapping[str, Any]) -> bool:
    """Whether every rank sent what is predicted, besides losses, norms and counters."""
    if sent["measured"] is None:
        return False
    pairs = zip(sent["measured"], sent["predicted"], strict=True)
    return all(0 <= measured - predicted <= LEFT_OUT_BYTES for measured, predicted in pairs)


def _off(rank: Mapping[str, Any]) -> str:
    return f"{rank['ratio'] - 1:+.1%}"


def _verdict(measured: Sequence[Figures]) -> str:
    if not measured:
        return "No cell was measured."
    ranks = [(result, rank) for result in measured for rank in result["peak_memory"]]
    (low, under), (high, over) = (choose(ranks, key=lambda one: one[1]["ratio"]) for choose in (min, max))
    inside = sum(not failed(result) for result in measured)
    middle = statistics.median(abs(rank["ratio"] - 1) for _, rank in ranks)
    exact = sum(_exact(result["ring_bytes"]) for result in measured)
    goal = f"at most {MOST_OFF:.0%} over and {MOST_UNDER:.0%} under the measured one"
    return f"""{inside} of {len(measured)} cells are within the goals: on every rank a predicted peak {goal},
and bytes of model state and bytes sent exact. Median distance {middle:.1%}; lowest {_off(under)}
({low["title"]}, rank {under["rank"]}), highest {_off(over)}
({high["title"]}, rank {over["rank"]}). Bytes sent are exact in {exact} of {len(measured)} cells."""


def _memory(measured: Sequence[Figures]) -> str:
    rows = []
    for result in measured:
        worst = largest(result)
        predicted, measured_peak, witness = worst["predicted"], worst["measured"], worst["mem_tracker"]
        others = ", ".join(_off(rank) for rank in result["peak_memory"] if rank is not worst)
        seen = None if witness is None else f"{megabytes(witness)} ({witness / measured_peak - 1:+.1%})"
        peaks = [megabytes(predicted["total"]), megabytes(measured_peak)]
        rows.append([result["title"], *peaks, _off(worst), others, seen, MOMENTS[predicted["moment"]]])
    header = ["cell", "predicted, MB", "measured, MB", "off", "other ranks", "MemTracker, MB", "predicted at"]
    return frame.section("Peak memory, predicted and measured", header, rows)


def _parts(measured: Sequence[Figures]) -> str:
    parts = {result["title"]: largest(result)["predicted"]["parts"] for result in measured}
    used = [name for name in next(iter(parts.values()), {}) if any(sizes[name] for sizes in parts.values())]
    rows = [
        [title, *(megabytes(sizes[name]) if sizes[name] else None for name in used)] for title, sizes in parts.items()
    ]
    text = "MB of the predicted peak; [records.md](records.md#predicted-memory) says what each part is."
    header = ["cell", *(name.replace("_", " ") for name in used)]
    return frame.section("What the peaks consist of", header, rows, text=text)


def _times(measured: Sequence[Figures], factors: Mapping[str, Any] | None) -> str:
    """Step times, and how far predictions are off where nothing was fitted; without rounds there are none."""
    rows, off = [], []
    for result in measured:
        times = result["step_seconds"]
        if times["measured"] is None:
            continue
        row = [result["title"], f"{times['measured']:.3f}", None, None, "fitted" if result["fit"] else "tested"]
        if times["predicted"] is not None:
            distance = times["predicted"] / times["measured"] - 1
            row[2:4] = f"{times['predicted']:.3f}", f"{distance:+.0%}"
            off += [] if result["fit"] else [abs(distance)]
        rows.append(row)
    text = "Medians, each rank with one thread."
    if off:
        median = f"the median error is {statistics.median(off):.0%} (goal {MEDIAN_OFF_TIME:.0%})"
        largest_off = f"the largest {max(off):.0%} (goal {MOST_OFF_TIME:.0%})"
        text += f" Of the {len(off)} cells that nothing was fitted to, {median}, {largest_off}."
    if factors:
        ratios = ", ".join(f"{factor:.2f} in {precision}" for precision, factor in factors["compute"].items())
        text += f" Fitted to {factors['steps']} cells: computation takes {ratios} times as long as the calibrated rates"
        text += f" say, communication {factors['communication']:.2f} times. Calibration and factors are in the record."
    return frame.section("Step time", ["cell", "measured, s", "predicted, s", "off", "used as"], rows, text=text)


def _choices(measured: Sequence[Figures]) -> str:
    """A table of the planner's choice and of the fastest, among cells with the same model and global batch."""
    by_work = defaultdict(list)
    for result in measured:
        work, times = result["work"], result["step_seconds"]
        if times["measured"] is not None and times["predicted"] is not None:
            sequences = f"{work['global_batch_size']} sequences of {work['seq_length']}"
            words = [work["model"]["name"], work["precision"], sequences]
            by_work[", ".join(words + ["checkpointing"] * work["activation_checkpointing"])].append(result)
    rows = []
    for name, results in by_work.items():
        if len(results) >= LEAST:
            two = [min(results, key=lambda one: float(one["step_seconds"][kind])) for kind in ("predicted", "measured")]
            chosen, fastest = (one["step_seconds"]["measured"] for one in two)
            slower = f"{chosen / fastest - 1:.1%}"
            slower = slower if chosen / fastest - 1 <= MOST_SLOWER else f"**{slower}**"
            setups = (f"{one['title'].partition(',')[0]}: {one['step_seconds']['measured']:.3f} s" for one in two)
            rows.append([name, len(results), *setups, slower])
    header = ["work", "setups", "predicted to be the fastest", "the fastest", "slower by"]
    return frame.section("The choice", header, rows, text=frame.filled("plan-choice", {}, slower=MOST_SLOWER))


# The suite: memory first, then rounds of step times, in which all cells take turns. Their predictions come from a
# calibration, fitted to a part of the cells.

TOKENS = {"cpu": 200_000, "cuda": 4_000_000}
RANK = "dsgpt.benchmarks.plan_rank"
CALIBRATION_SEC, CALIBRATION_SEC_OF_A_CELL = 60.0, 4.0
"""Seconds of the calibration that times are predicted from; a few cells get a shorter one."""

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PlanOptions(frame.SuiteOptions):
    """The command line."""

    rounds: int = flag(COUNT, "N", "rounds of step times; 0 for memory only (default: %(default)s)", default=2)
    only: tuple[str, ...] = frame.only_flag("KEY", "cells, by the beginnings of their keys")
    device: str = frame.device_flag("cpu, with two ranks of one core, or cuda, with all GPUs and other cells")


class Plan(frame.Suite[PlanOptions, Result]):
    """Predicts every cell, measures it, and compares.

    plan: predict the peak memory, the bytes sent and the step time of small trainings under every strategy, then
    measure them. Peak memory is that of tensors in a step, on every rank. PyTorch's MemTracker measures it, too, and
    DeepSpeed's estimator is shown beside it. Step times are measured in rounds without a profiler. Takes about 6
    minutes on 2 cores. Exit code 0: every predicted peak is at most 10% over and 3% under the measured one, and the
    bytes sent are exact; 1: otherwise.

    Examples:
      .venv/bin/python src/benchmark.py plan
      .venv/bin/python src/benchmark.py plan --only zero fsdp --rounds 0
      .venv/bin/python src/benchmark.py plan --table-from checkpoint/plan/plan.json
    """

    name, record_of, unit = "plan", "predictions", "cell"
    failure_line = "outside the bounds: {}"
    flags, page, summary = PlanOptions, staticmethod(plan_page), staticmethod(summary_lines)

    def plan(self) -> int:
        every, self._devices = cells(), 2
        if self.options.device == "cuda":
            from dsgpt.machine.device import cuda_devices  # noqa: PLC0415 - torch takes seconds

            self._devices = cuda_devices()
            every = [cell for group in gpu_cells(self._devices).values() for cell in group]
        self._cells = [*frame.selected({cell.key: cell for cell in every}, self.options.only).values()]
        return len(self._cells)

    def begin(self) -> None:
        device, rounds = self.options.device, self.options.rounds
        self._runner = shared.CellRunner(self.folder, repository=self.repository, device=device)
        self._setups: dict[str, Setup] = {}
        self._calibration: Calibration | None = None  # without rounds or cells to fit to
        self._factors: Factors | None = None
        shared.write_random_tokens(self.folder / "tokens", vocab_sizes=VOCABULARIES, count=TOKENS[device])
        words = f"peak memory of {counted(len(self._cells), 'cell')}, then {counted(rounds, 'round')} of step times"
        self.console.say(words)

    def results(self) -> Iterator[Result]:
        memory = {cell.key: end for cell, end in self._pass("memory")}
        if self.options.rounds and any(cell.fit for cell in self._cells):
            from dsgpt.planner.calibrate import calibrate  # noqa: PLC0415 - torch takes seconds

            seconds = min(CALIBRATION_SEC, CALIBRATION_SEC_OF_A_CELL * len(self._cells))
            calibrate(self.folder / "calibration.json", seconds=seconds, devices=self._devices)
            self._calibration = read_calibration(self.folder / "calibration.json")
        times: dict[str, list[list[float]]] = {cell.key: [] for cell in self._cells}
        setups = self._setups
        for number in range(1, self.options.rounds + 1):
            for cell, end in self._pass(f"time-{number}"):
                if end.status == "done":
                    times[cell.key].append(max((rank["seconds"] for rank in end.ranks), key=sum))
        fitted, predicted = [cell.key for cell in self._cells if cell.fit and times[cell.key]], dict[str, StepTime]()
        if self._calibration is not None and fitted:
            machines = {ranks: calibrated_machine(self._calibration, devices=ranks) for ranks in (1, self._devices)}
            on = {key: machines[setup.world_size] for key, setup in setups.items()}
            steps = [MeasuredStep(setup=setups[key], machine=on[key], seconds=_middle(times[key])) for key in fitted]
            self._factors = fit(steps)
            predicted = {key: predict_step(setups[key], self._factors.applied(machine)) for key, machine in on.items()}
        for cell in self._cells:
            yield self._result(cell, memory[cell.key], times[cell.key], predicted.get(cell.key))

    def _pass(self, name: str) -> Iterator[tuple[PlanCell, CellEnd]]:
        """Run every cell once."""
        return self._runner.run(
            self._cells,
            place=lambda cell: (cell.ranks, LAUNCHERS[cell.run_type]),
            assign=lambda cell: self._assignment(cell, name),
            started=lambda one: self.console.say(
                f"starting {counted(one.cells, 'cell')} on {counted(one.ranks, 'rank')}"
            ),
        )

    def _assignment(self, cell: PlanCell, name: str) -> Assignment:
        folder, device = self.folder / f"{name}-{cell.key}", self.options.device
        folder.mkdir()
        recipe = cell.write_recipe(folder / "recipe.json", recipes=self.repository / "ds_configs")
        flags = cell.flags(recipe=recipe, tokens=self.folder / "tokens", folder=folder, device=device)
        self._setups[cell.key] = cell.setup(recipe)
        call = "measure_memory" if name == "memory" else "measure_time"
        return Assignment(folder=str(folder), flags=flags, call=f"{RANK}:{call}")

    def _result(
        self, cell: PlanCell, end: CellEnd, rounds: Sequence[Sequence[float]], predicted: StepTime | None
    ) -> Result:
        work = {"model": asdict(cell.shape), **cell.settings, "global_batch_size": cell.sequences}
        work |= {"recipe": cell.recipe, "changes": dict(cell.changes)}
        head = {"key": cell.key, "title": cell.title, "strategy": cell.strategy, "ranks": cell.ranks, "fit": cell.fit}
        head |= {"work": work, "status": end.status, "message": end.message}
        if end.status != "done":
            return head
        setup, cost, device, peaks = self._setups[cell.key], end.ranks[0]["cost"], self.options.device, []
        for rank, facts in enumerate(end.ranks):
            peak = peak_memory(setup, rank=rank, device=device, among=STEP)
            by_part = {
                name: (measured, peak_memory(setup, rank=rank, device=device, among=PARTS_OF_STEP[name]).total)
                for name, measured in facts["by_part"].items()
                if setup.precision != "fp16"  # whose loss has its peak in the backward pass, which scales it
            }
            measured = {"rank": rank, "measured": facts["peak_bytes"], "mem_tracker": facts["mem_tracker_bytes"]}
            ratio = peak.total / facts["peak_bytes"]
            peaks.append(measured | {"predicted": peak.as_dict(), "ratio": ratio, "by_part": by_part})
        state, traffic = cost["model_state_bytes_per_rank"], cost["communication_per_step"]
        sent = [sent_bytes(setup, rank=rank) for rank in range(setup.world_size)]
        times: Result = {"predicted": predicted and predicted.seconds, "predicted_parts": predicted and predicted.parts}
        times["measured"] = _middle(rounds) if rounds else None
        return head | {
            "peak_memory": peaks,
            "waits": end.ranks[0]["waits"],
            "model_state": {"measured": state["total"], "predicted": model_state(setup, rank=state["rank"]).total},
            "ring_bytes": {"measured": traffic and traffic["ring_bytes_by_rank"], "predicted": sent},
            "estimate_bytes": end.ranks[0].get("estimate_bytes"),
            "step_seconds": times | {"rounds": [list(seconds) for seconds in rounds]},
        }

    def line(self, result: Result, *, count: str, left: str) -> str:
        if result["status"] != "done":
            return f"{count} {result['title']}: {result['status'].upper()}: {result['message'].splitlines()[0]}{left}"
        worst = largest(result)
        predicted, measured = worst["predicted"]["total"], worst["measured"]
        peak = f"peak {measured / 1e6:,.1f} MB, predicted {predicted / 1e6:,.1f} MB ({_off(worst)})"
        return f"{count} {result['title']}: {peak}{', OUTSIDE' if failed(result) else ''}{left}"

    def record(self, results: Sequence[Result]) -> frame.Record:
        return {
            "rounds": self.options.rounds,
            "calibration": self._calibration and asdict(self._calibration),
            "factors": self._factors and asdict(self._factors),
            "cells": list(results),
        }

    def failures(self, record: frame.Record) -> list[str]:
        return [why for cell in record["cells"] for why in failed(cell)]


def _middle(rounds: Sequence[Sequence[float]]) -> float:
    """The median of all steps."""
    return statistics.median(second for seconds in rounds for second in seconds)
