"""Makes ``docs/resume.md`` from a record of the suite. Every figure on the page comes from the record."""

from typing import Any

from dsgpt.benchmarks.harness.cells import counted
from dsgpt.benchmarks.harness.pages import Record, table
from dsgpt.common.measured import machine_words

STATUS_WORDS = {"passed": "yes", "failed": "**NO**", "refused": "refused", "error": "**ERROR**"}


def resume_page(record: Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.resume.command`` makes it.
        source: the record's path, for the reader.
    """
    parts = [_head(record, source), _pairs(record), _rewritten(record), _troubles(record)]
    return "\n\n".join(part for part in parts if part) + "\n"


def summary_lines(record: Record) -> list[str]:
    """The table of pairs, for a console."""
    return _pairs(record).removeprefix("## ").splitlines()


def _head(record: Record, source: str) -> str:
    hardware, env, work = record["hardware"], record["env"], record["work"]
    pairs, rewritten = record["pairs"], record["rewritten"]
    return f"""# Any strategy resumes the run of any other

Generated from `{source}` by
`.venv/bin/python src/benchmark.py resume --table-from {source} --page docs/resume.md`;
`.venv/bin/python src/benchmark.py resume` runs it on your machine.

* **{_passed(pairs)} of {len(pairs)} pairs**, drawn with seed {record["seed"]}: one strategy trains
  {work["saved"]} steps and saves, another one resumes with `--resume` for {work["steps"] - work["saved"]} more, on
  other ranks and with other accumulation. Every loss is compared with that of an undisturbed baseline; allowed are
  {record["bound"]:g}, at every step and {_validations(work)}.
* **{_passed(rewritten)} of {len(rewritten)} rewritings**: every strategy loads the same checkpoint and writes it
  again. The two checkpoints must be equal, byte for byte, and the ranks must compute with the checkpoint's weights,
  rounded to the precision. Validation loss of the loaded weights, against the baseline's:
  {_rewritten_validation(record)}.

Machine: {machine_words(hardware)}; {hardware["device"]}. Python {env["python_version"]},
torch {env["torch_version"]}, DeepSpeed {env["deepspeed_version"]}. Commit `{record["git_commit"]}`,
{record["timestamp_utc"]}. It took {record["seconds"] / 60:.0f} minutes. Work: {work["global_batch_size"]} sequences of
{work["seq_len"]} tokens per step, {work["model"]["num_layers"]} layers of width
{work["model"]["embedding_size"]}, fp32, AdamW, dropout 0; the loss falls from
{record["reference"]["first_loss"]:.3f} to
{record["reference"]["last_loss"]:.3f}."""


def _validations(work: dict[str, Any]) -> str:
    if "validated_every" not in work:
        return "in the last validation"
    return (
        f"in the validations after steps {work['saved']} (before the target's first step) to {work['steps']}, every "
        f"{work['validated_every']},\n  of {work['validation_windows']} sequences, which leave the last batch padded"
    )


def _rewritten_validation(record: Record) -> str:
    """The largest difference by precision; records before version 1.1 have none."""
    parts = []
    for precision, bound in record.get("rewritten_bounds", {}).items():
        found = [one["measured"] for one in record["rewritten"] if one["precision"] == precision]
        off = [measured["validation loss"] for measured in found if "validation loss" in measured]
        if off:
            parts.append(f"off by at most {max(off):.1e} in {precision} (allowed {bound:g})")
    return ", ".join(parts) or "not measured"


def _passed(results: list[dict[str, Any]]) -> int:
    return sum(result["status"] == "passed" for result in results)


def _pairs(record: Record) -> str:
    header = ["from", "to", "largest loss difference", "validation loss", "weights, relative", "equal"]
    rows = [
        [
            f"{pair['source']}{_steps(pair['source_accumulation'])}",
            f"{pair['target']}{_steps(pair['target_accumulation'])}",
            *(_figure(pair["measured"].get(fact)) for fact in ("loss", "validation loss", "weights")),
            STATUS_WORDS[pair["status"]],
        ]
        for pair in record["pairs"]
    ]
    return f"## Pairs\n\n{table(header, rows)}"


def _steps(accumulation: int) -> str:
    return f", accumulation {accumulation}" if accumulation > 1 else ""


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _rewritten(record: Record) -> str:
    groups: dict[str, dict[tuple[int, str], str]] = {}
    for one in record["rewritten"]:
        groups.setdefault(one["strategy"], {})[one["ranks"], one["precision"]] = STATUS_WORDS[one["status"]]
    places = sorted(
        {place for found in groups.values() for place in found}, key=lambda place: (place[1] != "fp32", place)
    )
    header = ["strategy", *(f"{counted(ranks, 'rank')}, {precision}" for ranks, precision in places)]
    rows = [[strategy, *(found.get(place, "") for place in places)] for strategy, found in groups.items()]
    return f"## Rewritings\n\n{table(header, rows)}"


def _troubles(record: Record) -> str:
    bad = [one for one in [*record["pairs"], *record["rewritten"]] if one["status"] != "passed"]
    lines = [f"* {one['name']}: {STATUS_WORDS[one['status']]}: {one['message']}" for one in bad]
    return "## Not passed\n\n" + "\n".join(lines) if lines else ""
