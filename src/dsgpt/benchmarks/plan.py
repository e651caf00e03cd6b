"""``benchmark.py plan``: the planner's predictions, held against measurements."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.cells import NARROW, Shape
from dsgpt.benchmarks.frame import Record, Suite, SuiteOptions, only_flag, selected
from dsgpt.benchmarks.launch import shape_values, training_words
from dsgpt.common.command_line import COUNT, flag
from dsgpt.common.files import write_json_atomic
from dsgpt.common.text import counted, machine_words, megabytes, table
from dsgpt.config.recipe import merged, sound_recipe
from dsgpt.machine.launcher import LAUNCHERS
from dsgpt.planner.setup import Setup

# The cells of the suite: one strategy on one model each, as the product trains it and as the planner predicts it.

BUCKET = 5_000_000
"""Elements of DeepSpeed's reduce bucket in most cells, so that several are filled. One cell keeps the shipped recipe's,
of which the whole model is one bucket."""


TINY = Shape(name="tiny", n_layer=8, n_head=6, n_embd=192, vocab_size=50_257)
WIDE = Shape(name="6 x 512", n_layer=6, n_head=8, n_embd=512, vocab_size=8192)
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
    """Of the recipe."""
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
    def launcher(self) -> str:
        """The launcher that users start it with."""
        return LAUNCHERS[self.run_type]

    @property
    def work(self) -> dict[str, Any]:
        """What is trained, for the record."""
        return {
            "model": asdict(self.shape),
            "seq_length": self.length,
            "micro_batch_size": self.micro,
            "gradient_accumulation_steps": self.accumulation,
            "global_batch_size": self.sequences,
            "precision": self.precision,
            "activation_checkpointing": self.checkpointing,
            "run_type": self.run_type,
            "recipe": self.recipe,
            "changes": dict(self.changes),
        }

    def write_recipe(self, path: Path, *, recipes: Path) -> Path:
        """Write the shipped recipe, found in ``recipes``, with the cell's changes to ``path``."""
        recipe = json.loads((recipes / self.recipe).read_text(encoding="utf-8"))
        recipe["train_batch_size"] = self.sequences
        write_json_atomic(path, merged(recipe, self.changes))
        return path

    def setup(self, recipe: Path) -> Setup:
        """What the planner predicts from, with the recipe that ``write_recipe`` wrote."""
        return Setup(
            run_type=self.run_type,
            model=self.shape.config(self.length),
            recipe=sound_recipe(recipe),
            world_size=self.ranks,
            precision=self.precision,
            micro_batch_size=self.micro,
            gradient_accumulation_steps=self.accumulation,
            seq_length=self.length,
            activation_checkpointing=self.checkpointing,
        )

    def flags(self, *, recipe: Path, tokens: Path, folder: Path) -> list[str]:
        """The flags of ``src/gpt2.py`` for this cell; ``tokens`` holds a file for each vocabulary."""
        data = tokens / f"{self.shape.vocab_size}.bin"
        values = {
            "run_type": self.run_type,
            "deepspeed_config": recipe,
            "train_data_path": data,
            "val_data_path": data,
            "checkpoint_path": folder / "run",
            **shape_values(self.shape.config(self.length)),
            "seq_length": self.length,
            "micro_batch_size_per_gpu": self.micro,
            "grad_accum_steps": self.accumulation,
            "dropout": 0,
            "max_train_steps": 1000,
            "precision": self.precision,
            "device": "cpu",
            "threads_per_device": 1,
        }
        return training_words(values | ({"activation_checkpointing": True} if self.checkpointing else {}))


def _zero(stage: int, shape: Shape, precision: str, micro: int, **more: Any) -> PlanCell:
    changes = {"zero_optimization": {"reduce_bucket_size": BUCKET}} if stage else {}
    recipe = f"zero{stage}.json"
    return PlanCell(
        **{"strategy": f"zero{stage}", "recipe": recipe, "changes": changes} | more,
        shape=shape,
        precision=precision,
        micro=micro,
    )


def _torch(name: str, shape: Shape, precision: str, micro: int, **more: Any) -> PlanCell:
    return PlanCell(
        strategy=name,
        run_type=name,
        ranks=1 if name == "baseline" else 2,
        shape=shape,
        precision=precision,
        micro=micro,
        **more,
    )


def _split(name: str, shape: Shape, precision: str, micro: int, **more: Any) -> PlanCell:
    """Two ranks that share a copy of the model."""
    changes = {"zero_optimization": {"reduce_bucket_size": BUCKET}}
    settings: dict[str, Any] = {"strategy": name, "recipe": f"{name}.json", "copy": 2, "changes": changes}
    return PlanCell(**settings | more, shape=shape, precision=precision, micro=micro)


def _cells() -> Iterator[PlanCell]:
    yield _torch("baseline", NARROW, "fp32", 8)
    yield _torch("baseline", NARROW, "bf16", 4)
    yield _torch("baseline", NARROW, "fp32", 8, checkpointing=True)
    yield _torch("baseline", NARROW, "bf16", 1, accumulation=2)
    yield _torch("baseline", TINY, "bf16", 4)
    yield _torch("baseline", TINY, "fp32", 2, checkpointing=True)
    yield _torch("baseline", WIDE, "fp32", 1)
    yield _torch("ddp", NARROW, "fp32", 4)
    yield _torch("ddp", NARROW, "bf16", 1, accumulation=2)
    yield _torch("ddp", WIDE, "bf16", 2)
    yield _torch("fsdp", NARROW, "fp32", 4)
    yield _torch("fsdp", NARROW, "bf16", 4)
    yield _torch("fsdp", WIDE, "fp32", 1, accumulation=2)
    yield _torch("fsdp", TINY, "bf16", 2, checkpointing=True)
    yield _zero(0, NARROW, "fp32", 4)
    yield _zero(0, WIDE, "bf16", 1, accumulation=2)
    yield _zero(1, NARROW, "fp32", 4, ranks=1)
    yield _zero(1, NARROW, "fp32", 4)
    yield _zero(1, NARROW, "bf16", 4)
    yield _zero(1, TINY, "bf16", 2, accumulation=2)
    yield _zero(2, NARROW, "fp32", 4)
    yield _zero(2, NARROW, "bf16", 1, accumulation=2)
    yield _zero(2, WIDE, "fp32", 1, changes={}, note="bucket as shipped")
    yield _zero(3, NARROW, "fp32", 4)
    yield _zero(3, NARROW, "bf16", 1)
    yield _zero(3, WIDE, "fp32", 2, checkpointing=True)
    yield _split("tensor", NARROW, "fp32", 4)
    yield _split("tensor", WIDE, "bf16", 2)
    yield _split("sequence", NARROW, "fp32", 4)
    yield _split("sequence", WIDE, "bf16", 2)
    yield _split("pipeline", NARROW, "fp32", 4, accumulation=4)
    yield _split("pipeline", WIDE, "bf16", 1, accumulation=4)
    yield _zero(2, NARROW, "fp32", 4, strategy="zero2-offload", recipe="zero2_offload.json")
    yield _zero(3, NARROW, "bf16", 2, strategy="zero3-offload", recipe="zero3_offload.json")


def cells() -> list[PlanCell]:
    """All cells, in the order of the page. Every second one may be fitted to."""
    return [replace(cell, fit=number % 2 == 0) for number, cell in enumerate(_cells())]


Figures = Mapping[str, Any]

# Which setup the planner would choose among cells of the same work, beside the one that was the fastest.

LEAST = 3
"""Cells that make a choice."""
MOST_SLOWER = 0.05
"""Goal: the chosen setup is at most this much slower than the fastest."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The cells of one work."""

    work: str
    cells: int
    chosen: Figures
    """With the shortest predicted step."""
    fastest: Figures
    """With the shortest measured step."""

    @property
    def slower(self) -> float:
        """The share by which the chosen setup took longer than the fastest."""
        share: float = self.chosen["step_seconds"]["measured"] / self.fastest["step_seconds"]["measured"] - 1
        return share


def choices(measured: Sequence[Figures]) -> Iterator[Choice]:
    """A choice for all cells that train the same model with the same global batch."""
    by_work = defaultdict(list)
    for result in measured:
        work, times = result["work"], result["step_seconds"]
        if times["measured"] is not None and times["predicted"] is not None:
            sequences = f"{work['global_batch_size']} sequences of {work['seq_length']}"
            words = [work["model"]["name"], work["precision"], sequences]
            by_work[", ".join(words + ["checkpointing"] * work["activation_checkpointing"])].append(result)
    for name, results in by_work.items():
        if len(results) >= LEAST:
            chosen, fastest = (
                min(results, key=lambda result: float(result["step_seconds"][kind]))
                for kind in ("predicted", "measured")
            )
            yield Choice(work=name, cells=len(results), chosen=chosen, fastest=fastest)


def choice_table(measured: Sequence[Figures]) -> str:
    """The choices as a table; empty if there is none."""
    rows = [
        [
            choice.work,
            str(choice.cells),
            *(
                f"{one['title'].partition(',')[0]}: {one['step_seconds']['measured']:.3f} s"
                for one in (choice.chosen, choice.fastest)
            ),
            f"{choice.slower:.1%}" if choice.slower <= MOST_SLOWER else f"**{choice.slower:.1%}**",
        ]
        for choice in choices(measured)
    ]
    if not rows:
        return ""
    head = (
        "Cells that do the same work: the one with the shortest predicted step, and the one with the shortest measured "
        f"step. Both times are measured. Goal: at most {MOST_SLOWER:.0%} slower.\n\n"
    )
    return head + table(["work", "setups", "predicted to be the fastest", "the fastest", "slower by"], rows)


METHOD = (
    (
        "The model",
        """A prediction is the largest of the moments of a step after the first. At each, what exists is added up:

* with ZeRO-3, **the end of the forward pass**: gathered weights, which exist twice while they are taken apart;
* **the loss**: all kept activations, the logits of a chunk of tokens, and the gradient of the head, which the fused
  loss computes at once;
* **the backward pass**: at its beginning the kept activations and the gradient of a block's widest layer;
* **the reduction of gradients**. At the end those of all blocks and of the embedding's lookup, which is dense. With
  ZeRO-2 and 3 and with FSDP earlier, from a copy, whenever a bucket is full or a block is done;
* **the optimizer's step**: gradients and their copies, as `planner/memory.py` describes for each strategy.

Model state comes from `planner/strategies.py`, which is exact. What a block keeps is counted in units of the residual
stream, u = tokens x width x bytes of a number. The attention's half has 1 for the output of its LayerNorm, 3 for
queries, keys and values, 1 for its output, 1 for the residual sum after it. The MLP's half has 1 for the output of its
LayerNorm, 4 for the inner layer before GELU and 4 after, 1 for the block's output. That is **16u**, besides 4 bytes of
statistics per token and head, and per token and LayerNorm. Korthikanti et al. (arXiv 2205.05198, section 4.1) have 34
where this has 16, and a term that is quadratic in the tokens. The 34 are bytes per element in 16-bit precision: 16
numbers of 2 bytes, the same as here, and 1 byte each for two dropout masks, which do not exist without dropout. The
quadratic term is that of the attention's scores, their softmax and its mask, of which the fused attention keeps only
one number per token and head.

With T tensor ranks the inner parts of attention and MLP, 12 of the 16, are divided by T. With sequence ranks the tokens
are divided, and the attention's output is kept before and after the all-to-all, 1u more. A pipeline stage keeps the
activations of as many micro batches as stages follow it, and its own. With activation checkpointing a block keeps
1u, and one block at a time is computed again.

DeepSpeed allocates its reduce bucket at its full size before the first gradient comes. A run gives it the recipe's
`reduce_bucket_size`, at most the number of the model's parameters, and the prediction has the same number.""",
    ),
    (
        "The measurement",
        """Every cell is a training by the product's own code, in real processes. `4 x 256` is a model of 4 blocks of
width 256, and B the sequences of a micro batch. The third step is recorded with `torch.profiler`, which notes every
allocation and release of a tensor from before the strategy is built; the peak is the largest sum within the step.
Memory that gloo frees in its own threads is invisible to the profiler, so each rank waits 10 ms after each collective
and frees it itself. On a CPU, offloaded state is in the same memory as everything else, and the prediction for a CPU
counts it; on a GPU it does not. PyTorch's `MemTracker` is a second witness in cells of one process and one micro batch;
it is told of the model state, and follows other tensors from the dispatcher. Step times are measured in other
processes, without a profiler, in rounds in which all cells take turns.

No GPU took part. For one, the same tensors as here are assumed, and fused attention that keeps what the CPU's does.
Chunks of the loss have 256 instead of 32 million logits, with the softmax over a whole chunk. The allocator's rounding
and fragmentation, CUDA's context (about 0.5 GB), cuBLAS's workspaces and NCCL's buffers are not in the prediction.""",
    ),
)


MOST_OFF = 0.10
"""Goal: a predicted peak is at most this share away from the measured one."""
MOST_UNDER = 0.03
"""Goal: it is at most this share below it, because a plan that is too low runs out of memory."""
LEFT_OUT_BYTES = 64
"""What a rank sends of losses, norms and counters in a step at most, which the formulas leave out."""
MOST_OFF_TIME, MEDIAN_OFF_TIME = 0.30, 0.15
"""Goals for predicted step times, where there are some."""
MOMENTS = {
    "forward": "the end of the forward pass",
    "loss": "the loss",
    "backward": "the backward pass",
    "reduction": "the reduction of gradients",
    "step": "the optimizer's step",
}


def plan_page(record: Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.plan`` makes it.
        source: the record's path, for the reader.
    """
    hardware, env = record["hardware"], record["env"]
    measured = [result for result in record["cells"] if result["status"] == "done"]
    head = f"""# What the planner predicts, and what is measured

Generated from `{source}` by
`.venv/bin/python src/benchmark.py plan --table-from {source} --page docs/planner.md`;
`.venv/bin/python src/benchmark.py plan` measures it on your machine.

{_verdict(measured)}

Machine: {machine_words(hardware)}; torch {env["torch_version"]}, DeepSpeed
{env["deepspeed_version"]}. Commit `{record["git_commit"]}`, {record["timestamp_utc"]}."""
    sections = [
        *METHOD,
        ("Peak memory, predicted and measured", _memory_table(measured)),
        ("What the peaks consist of", _parts_table(measured)),
        ("DeepSpeed's estimator", _estimates(measured)),
        ("Bytes sent in a step", _traffic_table(measured)),
        ("Step time", _time_table(measured) + _fit(record)),
        ("The choice", choice_table(measured)),
        ("Cells that failed", "\n".join(f"* {why}" for result in record["cells"] for why in failed(result))),
    ]
    return "\n".join([head, *(f"\n## {title}\n\n{text}" for title, text in sections if text), ""])


def summary_lines(record: Record) -> list[str]:
    """The verdict, for a console."""
    measured = [result for result in record["cells"] if result["status"] == "done"]
    return _verdict(measured).splitlines()


def line_of(result: Figures) -> str:
    """A cell in one line."""
    if result["status"] != "done":
        return f"{result['title']}: {result['status'].upper()}: {result['message'].splitlines()[0]}"
    worst = largest(result)
    predicted, measured = worst["predicted"]["total"], worst["measured"]
    mark = ", OUTSIDE" if failed(result) else ""
    return (
        f"{result['title']}: peak {measured / 1e6:,.1f} MB, predicted {predicted / 1e6:,.1f} MB ({_off(worst)}){mark}"
    )


def largest(result: Figures) -> Mapping[str, Any]:
    """The rank with the highest measured peak."""
    worst: Mapping[str, Any] = max(result["peak_memory"], key=lambda rank: rank["measured"])
    return worst


def failed(result: Figures) -> list[str]:
    """What of a cell is outside the bounds."""
    if result["status"] != "done":
        return [f"{result['title']}: {result['message']}"]
    reasons = [
        f"{result['title']}: peak of rank {rank['rank']} is {_off(rank)}"
        for rank in result["peak_memory"]
        if not -MOST_UNDER <= rank["ratio"] - 1 <= MOST_OFF
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


def _memory_table(measured: Sequence[Figures]) -> str:
    rows = []
    for result in measured:
        worst = largest(result)
        witness = worst["mem_tracker"]
        rows.append(
            [
                result["title"],
                megabytes(worst["predicted"]["total"]),
                megabytes(worst["measured"]),
                _off(worst),
                ", ".join(_off(rank) for rank in result["peak_memory"] if rank is not worst) or None,
                None if witness is None else f"{megabytes(witness)} ({witness / worst['measured'] - 1:+.1%})",
                MOMENTS[worst["predicted"]["moment"]],
            ]
        )
    header = ["cell", "predicted, MB", "measured, MB", "off", "other ranks", "MemTracker, MB", "predicted at"]
    return table(header, rows)


def _parts_table(measured: Sequence[Figures]) -> str:
    parts = list(measured[0]["peak_memory"][0]["predicted"]["parts"]) if measured else []
    used = [part for part in parts if any(largest(result)["predicted"]["parts"][part] for result in measured)]
    rows = []
    for result in measured:
        sizes = [largest(result)["predicted"]["parts"][part] for part in used]
        rows.append([result["title"], *(megabytes(size) if size else None for size in sizes)])
    return "MB of the predicted peak; [records.md](records.md#predicted-memory) says what each part is.\n\n" + table(
        ["cell", *(part.replace("_", " ") for part in used)], rows
    )


def _estimates(measured: Sequence[Figures]) -> str:
    rows = []
    for result in measured:
        estimate, worst = result["estimate_bytes"], largest(result)
        if estimate is not None:
            off = estimate / worst["measured"] - 1
            rows.append([result["title"], megabytes(estimate), f"{off:+.0%}", _off(worst)])
    if not rows:
        return ""
    text = """`estimate_zero2_model_states_mem_needs` and its counterpart for stage 3 know the number of parameters and
of ranks. They leave out activations, logits and buckets, and count fp32 models as if they were trained in fp16.

"""
    return text + table(["cell", "DeepSpeed's estimate, MB", "off the measured peak", "this planner"], rows)


def _traffic_table(measured: Sequence[Figures]) -> str:
    rows = []
    for result in measured:
        sent = result["ring_bytes"]
        most = "**not known**" if sent["measured"] is None else f"**{megabytes(max(sent['measured']))}**"
        if result["ranks"] > 1:
            rows.append([result["title"], megabytes(max(sent["predicted"])), "the same" if _exact(sent) else most])
    if not rows:
        return ""
    text = f"""Of the rank that sends most, if collectives are rings. The formulas leave out losses, norms and counters,
at most {LEFT_OUT_BYTES} bytes a step.

"""
    return text + table(["cell", "predicted, MB of a rank", "measured"], rows)


def _time_table(measured: Sequence[Figures]) -> str:
    rows = []
    for result in measured:
        times = result["step_seconds"]
        if times["measured"] is None:
            continue
        predicted = times["predicted"]
        off = None if predicted is None else f"{predicted / times['measured'] - 1:+.0%}"
        fit = "fitted" if result["fit"] else "tested"
        rows.append([result["title"], f"{times['measured']:.3f}", predicted and f"{predicted:.3f}", off, fit])
    if not rows:
        return ""
    return f"{_time_verdict(measured)}{table(['cell', 'measured, s', 'predicted, s', 'off', 'used as'], rows)}"


def _fit(record: Record) -> str:
    """The factors that were fitted; empty without predictions."""
    factors = record["factors"]
    if factors is None:
        return ""
    compute = ", ".join(f"{factor:.2f} in {precision}" for precision, factor in factors["compute"].items())
    return (
        f"\n\nFitted to {factors['steps']} cells: computation takes {compute} times as long as the calibrated rates "
        f"say, communication {factors['communication']:.2f} times. Calibration and factors are in the record."
    )


def _time_verdict(measured: Sequence[Figures]) -> str:
    """The errors of predicted step times of the cells that nothing was fitted to; empty without predictions."""
    off = [
        abs(times["predicted"] / times["measured"] - 1)
        for result in measured
        if not result["fit"] and (times := result["step_seconds"])["predicted"] and times["measured"]
    ]
    if not off:
        return "Medians, each rank with one thread. No cell of this record has a predicted time.\n\n"
    return (
        f"Medians, each rank with one thread. Of the {len(off)} cells that nothing was fitted to, the median error is "
        f"{statistics.median(off):.0%} (goal {MEDIAN_OFF_TIME:.0%}), the largest {max(off):.0%} "
        f"(goal {MOST_OFF_TIME:.0%}).\n\n"
    )


# The suite.

SCHEMA_VERSION = "1.0"

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PlanOptions(SuiteOptions):
    """The command line."""

    rounds: int = flag(COUNT, "N", "rounds of step times; 0 for memory only (default: %(default)s)", default=2)
    only: tuple[str, ...] = only_flag("KEY", "cells, by the beginnings of their keys")


class Plan(Suite[PlanOptions, Result]):
    """Predicts every cell, measures it, and compares."""

    name, record_of, schema_version, unit = "plan", "predictions", SCHEMA_VERSION, "cell"
    count_width = 2
    flags, page, summary = PlanOptions, staticmethod(plan_page), staticmethod(summary_lines)
    description = """\
plan: predict the peak memory, the bytes sent and the step time of small trainings under every strategy, then measure
them: the most memory of tensors in a step on every rank, PyTorch's MemTracker as a second witness, DeepSpeed's own
estimator beside it, and step times in rounds without a profiler. Takes about 6 minutes on 2 cores. Exit code 0: every
predicted peak is at most 10% over and 3% under the measured one, and the bytes sent are exact; 1: otherwise."""
    examples = """\
examples:
  .venv/bin/python src/benchmark.py plan
  .venv/bin/python src/benchmark.py plan --only zero fsdp --rounds 0
  .venv/bin/python src/benchmark.py plan --table-from checkpoint/plan/plan.json"""

    def plan(self) -> int:
        self._cells = list(selected({cell.key: cell for cell in cells()}, self.options.only).values())
        return len(self._cells)

    def begin(self) -> None:
        from dsgpt.benchmarks.plan_rank import PlanSuite  # noqa: PLC0415 - torch takes seconds

        say, rounds = self.console.say, self.options.rounds
        self._suite = PlanSuite(
            self.folder.resolve(),
            repository=self.repository,
            rounds=rounds,
            started=lambda one: say(f"starting {counted(one.cells, 'cell')} on {counted(one.ranks, 'rank')}"),
        )
        say(f"peak memory of {counted(len(self._cells), 'cell')}, then {counted(rounds, 'round')} of step times")

    def results(self) -> Iterator[Result]:
        return self._suite.run(self._cells)

    def line(self, result: Result, *, count: str, left: str) -> str:
        return f"{count} {line_of(result)}{left}"

    def record(self, results: Sequence[Result]) -> Record:
        return {
            "rounds": self.options.rounds,
            "calibration": self._suite.calibration and asdict(self._suite.calibration),
            "factors": self._suite.factors and asdict(self._suite.factors),
            "cells": list(results),
        }

    def failures(self, record: Record) -> list[str]:
        return [why for cell in record["cells"] for why in failed(cell)]

    def closing_lines(self, failures: Sequence[str]) -> list[str]:
        return [f"outside the bounds: {failure}" for failure in failures]
