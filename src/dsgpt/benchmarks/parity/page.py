"""Makes ``docs/parity.md`` from a record of the suite. Every figure on the page comes from the record."""

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from dsgpt.benchmarks.harness.cells import Cell
from dsgpt.benchmarks.harness.pages import Record, table
from dsgpt.benchmarks.parity.page_method import method
from dsgpt.common.measured import machine_words

FACTS = ("loss", "validation loss", "gradient norm", "first gradient", "first update", "weights")
LOW_FACTS = ("loss", "first gradient")
"""Facts that the table of strategies shows for bf16."""
BYTES = ("parameters", "gradients", "optimizer", "master", "sent")
STATUS_WORDS = {"passed": "passed", "failed": "**FAILED**", "refused": "refused", "error": "**ERROR**"}

Cells = list[dict[str, Any]]


def parity_page(record: Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.parity.record`` makes it.
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
    found = [cell["measured"][fact] for cell in cells if fact in cell["measured"]]
    if not found:
        return "not measured" if any(cell["measured"] for cell in cells) else "-"
    values = [fact["difference"] for fact in found if "difference" in fact]
    return "not finite" if None in values else f"{max(values):.1e}"


def _equal(cells: Cells, fact: str) -> str:
    found = [cell["measured"][fact]["equal"] for cell in cells if fact in cell["measured"]]
    return "equal" if found and all(found) else ("-" if not found else "**different**")


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
most. The last column is the largest difference from the formulas of `src/dsgpt/planning`, over all trainings of the
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
