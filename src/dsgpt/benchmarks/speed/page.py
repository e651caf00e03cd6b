"""Makes ``docs/speed.md`` from a record of the suite. Every figure on the page comes from the record."""

from collections.abc import Mapping
from typing import Any

from dsgpt.benchmarks.harness.pages import Record, judged, table
from dsgpt.benchmarks.speed.workloads import OURS
from dsgpt.common.measured import machine_words

Result = Mapping[str, Any]
KEPT = ", memory kept"
"""How the names of peers end that get this program's memory settings."""


def speed_page(record: Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.speed.command`` makes it.
        source: the record's path, for the reader.
    """
    hardware = record["hardware"]
    peers = ", ".join(f"{name} at `{commit}`" for name, commit in record["peers"].items()) or "none"
    env = record["env"]
    software = f"torch {env['torch_version']}, transformers {env['transformers_version']}"
    head = f"""# How fast a step is

Generated from `{source}` by
`.venv/bin/python src/benchmark.py speed --table-from {source} --page docs/speed.md`;
`.venv/bin/python src/benchmark.py speed --peer nanogpt=FOLDER` measures it on your machine.

Every row compares trainers that take whole optimizer steps with the same shapes, precision, threads and tokens. They
run in turn, {record["rounds"]} turns each, so that all meet the same machine. A ratio is that of one turn to the turn
beside it; the table has its median and its range. The loops of the others are those of their own trainers; in bf16 they
compute under autocast. On a CPU this program keeps freed memory ([performance.md](performance.md)), which would help
the others too: "memory kept" is a peer with the same setting, and the first rows compare with these. Goals are set
against peers as they are. A ratio whose range holds 1 reads "no difference". Weak scaling compares tokens per second
and rank; "apart" are as many processes at once that send each other nothing, and no strategy can do better. `4 x 256`
is a model of 4 blocks of width 256, T the tokens of a sequence, B the sequences of a step.

Machine: {machine_words(hardware)}; {hardware["device"]}. {software}.
Checkouts: {peers}. Commit `{record["git_commit"]}`, {record["timestamp_utc"]}.{_missing(record)}"""
    sections = [
        ("Tokens per second", _speed_table(record)),
        ("Distance to the machine's limit", _limit_table(record)),
        ("Around the steps", _other_table(record)),
    ]
    return "\n".join([head, *(f"\n## {title}\n\n{text}" for title, text in sections if text), ""])


def summary_lines(record: Record) -> list[str]:
    """One line for each result, for a console, and what could not be measured."""
    return [*(verdict(result) for result in record["results"]), *filter(None, _missing(record).splitlines())]


def _missing(record: Record) -> str:
    """Rows without a peer whose checkout was not given; empty if all were, and for records that do not say it."""
    return "".join(
        f"\n\nWithout a checkout of {peer} (`--peer {peer}=FOLDER`) it is missing in: {'; '.join(titles)}."
        for peer, titles in record.get("missing", {}).items()
    )


def reached(result: Result) -> bool | None:
    """Whether a result is on the right side of its target; None if it has none."""
    if "failed" in result:
        return False
    if "ratio" in result:
        first = result["entries"][0]
        waits = first["kind"] == OURS and first["synchronisations"]  # DeepSpeed's engine reads from the GPU in a step
        return bool(result["ratio"]["median"] >= result["target"]) and not waits
    if "target" not in result:
        return None
    figure = _figure(result)
    return figure is not None and bool(figure <= result["target"])


def verdict(result: Result) -> str:
    """A result in one line."""
    title = result["title"]
    if "failed" in result:
        return f"{title}: FAILED: {result['failed']}"
    if "ratio" in result:
        return f"{title}: {_ratio(result)} (goal {result['target']:.2f}){_mark(result)}"
    if "products_sec" in result:
        return f"{title}: {result['products_sec']:.3f} s of matrix products in a step"
    return f"{title}: {_shown(result)}{_mark(result)}"


def _mark(result: Result) -> str:
    return "" if reached(result) else ", NOT REACHED"


def _figure(result: Result) -> float | None:
    """What is compared with the target; None where a loss was never reached."""
    if "seconds" in result:
        return float(result["seconds"]["median"])
    share = result["share"]
    return share if share is None or isinstance(share, float) else float(share["median"])


def _shown(result: Result) -> str:
    if "seconds" in result:
        return f"{_span(result['seconds'], '.2f')} s (goal at most {result['target']:.1f} s)"
    if "peak_bytes" in result:
        peaks = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in result["peak_bytes"].items())
        return f"{result['share']:.2f} of {result['other']} ({peaks}; goal at most {result['target']:.2f})"
    if "curves" in result:
        ends = ", ".join(f"{name} ends at {losses[0]:.3f}" for name, losses in result["losses"].items())
        share = "never" if result["share"] is None else f"{_span(result['share'], '.2f')} of its time"
        return f"{share} ({ends}; goal at most {result['target']:.2f})"
    return f"{_span(result['share'], '.2%')} (goal at most {result['target']:.0%})"


def _ratio(result: Result, *, key: str = "ratio", other: str = "best_other") -> str:
    return f"{_span(result[key], '.2f')}x {result[other]}{judged(result[key])}"


def _span(figures: Mapping[str, Any], form: str) -> str:
    """``1.20 (1.18 to 1.23)``."""
    median, smallest, largest = (format(figures[key], form) for key in ("median", "smallest", "largest"))
    return f"{median} ({smallest} to {largest})"


def _speed_table(record: Record) -> str:
    compared = [result for result in record["results"] if "ratio" in result]
    rows = []
    for result in compared:
        if "ratio_with_memory_kept" in result:
            ratio = _ratio(result, key="ratio_with_memory_kept", other="best_with_memory_kept")
            rows.append([f"{result['title']}, equal memory settings", _speeds(result, kept=True), ratio, "", ""])
    for result in compared:
        goal = f"{result['target']:.2f}{'' if reached(result) else ', **not reached**'}"
        rows.append([result["title"], _speeds(result, kept=False), _ratio(result), goal, _beside(result)])
    return table(["work", "tokens/s", "ratio", "goal", "beside it"], rows) if rows else ""


def _speeds(result: Result, *, kept: bool) -> str:
    """Of the first contender, and of those with this setting of the memory."""
    ours, *others = result["entries"]
    shown = [ours, *(entry for entry in others if entry["name"].endswith(KEPT) == kept)]
    return "; ".join(f"{entry['name']} {_span(entry['tokens_per_sec'], ',.0f')}" for entry in shown)


def _beside(result: Result) -> str:
    """The ratio of ranks that send nothing; on GPUs, how often a turn waited."""
    if "limit" in result:
        return f"{_span(result['limit'], '.2f')}x without communication{judged(result['limit'])}"
    waits = result["entries"][0]["synchronisations"]
    return "" if waits is None else f"{waits} synchronisations in a turn"


def _limit_table(record: Record) -> str:
    """The share of each step that its matrix products alone would take, at the speed that each has alone."""
    ceilings = {str(result["work"]): result for result in record["results"] if "products_sec" in result}
    rows = []
    for result in record["results"]:
        ceiling = ceilings.get(str({**result.get("work", {}), "compile": False}))
        if "ratio" not in result or ceiling is None:
            continue
        ours = result["entries"][0]
        step = result["work"]["batch"] * result["work"]["shape"]["length"] / ours["tokens_per_sec"]["median"]
        flops = result["flops_per_token"] * ours["tokens_per_sec"]["median"]
        rows.append(
            [
                result["title"],
                ours["name"],
                f"{step:.3f}",
                f"{ceiling['products_sec']:.3f}",
                f"{ceiling['products_sec'] / step:.0%}",
                f"{flops / 1e9:,.0f}",
            ]
        )
    header = ["work", "trainer", "step, s", "its matrix products alone, s", "share", "GFLOP/s"]
    return table(header, rows) if rows else ""


def _other_table(record: Record) -> str:
    others = [result for result in record["results"] if {"target", "failed"} & set(result) and "ratio" not in result]
    rows = [
        [result["title"], result.get("failed") or _shown(result), "yes" if reached(result) else "**no**"]
        for result in others
    ]
    return table(["what", "measured", "reached"], rows) if rows else ""
