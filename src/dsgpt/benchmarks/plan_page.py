"""Makes ``docs/planner.md`` from a record of the suite. Every figure on the page comes from the record."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsgpt.benchmarks.frame import Record
from dsgpt.common.text import machine_words, megabytes, table

# Which setup the planner would choose among cells of the same work, beside the one that was the fastest.

ChoiceFigures = Mapping[str, Any]
LEAST = 3
"""Cells that make a choice."""
MOST_SLOWER = 0.05
"""Goal: the chosen setup is at most this much slower than the fastest."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The cells of one work."""

    work: str
    cells: int
    chosen: ChoiceFigures
    """With the shortest predicted step."""
    fastest: ChoiceFigures
    """With the shortest measured step."""

    @property
    def slower(self) -> float:
        """The share by which the chosen setup took longer than the fastest."""
        share: float = _seconds(self.chosen, "measured") / _seconds(self.fastest, "measured") - 1
        return share


def choices(measured: Sequence[ChoiceFigures]) -> Iterator[Choice]:
    """A choice for all cells that train the same model with the same global batch."""
    by_work = defaultdict(list)
    for result in measured:
        times = result["step_seconds"]
        if times["measured"] is not None and times["predicted"] is not None:
            by_work[_work(result)].append(result)
    for work, results in by_work.items():
        if len(results) >= LEAST:
            yield Choice(
                work=work,
                cells=len(results),
                chosen=min(results, key=lambda result: _seconds(result, "predicted")),
                fastest=min(results, key=lambda result: _seconds(result, "measured")),
            )


def choice_table(measured: Sequence[ChoiceFigures]) -> str:
    """The choices as a table; empty if there is none."""
    rows = [
        [
            choice.work,
            str(choice.cells),
            f"{_short(choice.chosen)}: {_seconds(choice.chosen, 'measured'):.3f} s",
            f"{_short(choice.fastest)}: {_seconds(choice.fastest, 'measured'):.3f} s",
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


def _work(result: ChoiceFigures) -> str:
    work = result["work"]
    words = [work["model"]["name"], work["precision"], f"{work['global_batch_size']} sequences of {work['seq_length']}"]
    return ", ".join(words + ["checkpointing"] * work["activation_checkpointing"])


def _short(result: ChoiceFigures) -> str:
    name: str = result["title"].partition(",")[0]
    return name


def _seconds(result: ChoiceFigures, name: str) -> float:
    seconds: float = result["step_seconds"][name]
    return seconds


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


Result = Mapping[str, Any]
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
        ("Cells that failed", _failures(record["cells"])),
    ]
    return "\n".join([head, *(f"\n## {title}\n\n{text}" for title, text in sections if text), ""])


def summary_lines(record: Record) -> list[str]:
    """The verdict, for a console."""
    measured = [result for result in record["cells"] if result["status"] == "done"]
    return _verdict(measured).splitlines()


def line_of(result: Result) -> str:
    """A cell in one line."""
    if result["status"] != "done":
        return f"{result['title']}: {result['status'].upper()}: {result['message'].splitlines()[0]}"
    worst = largest(result)
    predicted, measured = worst["predicted"]["total"], worst["measured"]
    mark = ", OUTSIDE" if failed(result) else ""
    return (
        f"{result['title']}: peak {measured / 1e6:,.1f} MB, predicted {predicted / 1e6:,.1f} MB ({_off(worst)}){mark}"
    )


def largest(result: Result) -> Mapping[str, Any]:
    """The rank with the highest measured peak."""
    found: Mapping[str, Any] = max(result["peak_memory"], key=lambda rank: rank["measured"])
    return found


def failed(result: Result) -> list[str]:
    """What of a cell is outside the bounds."""
    if result["status"] != "done":
        return [f"{result['title']}: {result['message']}"]
    found = [
        f"{result['title']}: peak of rank {rank['rank']} is {_off(rank)}"
        for rank in result["peak_memory"]
        if not -MOST_UNDER <= rank["ratio"] - 1 <= MOST_OFF
    ]
    if not _exact(result["ring_bytes"]):
        found.append(f"{result['title']}: sends {result['ring_bytes']}")
    state = result["model_state"]
    return found + ([f"{result['title']}: model state {state}"] if state["measured"] != state["predicted"] else [])


def _exact(sent: Mapping[str, Any]) -> bool:
    """Whether every rank sent what is predicted, besides losses, norms and counters."""
    if sent["measured"] is None:
        return False
    pairs = zip(sent["measured"], sent["predicted"], strict=True)
    return all(0 <= measured - predicted <= LEFT_OUT_BYTES for measured, predicted in pairs)


def _off(rank: Mapping[str, Any]) -> str:
    return f"{rank['ratio'] - 1:+.1%}"


def _ranks(measured: Sequence[Result]) -> Iterator[tuple[Result, Mapping[str, Any]]]:
    for result in measured:
        for rank in result["peak_memory"]:
            yield result, rank


def _verdict(measured: Sequence[Result]) -> str:
    if not measured:
        return "No cell was measured."
    ranks = list(_ranks(measured))
    (low, under), (high, over) = (choose(ranks, key=lambda one: one[1]["ratio"]) for choose in (min, max))
    inside = sum(not failed(result) for result in measured)
    middle = statistics.median(abs(rank["ratio"] - 1) for _, rank in ranks)
    exact = sum(_exact(result["ring_bytes"]) for result in measured)
    goal = f"at most {MOST_OFF:.0%} over and {MOST_UNDER:.0%} under the measured one"
    return f"""{inside} of {len(measured)} cells are within the goals: on every rank a predicted peak {goal},
and bytes of model state and bytes sent exact. Median distance {middle:.1%}; lowest {_off(under)}
({low["title"]}, rank {under["rank"]}), highest {_off(over)}
({high["title"]}, rank {over["rank"]}). Bytes sent are exact in {exact} of {len(measured)} cells."""


def _memory_table(measured: Sequence[Result]) -> str:
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


def _parts_table(measured: Sequence[Result]) -> str:
    parts = list(measured[0]["peak_memory"][0]["predicted"]["parts"]) if measured else []
    used = [part for part in parts if any(largest(result)["predicted"]["parts"][part] for result in measured)]
    rows = [
        [result["title"], *(megabytes(size) if size else None for size in _sizes(result, used))] for result in measured
    ]
    return "MB of the predicted peak; [records.md](records.md#predicted-memory) says what each part is.\n\n" + table(
        ["cell", *(part.replace("_", " ") for part in used)], rows
    )


def _sizes(result: Result, parts: Sequence[str]) -> list[int]:
    predicted = largest(result)["predicted"]["parts"]
    return [predicted[part] for part in parts]


def _estimates(measured: Sequence[Result]) -> str:
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


def _traffic_table(measured: Sequence[Result]) -> str:
    rows = [
        [result["title"], megabytes(max(result["ring_bytes"]["predicted"])), _sent(result["ring_bytes"])]
        for result in measured
        if result["ranks"] > 1
    ]
    if not rows:
        return ""
    text = f"""Of the rank that sends most, if collectives are rings. The formulas leave out losses, norms and counters,
at most {LEFT_OUT_BYTES} bytes a step.

"""
    return text + table(["cell", "predicted, MB of a rank", "measured"], rows)


def _sent(sizes: Mapping[str, Any]) -> str:
    if sizes["measured"] is None:
        return "**not known**"
    return "the same" if _exact(sizes) else f"**{megabytes(max(sizes['measured']))}**"


def _time_table(measured: Sequence[Result]) -> str:
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


def _time_verdict(measured: Sequence[Result]) -> str:
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


def _failures(cells: Sequence[Result]) -> str:
    return "\n".join(f"* {why}" for result in cells for why in failed(result))
