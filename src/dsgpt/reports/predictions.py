"""The record of ``benchmark.py plan``, predictions beside measurements, as far as charts show it. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from dsgpt.common.errors import UserError
from dsgpt.common.measured import instruction_words
from dsgpt.reports.fields import Fields, read_object
from dsgpt.reports.footprint import Footprint, parts_of_prediction
from dsgpt.reports.measured import NOT_RECORDED, Measured
from dsgpt.reports.segments import machine


@dataclass(frozen=True)
class Predictions:
    """The peaks of memory in the record."""

    rows: tuple[Measured, ...]
    """A cell each; of its ranks, the one that needed most."""
    footer: str
    """What the record is, in a line."""


def read_predictions(path: Path) -> Predictions:
    """Read the record.

    Raises:
        UserError: it cannot be read, or has no cells with predictions; one line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file; give a record of benchmark.py plan") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    record = Fields(read_object(text, source=str(path), notes=[]), notes=[])
    rows = tuple(_row(cell) for cell in record.sections("cells"))
    if not any(row.footprint.predicted for row in rows):
        raise UserError(f"{path}: holds no predictions beside measurements; give a record of benchmark.py plan")
    date = (record.text("timestamp_utc") or "")[:10] or "without a date"
    sets = instruction_words(record.section("hardware").text("instruction_sets"))
    footer = f"benchmark.py plan: {len(rows)} cells, {date}; machine: {machine(record) or NOT_RECORDED} ({sets})."
    return Predictions(rows, footer)


def _row(cell: Fields) -> Measured:
    ranks = [rank for rank in cell.sections("peak_memory") if rank.number("measured")]
    name = cell.text("title") or cell.text("key") or ""
    if not ranks:
        return Measured(name, Footprint(), cell.text("status") or NOT_RECORDED)
    most = max(ranks, key=lambda rank: rank.number("measured") or 0)
    predicted = parts_of_prediction(most.section("predicted").section("parts"))
    return Measured(name, Footprint(predicted=predicted, peak=most.number("measured"), peak_kind="tensors"))
