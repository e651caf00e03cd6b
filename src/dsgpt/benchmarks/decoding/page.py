"""Makes ``docs/decoding.md`` from a record of the suite. Every figure on the page comes from the record."""

from collections.abc import Mapping
from typing import Any

from dsgpt.benchmarks.decoding.work import HUGGING_FACE, OURS
from dsgpt.benchmarks.harness.pages import Record, judged, table
from dsgpt.common.measured import machine_words

Result = Mapping[str, Any]


def decoding_page(record: Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.decoding.command`` makes it.
        source: the record's path, for the reader.
    """
    hardware, env, work = record["hardware"], record["env"], record["results"][0]["work"]
    head = f"""# How fast a model generates

Generated from `{source}` by
`.venv/bin/python src/benchmark.py decoding --table-from {source} --page docs/decoding.md`;
`.venv/bin/python src/benchmark.py decoding` measures it on your machine.

Every contender continues the same {work["prompt_tokens"]}-token prompts by {work["new_tokens"]} tokens, greedily, in
one process with all cores. They run in turn, {record["rounds"]} turns each after a warm-up, so that all meet the same
machine. A ratio is that of one turn to the turn beside it; the table has its median and its range, and "no
difference" where the range holds 1. Times include reading the prompts.

A token needs every weight once. The floor is the time that this machine takes to read as many bytes, measured in every
round by PyTorch's product of a matrix and a vector. The share is the floor divided by the time of a token of ours.
{_huge_pages(record)}

int8 rows compare our weights in 8 bits with the peers' in bf16.

Machine: {machine_words(hardware)}; {hardware["device"]}.
torch {env["torch_version"]}, transformers {env["transformers_version"]}.
Commit `{record["git_commit"]}`, {record["timestamp_utc"]}."""
    return "\n".join(
        [
            head,
            f"\n## Seconds of {work['new_tokens']} tokens\n\n{_speed_table(record)}",
            f"\n## Distance to the memory's floor\n\n{_floor_table(record)}",
            *_losses(record),
            "",
        ]
    )


def _huge_pages(record: Record) -> str:
    setting = record.get("huge_pages")
    if record["hardware"]["device"] != "cpu" or setting not in ("always", "madvise"):
        return "Nothing here asks for huge pages, or the system gives none."
    return (
        "The floor's matrix, and those of our weights that are copied in PyTorch's layout (fp32 with one text, int8),\n"
        f"lie in huge pages, which this system gives by its setting `{setting}`. The peers' weights lie where PyTorch\n"
        "puts them."
    )


def _losses(record: Record) -> list[str]:
    """The section about rounded weights, if they were measured."""
    losses = record["losses"]
    if losses is None:
        return []
    weights = losses["weights"]
    rows = [
        [
            name,
            f"{each['loss']:.5f}",
            f"{each['perplexity']:.3f}",
            f"{each['perplexity'] / weights['fp32']['perplexity'] - 1:+.3%}",
        ]
        for name, each in weights.items()
    ]
    text = (
        f"The model of `{losses['checkpoint']}` predicts the {losses['tokens']:,} tokens of its validation file. In "
        "int8 the weights of layers and head are rounded, and the arithmetic is bf16."
    )
    header = ["weights", "loss, nats per token", "perplexity", "against fp32"]
    return [f"\n## What rounded weights lose\n\n{text}\n\n{table(header, rows)}"]


def summary_lines(record: Record) -> list[str]:
    """One line for each result, for a console."""
    return [verdict(result) for result in record["results"]]


def missed(result: Result) -> list[str]:
    """The goals that a result did not reach, and other ids than those of transformers in fp32."""
    found = []
    if result["ratio_goal"] and result["ratios"][HUGGING_FACE]["median"] < result["ratio_goal"]:
        found.append(f"{result['title']}: slower than {result['ratio_goal']:.1f} times as fast as {HUGGING_FACE}")
    if result["share_goal"] and result["share"]["median"] < result["share_goal"]:
        found.append(f"{result['title']}: farther from the memory's floor than {result['share_goal']:.0%}")
    if result["work"]["precision"] == "fp32" and not result["same_ids"]:
        found.append(f"{result['title']}: other ids than {HUGGING_FACE}")
    return found


def verdict(result: Result) -> str:
    """A result in one line."""
    ratios = ", ".join(f"{_span(ratio, '.2f')}x {name}{judged(ratio)}" for name, ratio in result["ratios"].items())
    mark = ", NOT REACHED" if missed(result) else ""
    return f"{result['title']}: {ratios}; {_span(result['share'], '.0%')} of the memory's floor{mark}"


def _speed_table(record: Record) -> str:
    rows = []
    for result in record["results"]:
        times = "; ".join(f"{name} {_span(seconds, '.2f')}" for name, seconds in result["seconds"].items())
        ratios = "; ".join(f"{_span(ratio, '.2f')}x {name}{judged(ratio)}" for name, ratio in result["ratios"].items())
        tokens = result["work"]["batch_size"] * result["work"]["new_tokens"]
        speed = tokens / result["seconds"][OURS]["median"]
        goal = _goal(result["ratio_goal"], ".2f", result["ratios"][HUGGING_FACE]["median"])
        rows.append([result["title"], times, ratios, goal, f"{speed:,.0f}", "yes" if result["same_ids"] else "no"])
    return table(["work", "seconds", "ratio", "goal", "our tokens/s", "same ids"], rows)


def _floor_table(record: Record) -> str:
    rows = []
    for result in record["results"]:
        floor = result["floor_sec"]["median"]
        rows.append(
            [
                result["title"],
                f"{result['bytes_per_token'] / 1e6:,.0f}",
                f"{result['bytes_per_token'] / floor / 1e9:.1f}",
                f"{floor * 1e3:.1f}",
                _span(result["token_sec"], ".1f", scale=1e3),
                _span(result["share"], ".0%"),
                _goal(result["share_goal"], ".0%", result["share"]["median"]),
            ]
        )
    return table(["work", "MB per token", "GB/s", "floor, ms", "token, ms", "share", "goal"], rows)


def _goal(goal: float | None, form: str, reached: float) -> str:
    """``1.30``, and whether it was missed; a row of 8 bits has no goal."""
    if goal is None:
        return "none"
    return f"{goal:{form}}{'' if reached >= goal else ', **not reached**'}"


def _span(figures: Mapping[str, Any], form: str, *, scale: float = 1.0) -> str:
    """``1.20 (1.18 to 1.23)``."""
    median, smallest, largest = (format(figures[key] * scale, form) for key in ("median", "smallest", "largest"))
    return f"{median} ({smallest} to {largest})"
