"""``plan.py --rows FILE --json``: the time, the range and the memory of every row of a file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsgpt.common.errors import UserError
from dsgpt.common.json_files import JsonError, parse_json, read_bytes
from dsgpt.planner.evidence import evidence_for, traits_of
from dsgpt.planner.formulas import STEP, model_state, worst_peak
from dsgpt.planner.options import HEADROOM
from dsgpt.planner.plan import FIXED_BYTES, HOST_SHARE
from dsgpt.planner.rates import Machine
from dsgpt.planner.rows import Row, machine_of, read_row, setup_of
from dsgpt.planner.setup import Setup
from dsgpt.planner.step_time import likely_sec

HEADROOMS = {False: 4.0, True: HEADROOM}
"""Percent of a GPU's datasheet memory that no tensor of a row's program fills, by whether it keeps the results of
separate operations, which leave more pieces unused. Of 34.1 10^9 bytes, which a V100 of "32 GB" has, rows reserved up
to 32.3; of what they reserved, 7 to 9% were in no tensor where the GPU was full (bs-gpt2md-371 and 372)."""


def answers(path: Path) -> Iterator[dict[str, Any]]:
    """Yields for each row of the file its answer, or its id and an error.

    Raises:
        UserError: the file is no list of rows; one line.
    """
    try:
        rows = parse_json(read_bytes(path))
    except JsonError as error:
        raise UserError(f"--rows {path}: cannot be read ({error})") from error
    if not isinstance(rows, list):
        raise UserError(f"--rows {path}: must be a list of rows, in the form of src/dsgpt/planner/measured.json")
    for row in rows:
        yield answer(row)


def answer(row: Any) -> dict[str, Any]:
    """The answer to a row: seconds and GB (10^9 bytes), or an error."""
    if not isinstance(row, dict):
        return {"id": None, "error": "a row must be an object"}
    try:
        return _answer(read_row(row))
    except UserError as error:
        said = "; ".join(error.problems)
    except (ValueError, ArithmeticError) as error:  # of numbers that no training has
        said = f"cannot be predicted ({error})"
    return {"id": row.get("id"), "error": said}


def _answer(row: Row) -> dict[str, Any]:
    setup, machine = setup_of(row), machine_of(row)
    if row.dtype not in machine.precisions:
        raise UserError(f"dtype {row.dtype}: {machine.name} has no units for it")
    seconds, evidence = likely_sec(setup, machine), evidence_for(traits_of(setup, machine))
    memory, fits = memory_of(setup, machine)
    return {
        "id": row.id,
        "seconds_per_step": seconds,
        "seconds_low": seconds * evidence.low,
        "seconds_high": seconds * evidence.high,
        "peak_memory_gb": memory / 1e9,
        "fits": fits,
    }


def memory_of(setup: Setup, machine: Machine) -> tuple[int, bool]:
    """Bytes of tensors on the rank that needs most, in a step, and whether its GPU and its host have them."""
    rank, peak = worst_peak(setup, device=machine.kind, among=STEP)
    headroom = HEADROOMS[setup.kernels == "eager" and not setup.activation_checkpointing]
    usable = (1 - headroom / 100) * machine.memory_bytes - FIXED_BYTES[machine.kind]
    on_host = sum(model_state(setup, rank=rank).off_device.values())
    return peak.total, peak.total <= usable and on_host <= HOST_SHARE * machine.host_bytes
