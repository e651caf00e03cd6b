"""Makes ``docs/saving.md`` from a record of the suite. Every figure on the page comes from the record."""

from dsgpt.benchmarks.harness.pages import Record
from dsgpt.common.measured import machine_words


def saving_page(record: Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.saving.command`` makes it.
        source: the record's path, for the reader.
    """
    hardware, work = record["hardware"], record["work"]
    size = record["figures"]["sync"]["bytes"]["median"] / 1e6
    head = f"""# How long training waits for a checkpoint

Generated from `{source}` by
`.venv/bin/python src/benchmark.py saving --table-from {source} --page docs/saving.md`;
`.venv/bin/python src/benchmark.py saving` measures it on your machine.

The model `{work["model_size"]}` with {record["parameters"]:,} parameters, whose checkpoint has {size:,.0f} MB, is
trained {record["rounds"]} times with `--save_mode sync` and {record["rounds"]} times with `async`, in turn;
{_counted(record)} saves of each run count. With async, training waits **{record["ratio"]:.0%}** of the time that it
waits with sync (medians; the goal is at most {record["ratio_bound"]:.0%}). An async save uses a core while training
continues. If no core is free, the last column shows that.

Machine: {machine_words(hardware)}; {hardware["device"]}. Commit `{record["git_commit"]}`, {record["timestamp_utc"]}."""
    return "\n".join([head, "", "## Figures", "", *summary_lines(record), ""])


def summary_lines(record: Record) -> list[str]:
    """The table of both modes, for a console."""
    lines = [
        "| save mode | training waits, median (range) | until published, median (range) | a run's steps and saves |",
        "|---|---|---|---|",
    ]
    for mode, figures in record["figures"].items():
        cells = [_span(figures[key]) for key in ("save_stall_sec", "save_total_sec", "training_sec")]
        lines.append(f"| {' | '.join([mode, *cells])} |")
    return lines


def _counted(record: Record) -> int:
    return max(len(run["saves"]) for run in record["runs"])


def _span(figures: dict[str, float]) -> str:
    return f"{figures['median']:.3f} s ({figures['smallest']:.3f} to {figures['largest']:.3f})"
