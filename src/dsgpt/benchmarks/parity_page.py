"""Makes ``docs/parity.md`` from a record of the suite. Every figure on the page comes from the record."""

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from dsgpt.benchmarks.cells import RATE_BOUND, Cell
from dsgpt.benchmarks.frame import Record
from dsgpt.common.text import machine_words, table

WHY = """AdamW's first moment after one step gives the first gradient. SGD has no state. In its first step, the gradient
that it steps on is put where Adam keeps that moment, so that the strategy's own code gathers it."""
_PRECISIONS = """The learning rate is the one that every rank's optimizer steps with, in all its parameter groups, read
by PyTorch's hook. The reference computes the rate itself. Every rank validates as the training loop does, after half of
the steps and after the last. The last batch is padded, so ranks and micro batches have unequal numbers of targets, some
of them none. The reference takes the mean over all targets, one sequence after the other.

In bf16 every product is rounded to 8 binary digits, and differently for another split of the batch. So the reference
takes the micro batches of the training that it is compared with. It rounds gradients between ranks where the strategy
is known to do so: ZeRO 0 and 1 once per step, 2 and 3 every micro batch; DDP, FSDP and sequence ranks never."""
_ROUNDED_ON_CPU = """First gradient and first update are then equal in six digits. There are three exceptions with wider
bounds: tensor and sequence parallelism round other products, a pipeline rounds the tied embedding's gradient
differently, and more than two ranks add up in an undefined order."""
_ROUNDED_ON_CUDA = """Kernels of GPUs add up in other orders, and the effect was not measured yet: the bounds of 16-bit
precisions allow for a different rounding of every product."""
_UNSEEN = """These bounds cannot detect the following:

* errors in the keys' biases, which are left out of the weights: softmax ignores what all keys share, so their gradient
  is only rounding, of which Adam makes full steps;
{on_device}
* errors that need more steps than these trainings take.

The reference takes token files and the order of samples from the product, which tests them separately. Of the
schedules, the cosine and the constant rate are compared with the reference's own formula. `WarmupLR` and
`WarmupDecayLR` have tests against given values (`tests/strategies`)."""
_UNSEEN_ON_CPU = """* in bf16, errors that change loss or weights after the first update by less than one more rounding
  of every product;
* under tensor and sequence parallelism in bf16, a sum in the wrong precision;"""
_UNSEEN_ON_CUDA = """* in 16-bit precisions, errors that change gradients, loss or weights by less than one more
  rounding of every product, for example a sum in the wrong precision or a bias that decays (planted on CPUs only);"""


def _precisions(device: str) -> str:
    """How far 16-bit trainings are from the reference depends on the device, and so does what cannot be seen."""
    on_cpu = device == "cpu"
    rounded = _ROUNDED_ON_CPU if on_cpu else _ROUNDED_ON_CUDA
    unseen = _UNSEEN.format(on_device=_UNSEEN_ON_CPU if on_cpu else _UNSEEN_ON_CUDA)
    return f"{_PRECISIONS} {rounded}\n\n{unseen}"


def method(record: Record) -> str:
    """``## How it is measured`` and all below it.

    Args:
        record: as ``dsgpt.benchmarks.parity`` makes it.
    """
    parts = [
        _work(record["work"]),
        _bounds(record),
        WHY,
        _precisions(record["hardware"]["device"]),
        _references(record),
        _launches(record),
        """Every cell is trained in its own processes, with a new process group. On GPUs each of them is a new Python.
On a CPU they are forked after the imports. On 2 ranks, each rank is forked from a Python of its own; on more ranks, all
are forked from one. So differences between Pythons, such as the order of sets, are tested only on 2 ranks and on
GPUs.""",
    ]
    return "\n\n".join(parts)


def _work(work: dict[str, Any]) -> str:
    shape = work["model"]
    return f"""## How it is measured

Every training takes {work["steps"]} optimizer steps of {work["global_batch_size"]} sequences of
{work["seq_len"]} tokens of real text, in real processes started by `deepspeed`, `torchrun` or `python`, through the
code behind `src/gpt2.py` and the shipped recipes. The model has {shape["num_layers"]} layers, {shape["num_heads"]}
heads and width {shape["embedding_size"]}; buckets and thresholds are so small that it fills several. Warm-up is 2
steps, dropout 0. The reference is one process of plain PyTorch (`src/dsgpt/benchmarks/parity_reference.py`): the model,
`torch.optim`, `clip_grad_norm_` and, in fp32, the whole global batch at once. It uses no code of the strategies. If
gradients have a wrong scale, the loss shows it under SGD but not under AdamW. SGD without clipping shows it even if
they are scaled after the norm was read."""


def _bounds(record: Record) -> str:
    """The table of bounds: a column for each kind of arithmetic; kinds with the same bounds share one."""
    columns: list[tuple[str, dict[str, Any]]] = []
    for name, one in record["bounds"].items():
        if columns and columns[-1][1] == one:
            columns[-1] = (f"{columns[-1][0]}; {name}", one)
        else:
            columns.append((name, one))
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "loss, every step": lambda one: f"{one['loss']:g}",
        "validation loss, after half of the steps and all": lambda one: f"{one['validation']:g}",
        "gradient norm, every step, relative": lambda one: f"{one['norm']:g}",
        "learning rate, every step": lambda _: f"{RATE_BOUND:g}",
        "first step's gradient, every parameter, relative L2": lambda one: _with_special(
            one["gradient"], {"LayerNorms": one["layer_norm_gradient"], "tied embedding": one["tied_gradient"]}
        ),
        "first update: weights after it, relative L2": lambda one: (
            f"{_with_special(one['update'], {'tied embedding': one['tied_update']})}, every parameter"
        ),
        f"weights after {record['work']['steps']} steps, relative L2": lambda one: (
            f"{one['weights']:g}, every parameter"
        ),
        "samples that the data ranks took, every step": lambda _: "equal",
        "weights that ranks hold whole": lambda _: "equal bits",
    }
    header = ["fact", *(name for name, _ in columns)]
    return table(header, [[fact, *(words(one) for _, one in columns)] for fact, words in rows.items()])


def _with_special(usual: float, special: dict[str, float | None]) -> str:
    others = [f"{name} {value:g}" for name, value in special.items() if value not in {None, usual}]
    return "; ".join([f"{usual:g}", *others])


def _references(record: Record) -> str:
    return table(
        [
            "reference",
            "loss, first step",
            "loss, last step",
            "validation, last",
            "smallest gradient norm",
            "clipped at",
        ],
        [
            [
                _reference_name(item),
                f"{item['first_loss']:.4f}",
                f"{item['last_loss']:.4f}",
                f"{item['last_validation_loss']:.4f}",
                f"{item['smallest_grad_norm']:.3f}",
                item["clipping"] or "not clipped",
            ]
            for item in record["references"]
        ],
    )


def _reference_name(item: dict[str, Any]) -> str:
    """The settings of a reference."""
    words = [item["optimizer"], item["precision"], item["training"]]
    if item["precision"] != "fp32":
        words += [f"data ranks {item['data_ranks']}", f"accumulation {item['accumulation']}"]
        words.append(f"gradients rounded: {item['low']}" if item["low"] else "gradients not rounded")
    return ", ".join(filter(None, words))


def _launches(record: Record) -> str:
    return table(
        ["launcher", "ranks", "cells", "seconds until the ranks work", "seconds in all"],
        [
            [item["launcher"], item["ranks"], item["cells"], item["start_seconds"], item["seconds"]]
            for item in record["launches"]
        ],
    )


FACTS = ("loss", "validation loss", "gradient norm", "first gradient", "first update", "weights")
LOW_FACTS = ("loss", "first gradient")
"""Facts that the table of strategies shows for bf16."""
BYTES = ("parameters", "gradients", "optimizer", "master", "sent")
STATUS_WORDS = {"passed": "passed", "failed": "**FAILED**", "refused": "refused", "error": "**ERROR**"}

Cells = list[dict[str, Any]]


def parity_page(record: Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.parity`` makes it.
        source: the record's path, for the reader.
    """
    cells = [cell for cell in record["cells"] if not cell["bug"]]
    bugs = [cell for cell in record["cells"] if cell["bug"]]
    parts = [
        _head(record, cells, bugs, source),
        _strategies(cells),
        _bugs(bugs),
        _refusals(cells),
        _bytes_per_rank(cells),
        _troubles(record),
        method(record),
        _all_cells(cells),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def summary_lines(record: Record) -> list[str]:
    """The table of strategies and of planted bugs, for a console."""
    cells = [cell for cell in record["cells"] if not cell["bug"]]
    bugs = [cell for cell in record["cells"] if cell["bug"]]
    lines = [*_strategies(cells).splitlines(), "", *_bugs(bugs).splitlines()]
    return [line.removeprefix("## ") for line in lines]


def _head(record: Record, cells: Cells, bugs: Cells, source: str) -> str:
    count = {status: sum(cell["status"] == status for cell in cells) for status in STATUS_WORDS}
    wrongly = sum(cell["status"] == "refused" and not cell["as_expected"] for cell in cells) or "none"
    hardware, env = record["hardware"], record["env"]
    return f"""# Every strategy trains the same model

Generated from `{source}` by
`.venv/bin/python src/benchmark.py parity --table-from {source} --page docs/parity.md`;
`make parity` runs the whole suite on your machine.

{len(cells)} cells: {count["passed"] + count["failed"]} trained and compared with plain PyTorch, {_outcome(count)};
{count["refused"]} refused by the product before they started (for reasons below), {wrongly} of them unexpectedly. Of
{len(bugs)} bugs planted in the strategies, the suite reported {sum(cell["status"] == "failed" for cell in bugs)}.

Machine: {machine_words(hardware)}; {hardware["device"]}.
Python {env["python_version"]}, torch {env["torch_version"]}, DeepSpeed {env["deepspeed_version"]}.
Commit `{record["git_commit"]}`, {record["timestamp_utc"]}. The suite took {record["seconds"] / 60:.0f} minutes."""


def _outcome(count: dict[str, int]) -> str:
    """``**all passed**``, or how many failed, and how many ended in an error before anything could be compared."""
    failed = f"{count['failed']} failed" if count["failed"] else ("all passed" if count["passed"] else "none passed")
    errors = f"; {count['error']} ended in an error" if count["error"] else ""
    return f"**{failed}{errors}**"


def _strategies(cells: Cells) -> str:
    header = ["strategy", "ranks", "passed", *(f"{fact}, fp32" for fact in FACTS)]
    header += [*(f"{fact}, bf16" for fact in LOW_FACTS), "samples", "replicas"]
    rows = []
    for (strategy, ranks), group in _grouped(cells, lambda cell: (cell["strategy"], cell["ranks"])):
        ran = [cell for cell in group if cell["status"] != "refused"]
        fp32 = [cell for cell in ran if cell["precision"] == "fp32"]
        bf16 = [cell for cell in ran if cell["precision"] == "bf16"]
        worst = [*(_worst(fp32, fact) for fact in FACTS), *(_worst(bf16, fact) for fact in LOW_FACTS)]
        rows.append(
            [strategy, ranks, _verdict(group), *worst, _equal(ran, "samples"), _equal(ran, "replicated weights")]
        )
    return f"## Strategies\n\n{table(header, rows)}"


def _verdict(cells: Cells) -> str:
    """How many passed, of how many; bold if one is not as expected."""
    passed, refused = (sum(cell["status"] == status for cell in cells) for status in ("passed", "refused"))
    words = f"{passed} of {len(cells)}" + (f" ({refused} refused)" if refused else "")
    return words if all(cell["as_expected"] for cell in cells) else f"**{words}**"


def _worst(cells: Cells, fact: str) -> str:
    measured = [cell["measured"][fact] for cell in cells if fact in cell["measured"]]
    if not measured:
        return "not measured" if any(cell["measured"] for cell in cells) else "-"
    values = [fact["difference"] for fact in measured if "difference" in fact]
    return "not finite" if None in values else f"{max(values):.1e}"


def _equal(cells: Cells, fact: str) -> str:
    equal = [cell["measured"][fact]["equal"] for cell in cells if fact in cell["measured"]]
    return "equal" if equal and all(equal) else ("-" if not equal else "**different**")


def _bugs(bugs: Cells) -> str:
    if not bugs:
        return ""
    rows = []
    for cell in bugs:
        where = f"{cell['strategy']}, {cell['ranks']} ranks, {cell['optimizer']}, {cell['precision']}"
        caught = "; ".join(map(failure_words, cell["failures"][:2])) or STATUS_WORDS[cell["status"]]
        rows.append([cell["bug_description"], where, "yes" if cell["status"] == "failed" else "**NO**", caught])
    return f"## Planted bugs\n\n{table(['bug', 'planted in', 'caught', 'by (first two facts)'], rows)}"


def failure_words(failure: dict[str, Any]) -> str:
    """``gradient norm at step 1: 5.1 instead of 2.5 (off by 1.0e+00, allowed 0.0001)``."""
    expected, actual = (_value(failure[key]) for key in ("expected", "actual"))
    text = f"{failure['fact']} at {failure['where']}: {actual} instead of {expected}"
    if "bound" not in failure:
        return text
    difference = failure["difference"]
    off = "not finite" if difference is None else f"{difference:.1e}"
    return f"{text} (off by {off}, allowed {failure['bound']:g})"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _refusals(cells: Cells) -> str:
    refused = [cell for cell in cells if cell["status"] == "refused"]
    if not refused:
        return ""
    rows = []
    for message, group in _grouped(refused, lambda cell: cell["message"]):
        names = dict.fromkeys(f"{cell['strategy']} {_setting(cell)}".strip() for cell in group)
        rows.append([", ".join(names), "<br>".join(message.splitlines())])
    return f"## Refused\n\nNone of these was started.\n\n{table(['what', 'message'], rows)}"


def _bytes_per_rank(cells: Cells) -> str:
    """Bytes of the AdamW training with the most accumulation; the last column is over all trainings of the row."""
    rows = []
    for (strategy, ranks, precision), group in _grouped(
        [cell for cell in cells if cell.get("cost")], lambda cell: (cell["strategy"], cell["ranks"], cell["precision"])
    ):
        shown = max(group, key=lambda cell: (cell["optimizer"] == "adamw", not cell["option"], cell["accumulation"]))
        sizes = [shown["cost"][name]["measured"] for name in BYTES]
        off = max(_off(size) for cell in group for size in cell["cost"].values())
        rows.append([strategy, ranks, precision, shown["accumulation"], *map(_bytes, sizes), f"{off:.1%}"])
    if not rows:
        return ""
    header = ["strategy", "ranks", "precision", "acc.", *BYTES, "formulas off by"]
    return f"""## Bytes per rank

Measured bytes of model state, of the rank that holds most, and bytes sent per optimizer step, of the rank that sends
most. The last column is the largest difference from the formulas of `src/dsgpt/planner`, over all trainings of the
row.

{table(header, rows)}"""


def _off(size: dict[str, int | None]) -> float:
    measured, formula = size["measured"], size["formula"]
    if measured is None or formula is None:
        return float("inf")
    return abs(formula - measured) / measured if measured else float(formula > 0)


def _bytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size:,}"


def _setting(cell: dict[str, Any]) -> str:
    return cell["option"] or (cell["precision"] if cell["precision"] == "fp16" else "")


def _troubles(record: Record) -> str:
    """Every cell that did not end as expected, and what is wrong with it."""
    lines = []
    for cell in record["cells"]:
        if not cell["as_expected"]:
            reasons = [cell["message"]] if cell["message"] else list(map(failure_words, cell["failures"]))
            if cell["status"] == "refused":
                reasons = [f"refused, though it should train: {reason}" for reason in reasons]
            missing = "the planted bug was not noticed" if cell["bug"] else "trained, though it should be refused"
            lines += [f"* {cell_name(cell)}: {reason}" for reason in reasons or [missing]]
    return "## Failures\n\n" + "\n".join(lines) if lines else ""


def cell_name(cell: dict[str, Any]) -> str:
    """``Cell.name`` of a recorded cell."""
    return Cell(**{field.name: cell[field.name] for field in fields(Cell)}).name


def _all_cells(cells: Cells) -> str:
    header = ["strategy", "ranks", "acc.", "optimizer", "precision", "option", "result", *FACTS, "s"]
    rows = [
        [
            cell["strategy"],
            cell["ranks"],
            cell["accumulation"],
            cell["optimizer"],
            cell["precision"],
            cell["option"],
            STATUS_WORDS[cell["status"]],
            *(_worst([cell], fact) for fact in FACTS),
            f"{cell['seconds']:.1f}",
        ]
        for cell in cells
    ]
    return f"## Every training\n\nThe largest difference of each fact.\n\n{table(header, rows)}"


def _grouped(cells: Cells, key: Callable[[dict[str, Any]], Any]) -> Iterable[tuple[Any, Cells]]:
    groups: dict[Any, Cells] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    return groups.items()
