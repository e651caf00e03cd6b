"""Figures of runs as bars and tables: what ``dsgpt.reports`` measured, for the compare page. Imports no Streamlit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dsgpt.common.measured import NO_DIFFERENCE, no_difference
from dsgpt.dashboard import formats
from dsgpt.dashboard.answers import cost
from dsgpt.reports.comparison import speed_up
from dsgpt.reports.concurrency import TITLES, Concurrency
from dsgpt.reports.runs import Run
from dsgpt.reports.sweeps import Comparison, Spread, Sweep

Table = dict[str, list[object]]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A figure of a run."""

    title: str
    """With its unit."""
    value: Callable[[Run, Run], float | None]
    """Of the baseline and the run."""
    form: Callable[[float | None], str]
    compares: bool = False
    """Whether it is a ratio to the baseline, which only equal work allows."""


def efficiency(base: Run, run: Run) -> float | None:
    """The speed-up per device, of the devices of the baseline; 1 is ideal."""
    ratio = speed_up(base, run)
    if ratio is None or not base.device_count or not run.device_count:
        return None
    return ratio * base.device_count / run.device_count


def _memory(base: Run, run: Run) -> float | None:
    """Of one kind for all: on GPUs what PyTorch allocated, otherwise the resident memory of rank 0."""
    found = run.gpu_memory if base.gpu_memory is not None else run.host_memory
    return None if found is None else found / 1e9


def measures(price: float | None) -> Mapping[str, Measure]:
    """Every measure by its short name; ``price`` is that of a device hour."""
    found = {
        "time": Measure(title="training time (s)", value=lambda _, run: run.train_time, form=formats.seconds),
        "throughput": Measure(
            title="tokens/s, all devices", value=lambda _, run: run.tokens_per_sec, form=formats.rate
        ),
        "speed-up": Measure(title="speed-up in training time", value=speed_up, form=formats.times, compares=True),
        "efficiency": Measure(title="speed-up per device", value=efficiency, form=formats.share, compares=True),
        "memory": Measure(title="peak memory of rank 0 (GB)", value=_memory, form=_gigabytes),
        "latency": Measure(
            title="inference latency, batch 1 (s)", value=lambda _, run: run.inference_latency, form=formats.seconds
        ),
    }
    if price:
        found["money"] = Measure(
            title="cost of all devices ($)", value=lambda _, run: cost(run, price), form=formats.money
        )
    return found


def _gigabytes(value: float | None) -> str:
    return formats.memory(None if value is None else value * 1e9)


def bar_points(runs: Sequence[Run], measure: Measure) -> Table:
    """The fields ``run``, ``value`` and ``label``; the first run is the baseline. Unknown values have no bar."""
    values = [measure.value(runs[0], run) for run in runs]
    return {
        "run": [run.name for run in runs],
        "value": list(values),
        "label": [measure.form(value) for value in values],
    }


def as_table(rows: Sequence[Sequence[str]], *, first: str) -> Table:
    """Rows of ``reports.comparison``, the first of which is the header, as columns; equal headings get a number."""
    header, *body = rows
    table: Table = {}
    for place, heading in enumerate(header):
        name = heading or first
        table[name if name not in table else f"{name} ({place})"] = [row[place] for row in body]
    return table


def comparison_table(sweep: Sweep, comparison: Comparison) -> Table:
    """A row for each cell of a comparison of a sweep, the baseline first."""
    base = sweep.cell(comparison.baseline)
    compared = {each.cell: each for each in comparison.cells}
    cells = [base, *(sweep.cell(name) for name in compared if name != base.name)]
    found = [compared.get(cell.name) for cell in cells]
    return {
        "cell": [cell.name for cell in cells],
        "devices": [cell.devices for cell in cells],
        "tokens/s": [float(round(cell.tokens_per_sec.median)) if cell.tokens_per_sec else None for cell in cells],
        "speed-up": [1.0 if each is None else _median(each.speed_up) for each in found],
        "smallest": [None if each is None or not each.speed_up else each.speed_up.smallest for each in found],
        "largest": [None if each is None or not each.speed_up else each.speed_up.largest for each in found],
        "judged": [NO_DIFFERENCE if each and _unclear(each.speed_up) else "" for each in found],
        "efficiency": [1.0 if each is None else each.efficiency for each in found],
        "work": ["baseline" if each is None else each.same_work for each in found],
        "loss minus baseline": [None if each is None else each.loss_difference for each in found],
        "failures": [len(cell.failures) for cell in cells],
    }


def _unclear(spread: Spread | None) -> bool:
    return spread is not None and no_difference(spread.smallest, spread.largest)


def _median(spread: Spread | None) -> float | None:
    return None if spread is None else spread.median


def concurrency_table(record: Concurrency) -> Table:
    """A row for each engine at each concurrency."""
    rows = [(engine, at, load) for engine in record.engines for at, load in engine.by_concurrency.items()]
    return {
        "engine": [TITLES.get(engine.name, engine.name) for engine, _, _ in rows],
        "requests at once": [float(at) if at.isdecimal() else None for _, at, _ in rows],
        "tokens/s": [load.tokens_per_sec.median for _, _, load in rows],
        "latency, median (s)": [load.latency_sec.p50 for _, _, load in rows],
        "latency, 95% (s)": [load.latency_sec.p95 for _, _, load in rows],
        "first token, 95% (s)": [load.ttft_sec.p95 for _, _, load in rows],
        "peak memory (GB)": [
            None if not load.peak_memory_bytes else load.peak_memory_bytes / 1e9 for _, _, load in rows
        ],
    }
