"""Makes ``docs/parity.md`` from a record of the suite. Every figure on the page comes from the record."""

import textwrap
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from dsgpt.benchmarks.cells import Cell
from dsgpt.benchmarks.frame import Record, filled, page_of, section
from dsgpt.common.text import grouped, table

KEYS = ("optimizer", "precision", "training", "data_ranks", "accumulation", "low", "whole_logits")
FIGURES = ("first_loss", "last_loss", "last_validation_loss", "smallest_grad_norm")
LAUNCH = ("launcher", "ranks", "cells", "start_seconds", "seconds")
"""Fields of references and launches that the page shows."""


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
    cells, bugs = _parts(record)
    count = {status: sum(cell["status"] == status for cell in cells) for status in STATUS_WORDS}
    failed = f"{count['failed']} failed" if count["failed"] else "all passed"
    facts = {"count": len(cells), "trained": count["passed"] + count["failed"], "refused": count["refused"]}
    facts |= {"bugs": len(bugs), "caught": sum(cell["status"] == "failed" for cell in bugs)}
    head = filled(
        "parity",
        record | facts,
        record_at=source,
        outcome=f"{failed}; {count['error']} ended in an error" if count["error"] else failed,
        wrongly=sum(cell["status"] == "refused" and not cell["as_expected"] for cell in cells) or "none",
    )
    refusals = []
    for (message,), group in _grouped([cell for cell in cells if cell["status"] == "refused"], "message"):
        settings = (cell["option"] or cell["precision"].replace("fp32", "").replace("bf16", "") for cell in group)
        names = [f"{cell['strategy']} {setting}".strip() for cell, setting in zip(group, settings, strict=True)]
        refusals.append([", ".join(dict.fromkeys(names)), "<br>".join(message.splitlines())])
    bounds = record["bounds"]
    references = [
        [*(item[key] for key in KEYS), *(f"{item[key]:.4f}" for key in FIGURES), item["clipping"] or "never"]
        for item in record["references"]
    ]
    return page_of(
        head,
        _strategies(cells),
        _bugs(bugs),
        section("Refused", ["what", "message"], refusals, text="None of these was started."),
        _bytes_per_rank(cells),
        _troubles(record),
        filled("parity-method", record),
        table(["", *map(_words, next(iter(bounds.values())))], [[name, *one.values()] for name, one in bounds.items()]),
        "References:",
        table([*map(_words, (*KEYS, *FIGURES)), "clipped at"], references),
        "Launches:",
        table([*map(_words, LAUNCH)], [[item[key] for key in LAUNCH] for item in record["launches"]]),
    )


def _words(name: str) -> str:
    return name.replace("_", " ")


def _parts(record: Record) -> Iterable[Cells]:
    """The cells without a planted bug, and those with one."""
    return ([cell for cell in record["cells"] if bool(cell["bug"]) == planted] for planted in (False, True))


def summary_lines(record: Record) -> list[str]:
    """The table of strategies and of planted bugs, for a console."""
    cells, bugs = _parts(record)
    return [line.removeprefix("## ") for line in (*_strategies(cells).splitlines(), "", *_bugs(bugs).splitlines())]


def _strategies(cells: Cells) -> str:
    header = ["strategy", "ranks", "passed", *(f"{fact}, fp32" for fact in FACTS)]
    header += [*(f"{fact}, bf16" for fact in LOW_FACTS), "samples", "replicas"]
    rows = []
    for (strategy, ranks), group in _grouped(cells, "strategy", "ranks"):
        ran = [cell for cell in group if cell["status"] != "refused"]
        fp32 = [cell for cell in ran if cell["precision"] == "fp32"]
        bf16 = [cell for cell in ran if cell["precision"] == "bf16"]
        worst = [*(_worst(fp32, fact) for fact in FACTS), *(_worst(bf16, fact) for fact in LOW_FACTS)]
        rows.append(
            [strategy, ranks, _verdict(group), *worst, _equal(ran, "samples"), _equal(ran, "replicated weights")]
        )
    return section("Strategies", header, rows)


def _verdict(cells: Cells) -> str:
    """Number of cells that passed, of how many; bold if one is not as expected."""
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
    rows = []
    for cell in bugs:
        where = f"{cell['strategy']}, {cell['ranks']} ranks, {cell['optimizer']}, {cell['precision']}"
        caught = "; ".join(map(failure_words, cell["failures"][:2])) or STATUS_WORDS[cell["status"]]
        rows.append([cell["bug_description"], where, "yes" if cell["status"] == "failed" else "**NO**", caught])
    return section("Planted bugs", ["bug", "planted in", "caught", "by (first two facts)"], rows)


def failure_words(failure: dict[str, Any]) -> str:
    """``gradient norm at step 1: 5.1 instead of 2.5 (off by 1.0e+00, allowed 0.0001)``."""
    expected, actual = (
        f"{value:.6g}" if isinstance(value, float) else textwrap.shorten(str(value), 80, placeholder="...")
        for value in (failure["expected"], failure["actual"])
    )
    text = f"{failure['fact']} at {failure['where']}: {actual} instead of {expected}"
    if "bound" not in failure:
        return text
    off = "not finite" if failure["difference"] is None else f"{failure['difference']:.1e}"
    return f"{text} (off by {off}, allowed {failure['bound']:g})"


def _bytes_per_rank(cells: Cells) -> str:
    """Bytes of the AdamW training with the most accumulation; the last column is over all trainings of the row."""
    rows = []
    for row, group in _grouped([cell for cell in cells if cell["cost"]], "strategy", "ranks", "precision"):
        shown = max(group, key=lambda cell: (cell["optimizer"] == "adamw", not cell["option"], cell["accumulation"]))
        sizes = [shown["cost"][name]["measured"] for name in BYTES]
        every = [size for cell in group for size in cell["cost"].values() if None not in size.values()]
        off = max(abs(size["formula"] - size["measured"]) / max(size["measured"], 1) for size in every)
        sizes = ["unknown" if size is None else f"{size:,}" for size in sizes]
        rows.append([*row, shown["accumulation"], *sizes, f"{off:.1%}"])
    header = ["strategy", "ranks", "precision", "acc.", *BYTES, "formulas off by"]
    return section("Bytes per rank", header, rows, text=filled("parity-bytes", {}))


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


def _grouped(cells: Cells, *keys: str) -> Iterable[tuple[tuple[Any, ...], Cells]]:
    return grouped((tuple(cell[key] for key in keys), cell) for cell in cells).items()
