"""Makes the page of many requests from its record. Every figure on the page comes from the record."""

import json
from collections.abc import Callable

from dsgpt.benchmarks.harness.pages import Record, table
from dsgpt.common.json_files import parse_as
from dsgpt.common.measured import machine_words
from dsgpt.reports.concurrency import TITLES, Concurrency, Engine, Load, Percentiles
from dsgpt.reports.sweeps import Spread
from dsgpt.telemetry.console import duration


def inference_page(record: Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.inference.command`` makes it.
        source: the record's path, for the reader.
    """
    found = _read(record)
    parts = [_head(found, source), "## Throughput and latency", _overview(found), "## At each concurrency"]
    for slots in found.gap_sec:
        parts += [f"### {slots} at once", _details(found, slots)]
    parts += ["## Engines", _engines(found), "## Same ids", _same_ids(found)]
    return "\n\n".join(parts) + "\n"


def summary_lines(record: Record) -> list[str]:
    """A line for each engine, for a console."""
    lines = []
    for engine in _read(record).engines:
        if engine.failure:
            lines.append(f"{engine.name}: failed: {engine.failure}")
        if not engine.by_concurrency:
            continue
        slots, load = list(engine.by_concurrency.items())[-1]
        speed = f"{load.tokens_per_sec.median:,.0f} tokens per second"
        lines.append(
            f"{engine.name}: {speed} and p95 latency {load.latency_sec.p95:.3f} s at {slots} at once; "
            f"{engine.same_ids} of {engine.answers} answers have our ids"
        )
    return lines


def _read(record: Record) -> Concurrency:
    """The record with its types checked; raises ``JsonError``, a ``ValueError``."""
    return parse_as(json.dumps(record).encode(), Concurrency, unknown_keys=True)


def _head(found: Concurrency, source: str) -> str:
    hardware, model, env = found.hardware, found.model, found.env
    threads = f", {found.threads} threads for each engine" if found.threads else ""
    shape = f"{model['n_layer']} layers of width {model['n_embd']}, vocabulary {model['vocab_size']:,}"
    return f"""# Many requests at once

Generated from `{source}` by `.venv/bin/python src/benchmark.py inference --table-from {source}`.

Every engine answered the same {found.requests} requests: {found.prompt_tokens:,} tokens of prompts and
{found.new_tokens:,} new tokens, greedily, in fp32. A trace with seed {found.seed} says when they arrive (Poisson) and
how long each is; the prompts are random ids, so that no engine can reuse what it computed for another. At concurrency
c, an engine works on at most c requests at once, and the others wait in a queue. On average a request arrives every
2 S / c seconds, where S = {found.alone_sec:.4f} s is the mean time of a request that this project answers alone: an
engine that decoded c requests as fast as one would be busy half of the time. The arrivals do not wait for the engine:
if it is slower than they are, the queue grows until the trace ends, and so do latency and queue time.

The engines took turns, {found.repeats} at each concurrency, after a warm-up. Throughput is the median of the turns,
with the smallest and largest value behind it; percentiles are of the requests of all turns. All turns took
{duration(found.seconds)}.

Model: `{found.checkpoint}`, {shape}.
Machine: {machine_words(hardware)}; {hardware["device"]}{threads}. torch {env["torch_version"]}.
Commit `{found.git_commit}`, {found.timestamp_utc}."""


def _overview(found: Concurrency) -> str:
    """Throughput and median latency of every engine, a row for each concurrency."""
    header = ["at once", "offered, tokens/s", *(f"{engine.name}: tokens/s; p50 latency" for engine in found.engines)]
    rows = []
    for slots in found.gap_sec:
        loads = [engine.by_concurrency.get(slots) for engine in found.engines]
        offered = next((load.offered_tokens_per_sec for load in loads if load), None)
        cells = [
            f"{_spread(load.tokens_per_sec)}; {load.latency_sec.p50:.3f} s" if load else "failed" for load in loads
        ]
        rows.append([slots, "unknown" if offered is None else f"{offered:,.0f}", *cells])
    return table(header, rows)


def _details(found: Concurrency, slots: str) -> str:
    """All percentiles at one concurrency."""
    columns: list[tuple[str, Callable[[Load], str]]] = [
        ("first token, ms", lambda load: _milliseconds(load.ttft_sec)),
        ("per token, ms", lambda load: _milliseconds(load.time_per_token_sec)),
        ("latency, ms", lambda load: _milliseconds(load.latency_sec)),
        ("in the queue, ms", lambda load: _milliseconds(load.queue_sec)),
        ("tokens/s of a request", lambda load: _three(load.request_tokens_per_sec, "{:,.0f}")),
        ("peak memory, MB", lambda load: _megabytes(load.peak_memory_bytes)),
    ]
    rows = [
        [engine.name, *(form(load) if (load := engine.by_concurrency.get(slots)) else "failed" for _, form in columns)]
        for engine in found.engines
    ]
    return table(["p50 / p95 / p99", *(name for name, _ in columns)], rows)


def _engines(found: Concurrency) -> str:
    rows = [
        [
            engine.name,
            TITLES.get(engine.name, engine.name),
            engine.version or ("this commit" if engine.load_sec else "unknown"),
            "failed" if engine.load_sec is None else f"{engine.load_sec:.1f}",
        ]
        for engine in found.engines
    ]
    legend = (
        "The first token and the latency count from the arrival of a request, so they include its time in the queue. "
        "Of the speeds of requests, p95 is what 95% of them reach at least. Peak memory is what was resident in the "
        "engine's processes, or allocated on the GPU by the process that measures; it includes the libraries and what "
        "vLLM reserves for its cache."
    )
    return f"{table(['engine', 'what it is', 'version', 'seconds to load'], rows)}\n\n{legend}"


def _same_ids(found: Concurrency) -> str:
    lines = [
        f"* {engine.name}: {engine.same_ids:,} of {engine.answers:,} answers have the ids that `one` gives alone"
        for engine in found.engines
    ]
    lines += [f"* {engine.name} failed: {engine.failure}" for engine in found.engines if engine.failure]
    rows = [row for engine in found.engines for row in _difference_rows(engine)]
    if not rows:
        return "\n".join(lines)
    header = ["engine", "request", "new token", "our id", "its id", "our lead", "answers"]
    legend = (
        "Where answers leave ours. Our lead is by how much our id's logit exceeds the second likeliest: near 0, the "
        "rounding of another order of sums decides. After it, the texts differ."
    )
    return "\n\n".join(["\n".join(lines), legend, table(header, rows)])


def _difference_rows(engine: Engine) -> list[list[object]]:
    return [
        [engine.name, one.request, one.position, _id(one.ours), _id(one.theirs), f"{one.margin:.2g}", one.answers]
        for one in engine.differences
    ]


def _id(token: int) -> str:
    return "none" if token < 0 else str(token)


def _milliseconds(values: Percentiles | None) -> str:
    return _three(values, "{:,.1f}", scale=1000)


def _three(values: Percentiles | None, form: str, *, scale: float = 1.0) -> str:
    if values is None:
        return "unknown"
    return " / ".join(form.format(value * scale) for value in (values.p50, values.p95, values.p99))


def _spread(value: Spread) -> str:
    text = f"{value.median:,.0f}"
    return text if len(value.values) < 2 else f"{text} ({value.smallest:,.0f} to {value.largest:,.0f})"


def _megabytes(value: int | None) -> str:
    return "unknown" if value is None else f"{value / 1e6:,.0f}"
