"""Makes ``docs/recipe-search.md`` from a record of the suite. Every figure on the page comes from the record."""

from collections.abc import Sequence
from typing import Any

from dsgpt.benchmarks.harness.pages import Record, table
from dsgpt.common.measured import machine_words

_SETTINGS = ("batch", "lr", "warm_up", "beta2", "floor", "weight_decay")


def recipes_page(record: Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.recipes.command`` makes it.
        source: the record's path, for the reader.
    """
    hardware = record["hardware"]
    head = f"""# The search behind the recipes of small models

Generated from `{source}` by
`.venv/bin/python src/benchmark.py recipes --table-from {source} --page docs/recipe-search.md`;
`.venv/bin/python src/benchmark.py recipes` repeats it.

The field's published settings are for models of 100 million parameters and more, and for batches of half a million
tokens. A model of two million parameters that sees less than a million tokens learns more with small batches and a
higher rate. Every training here sees the same number of tokens of the demo's text, whatever its batch. The choice is
made on seed {record["trials"][0]["seed"]}: the best of those whose doubled rate is no worse, so that it is not the
last rate before training becomes unstable; then single changes of it, if any. Three other
seeds, which change the initial weights and the order of the text, show what the choice is worth.

Machine: {machine_words(hardware)}; {hardware["device"]}. Commit `{record["git_commit"]}`, {record["timestamp_utc"]}."""
    return "\n".join([head, *(_section(size, record) for size in record["searches"]), ""])


def _section(size: str, record: Record) -> str:
    work, trials = record["searches"][size], [trial for trial in record["trials"] if trial["size"] == size]
    search = [trial for trial in trials if trial["stage"] in {"grid", "change"}]
    seeds, before = ([trial for trial in trials if trial["stage"] == stage] for stage in ("seed", "before"))
    best = _chosen(search, seeds)
    text = f"""
## `{size}`, {work["tokens"]:,} tokens in sequences of {work["length"]}

{_table(search, best)}

The first row is what `ds_configs/zero1.json` does in 200 steps. The bold one was chosen."""
    return f"{text} On other seeds it ends at {_losses(seeds)}; the first row ends at {_losses(before)}."


def _losses(trials: Sequence[dict[str, Any]]) -> str:
    return ", ".join(f"{trial['val_loss']:.4f} (seed {trial['seed']})" for trial in trials)


def _chosen(search: Sequence[dict[str, Any]], seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The training whose settings were repeated on other seeds."""
    return next(trial for trial in search if all(trial[key] == seeds[0][key] for key in _SETTINGS))


def _table(trials: Sequence[dict[str, Any]], best: dict[str, Any]) -> str:
    rows = []
    for trial in trials:
        loss = f"{trial['val_loss']:.4f}"
        cells = [f"{trial[key]:g}" for key in _SETTINGS]
        rows.append([*cells, trial["steps"], f"**{loss}**" if trial is best else loss])
    header = ["batch", "lr", "warm-up", "beta2", "last rate", "decay", "steps", "validation loss"]
    return table(header, rows)


def summary_lines(record: Record) -> list[str]:
    """The best of each size, for a console."""
    lines = []
    for size in record["searches"]:
        trials = [trial for trial in record["trials"] if trial["size"] == size]
        best = _chosen(trials, [trial for trial in trials if trial["stage"] == "seed"])
        settings = ", ".join(f"{key} {best[key]:g}" for key in _SETTINGS)
        lines.append(f"{size}: validation loss {best['val_loss']:.4f} with {settings}")
    return lines
