"""``benchmark.py exam``: the planner's predictions beside steps that others measured, and the fit of its constants.

Nothing is trained: the rows are ``planner/measured.json``. BERT's, which are approximate, are neither scored nor fitted
to. A row is judged twice: with the constants of the package, and with those fitted without any row of its source.
"""

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

import numpy as np

from dsgpt.benchmarks.frame import Record, Suite, SuiteOptions, filled, page_of
from dsgpt.common.command_line import switch
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_atomic
from dsgpt.common.text import grouped, table
from dsgpt.planner import rows as measured
from dsgpt.planner.formulas import STEP, stream_bytes, worst_peak
from dsgpt.planner.rates import CONSTANTS, Machine, constants, fitted
from dsgpt.planner.rows import Witness
from dsgpt.planner.setup import Setup
from dsgpt.planner.step_time import likely_sec, predict_step

# The rows, and the fit.

Asked = tuple[dict[str, Any], measured.Row, Setup]
"""A measured row, what it says of its training, and that as a setup."""
Values = Mapping[str, float]
NOT_FITTED = ("link_share",)
"""Constants that others measured by themselves."""
_NOISY, _NOISE = "bigscience-v100", {True: 0.3, False: 0.03}
"""The rows whose operators state 40% of noise; relative errors below which the fit does not distinguish rows."""
_HOLD = 0.002
"""Weight of staying near the values so far: it decides where rows say nothing."""
_ROUNDS, _STEP, _FARTHEST = 8, 0.03, 0.3


def asked_rows() -> list[Asked]:
    """Rows that are scored, without those that ran out of memory and those that no strategy trains."""
    asked = []
    for row in measured.measured_rows():
        if row["ran"] and row["class"] != "bert":
            with contextlib.suppress(UserError):
                given = measured.read_row(row)
                asked.append((row, given, measured.setup_of(given)))
    return asked


def predicted(values: Values, asked: Sequence[Asked]) -> np.ndarray:
    """Predicted time / measured time of rows, with these values of the constants."""
    seconds = [likely_sec(setup, measured.machine_of(row, values)) for _, row, setup in asked]
    return np.array([one / raw["seconds_per_step"] for one, (raw, _, _) in zip(seconds, asked, strict=True)])


def score(ratios: np.ndarray) -> float:
    """The mean size of the logarithm of predicted time / measured time: 0.05 are 5%."""
    return float(np.mean(np.abs(np.log(ratios))))


def fit(values: Values, asked: Sequence[Asked]) -> dict[str, float]:
    """The values with which predictions are nearest to ``asked``.

    Gauss-Newton steps on the logarithms of the constants minimise the sum of sqrt(noise² + log² of predicted /
    measured), in which an outlier counts as its size, not as its square.
    """
    found, names = dict(values), [name for name in values if name not in NOT_FITTED]
    noisy = np.array([raw["source"] == _NOISY for raw, _, _ in asked])
    noise = np.where(noisy, _NOISE[True], _NOISE[False])
    for _ in range(_ROUNDS):
        off = np.log(predicted(found, asked))
        weight = np.sqrt(1 / np.sqrt(noise**2 + off**2) / np.where(noisy, 3, 1))
        slopes = [np.log(predicted(found | {name: found[name] * (1 + _STEP)}, asked)) - off for name in names]
        hold = np.eye(len(names)) * math.sqrt(_HOLD * len(asked))
        terms = np.vstack([np.array(slopes).T / math.log1p(_STEP) * weight[:, None], hold])
        change, *_ = np.linalg.lstsq(terms, np.concatenate([-off * weight, np.zeros(len(names))]), rcond=None)
        for name, by in zip(names, np.clip(change, -_FARTHEST, _FARTHEST).tolist(), strict=True):
            whole = name.split(".")[0].endswith(("share", "hidden", "contention"))
            found[name] = min(found[name] * math.exp(by), 1.0 if whole else math.inf)
        if np.max(np.abs(change)) < _STEP / 3:
            break
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def fit_constants() -> None:
    """Fit the constants to all rows, then without each source, and write both to ``constants.json``."""
    asked, known = asked_rows(), fitted()
    values = fit(constants(), asked)
    neutral = {each.name: each.neutral for each in known.constants if each.name not in NOT_FITTED}
    ratios = dict(zip((raw["id"] for raw, _, _ in asked), predicted(values, asked).tolist(), strict=True))
    left_out, without = dict[str, float](), list[Values]()
    for source in sorted({raw["source"] for raw, _, _ in asked}):
        own = [each for each in asked if each[0]["source"] == source]
        rest = [each for each in asked if each[0]["source"] != source]
        now = predicted(values, rest)  # what decides nothing in the rest is unknown there
        unknown = [
            name for name in neutral if np.array_equal(predicted({**values, name: values[name] * 0.9}, rest), now)
        ]
        others = fit({**values, **{name: neutral[name] for name in unknown}}, rest)
        without.append(others)
        left_out |= zip((raw["id"] for raw, _, _ in own), predicted(others, own).tolist(), strict=True)
    made = []
    for each in known.constants:
        least, most = (extreme(value[each.name] for value in without) for extreme in (min, max))
        fit_words = f"fitted to {len(asked)} rows; {least:.3g} to {most:.3g} without one source"
        source = each.source if each.name in NOT_FITTED else fit_words
        made.append(json.dumps(asdict(replace(each, value=values[each.name], source=source))))
    residuals = {name: (round(ratio, 4), round(left_out[name], 4)) for name, ratio in ratios.items()}
    known_rows = measured.witnesses_of(residuals)
    growth = next(step / 50 for step in range(50) if _held(known_rows, growth=step / 50)[1] >= measured.INSIDE)
    pairs = [f"{json.dumps(name)}: {json.dumps(pair)}" for name, pair in residuals.items()]
    head, tail = ",\n".join(made), ",\n".join(pairs)
    text = f'{{"constants": [\n{head}\n],\n"growth": {growth},\n"residuals": {{\n{tail}\n}}}}\n'
    write_atomic(CONSTANTS, text.encode())
    for cached in (fitted, constants, measured.witnesses):
        cached.cache_clear()


def _ranges(row: Witness, among: Sequence[Witness], **more: Any) -> tuple[measured.Evidence, ...]:
    """The range of a row from all others, and from those of other sources alone."""
    others = [each for each in among if each.id != row.id]
    apart = [each for each in others if each.source != row.source]
    return measured.evidence_for(row.traits, others, **more), measured.evidence_for(row.traits, apart, **more)


def _held(rows: Sequence[Witness], **more: Any) -> tuple[float, float]:
    """Shares of rows that are in their range: from all other rows, and from those of other sources alone."""
    pairs = [(row, _ranges(row, rows, **more)) for row in rows]
    inside = fmean(own.low <= 1 / row.ratio <= own.high for row, (own, _) in pairs)
    return inside, fmean(apart.low <= 1 / row.left_out <= apart.high for row, (_, apart) in pairs)


# The score, and the page.

Result = dict[str, Any]
LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9)
_GROUP = 3
"""Least setups of a group in which a choice is judged."""
_SPLIT = "tensor and pipeline"


BY: dict[str, Callable[[Result], Any]] = {
    "class": lambda row: row["class"],
    "class and GPU": lambda row: f"{row['class']}, {row['hardware'].split('-')[0]}",
    "source": lambda row: row["source"],
    "GPU": lambda row: row["hardware"],
    "split": lambda row: row["kind"],
    "nodes": lambda row: "one" if row["nodes"] == 1 else "2 to 8" if row["nodes"] <= 8 else "more than 8",
    "width": lambda row: (
        "below 2,048" if row["width"] < 2048 else "to 6,144" if row["width"] <= 6144 else "above 6,144"
    ),
    "micro batch": lambda row: "1" if row["micro_batch"] == 1 else "2 to 4" if row["micro_batch"] <= 4 else "above 4",
}
"""How rows are put together for the score."""


def scores(results: Sequence[Result], key: Callable[[Result], Any]) -> list[list[Any]]:
    """Lines of a table for each value of ``key``.

    Each has the number of rows; median, 90th percentile and worst of the error; the share in the range and its width.
    Then median, 90th percentile and share in the range of predictions that know nothing of the source.
    """
    lines = []
    ordered = sorted((row for row in results if row["ratio"]), key=lambda row: str(key(row)))
    for name, group in itertools.groupby(ordered, key):
        rows = list(group)
        errors, apart = (sorted(abs(row[what] - 1) for row in rows) for what in ("ratio", "left_out"))
        ninth = math.ceil(0.9 * len(rows)) - 1
        inside = fmean(row["low"] <= 1 <= row["high"] for row in rows)
        held = fmean(row["apart_low"] <= 1 <= row["apart_high"] for row in rows)
        width = median(row["high"] / row["low"] for row in rows)
        own = [name, len(rows), median(errors), errors[ninth], errors[-1], inside, width]
        lines.append([*own, median(apart), apart[ninth], held])
    return lines


def regrets(results: Sequence[Result]) -> list[dict[str, Any]]:
    """For each group of setups of equal work how much slower than the best the one is that is predicted to be it."""
    judged = []
    for name, rows in grouped((row["group"], row) for row in results if row["ratio"] and row["group"]).items():
        if len(rows) >= _GROUP:
            chosen = min(rows, key=lambda row: row["measured"] * row["ratio"])
            slower = chosen["measured"] / min(row["measured"] for row in rows) - 1
            judged.append({"group": name, "setups": len(rows), "chosen": chosen["id"], "regret": slower})
    return judged


def goals(record: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """What the planner is to reach, the most that was set as a goal, and what it reaches on these rows."""
    rows, fits = [row for row in record["rows"] if row["ratio"]], record["memory"]
    slower = [each["regret"] for each in record["regrets"]]

    def errors(chosen: Callable[[Result], bool]) -> list[float]:
        """The median and the 90th percentile."""
        ((_, _, *found),) = scores([row for row in rows if chosen(row)], lambda _: "")
        return found

    fast = errors(lambda row: row["class"] != "eager" and row["hardware"][:4] in {"a100", "h100"})
    return [
        ("`flash` and `megatron` on A100 and H100, median error", 0.05, fast[0]),
        ("the same, 90th percentile", 0.15, fast[1]),
        ("tensor and pipeline ranks, median error", 0.08, errors(lambda row: row["kind"] == _SPLIT)[0]),
        ("`eager`, median error", 0.2, errors(lambda row: row["class"] == "eager")[0]),
        ("V100, median error", 0.2, errors(lambda row: row["hardware"].startswith("v100"))[0]),
        ("rows outside their 80% range", 0.2, fmean(not row["low"] <= 1 <= row["high"] for row in rows)),
        ("median width of the ranges, above 1", 0.35, median(row["high"] / row["low"] for row in rows) - 1),
        ("worst choice, slower than the best", 0.1, max(slower)),
        ("choices that are more than 5% slower", 0.05, fmean(each > 0.05 for each in slower)),
        ("rows that ran, called too large", 0.02, fits["refused"] / fits["ran"]),
        ("rows that ran out of memory, called small enough", 2 / 19, fits["promised"] / fits["failed"]),
    ]


HEADER = ["rows", "median", "90th percentile", "worst", "in range", "width", "apart: median", "90th", "in range"]
FORMS = ("{}", "{}", "{:.1%}", "{:.1%}", "{:.1%}", "{:.0%}", "{:.2f}x", "{:.1%}", "{:.1%}", "{:.0%}")


def prices(setup: Setup, machine: Machine) -> Iterator[tuple[str, float, float]]:
    """What each thing that no strategy here does would save of a step, by the formulas.

    Yields:
        What it is, the share of the time and the share of the memory that it saves.
    """
    step, (_, peak) = predict_step(setup, machine), worst_peak(setup, device=machine.kind, among=STEP)
    tensor, stages = setup.sizes.tensor, setup.sizes.pipeline
    if stages > 1:  # with two parts of each stage the bubble is half as long (Narayanan et al. 2021, section 2.2)
        yield "interleaved pipelines", step.parts["bubble"] / 2 / step.seconds, 0.0
    if setup.activation_checkpointing:
        chosen = replace(setup, activation_checkpointing=False, selective=True)
        _, more = worst_peak(chosen, device=machine.kind, among=STEP)
        saved = 1 - likely_sec(chosen, machine) / step.seconds
        yield "selective recomputation, as torchtitan's", saved, 1 - more.total / peak.total
    if tensor > 1:  # Korthikanti et al. 2022, section 4.2: what tensor ranks hold whole is one stream a block, or more
        micro_batches = min(stages, setup.gradient_accumulation_steps)
        whole = setup.blocks(0) * micro_batches * stream_bytes(setup) * (1 if setup.activation_checkpointing else 4)
        yield "sequence-parallel activations", 0.0, whole * (1 - 1 / tensor) / peak.total


def exam_page(record: Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.exam`` makes it.
        source: the record's path, for the reader.
    """
    fits, scored = record["memory"], []
    for by, rows in record["scores"].items():
        lines = [[form.format(value) for form, value in zip(FORMS, row, strict=True)] for row in rows]
        scored.append(table([by, *HEADER], lines))
    forms = {"name": "`{}`", "value": "{:g}", "neutral": "{:g}", "unit": "{}", "source": "{}", "without": "{:.2%}"}
    made = [[form.format(each[name]) for name, form in forms.items()] for each in record["constants"]]
    held = [[f"{each[name]:.0%}" for name in ("stated", "inside", "apart")] for each in record["calibration"]]
    priced = [
        [each["what"], each["rows"], *(f"{each[name]:.1%}" for name in ("time", "most", "memory"))]
        for each in record["prices"]
    ]
    chosen = [
        [f"`{each['group'].replace('|', ' ')}`", each["setups"], each["chosen"], f"{each['regret']:.1%}"]
        for each in sorted(record["regrets"], key=lambda each: -each["regret"])
    ]
    reached = [[what, f"{most:.0%}", f"{has:.1%}", "yes" if has <= most else "no"] for what, most, has in goals(record)]
    called = [["ran", fits["ran"], fits["refused"]], ["ran out of memory", fits["failed"], fits["promised"]]]
    saving = ["what no strategy here does", "rows that it is for", "of the time, median", "most"]
    text = filled(
        "exam",
        record,
        record_at=source,
        count=len(record["rows"]),
        scores="\n\n".join(scored),
        goals=table(["", "goal, at most", "reached", "met"], reached),
        constants=table(["constant", "value", "before", "unit", "source", "score without"], made),
        reach=measured.REACH,
        calibration=table(["stated", "inside", "inside, apart"], held),
        prices=table([*saving, "of the memory, median"], priced),
        regrets=table(["group", "setups", "chosen", "slower than the best"], chosen),
        memory=table(["", "rows", "of these called wrong"], called),
        whole=fits["refused_whole"] - fits["refused"],
    )
    return page_of(text)


def summary_lines(record: Record) -> list[str]:
    """The score of each class, for a console."""
    return [
        f"{name}: {rows} rows, median error {middle:.1%}, 90th percentile {ninth:.1%}; apart {apart:.1%}, {far:.1%}"
        for name, rows, middle, ninth, _, _, _, apart, far, _ in record["scores"]["class"]
    ]


@dataclass(frozen=True, kw_only=True)
class ExamOptions(SuiteOptions):
    """The command line."""

    fit: bool = switch("first fit the constants to the rows, and write src/dsgpt/planner/constants.json; two minutes")


class Exam(Suite[ExamOptions, Result]):
    """Predicts every row, and scores.

    exam: predict training steps that others measured, and score the planner; --fit fits its constants to them. Nothing
    is trained. Exit code 0: every row is answered.

    Examples:
      .venv/bin/python src/benchmark.py exam
      .venv/bin/python src/benchmark.py exam --fit
    """

    name, record_of, unit = "exam", "exam", "row"
    flags, page, summary = ExamOptions, staticmethod(exam_page), staticmethod(summary_lines)

    def plan(self) -> int:
        return sum(row["class"] != "bert" for row in measured.measured_rows())

    def begin(self) -> None:
        if self.options.fit:
            fit_constants()

    def results(self) -> Iterator[Result]:
        among = {each.id: each for each in measured.witnesses()}
        for raw in (row for row in measured.measured_rows() if row["class"] != "bert"):
            kept = ("id", "source", "class", "hardware", "ran", "micro_batch", "citation")
            result: Result = {name: raw[name] for name in kept}
            stage, sharded = raw.get("zero_stage"), (raw.get("sharding") or "").isupper()
            kind = "FSDP" if sharded else f"ZeRO-{stage}" if stage else "data"
            result["kind"] = _SPLIT if raw["tp"] * raw["pp"] > 1 else kind
            result |= {"nodes": -(-raw["gpus"] // raw["gpus_per_node"]), "width": raw["n_embd"]}
            result |= {"group": raw.get("group"), "measured": raw.get("seconds_per_step"), "ratio": None, "error": None}
            try:
                row = measured.read_row(raw)
                setup, machine = measured.setup_of(row), measured.machine_of(row)
            except UserError as error:
                yield result | {"error": "; ".join(error.problems)}
                continue
            peak, fits = measured.memory_of(setup, machine)
            result |= {"prices": list(prices(setup, machine)) if raw["ran"] else [], "peak_bytes": peak, "fits": fits}
            result["fits_whole"] = measured.memory_of(replace(setup, accumulation="whole"), machine)[1]
            if row.id in among:
                own, apart = _ranges(among[row.id], list(among.values()))
                ratio, left = likely_sec(setup, machine) / raw["seconds_per_step"], among[row.id].left_out
                result |= {"ratio": ratio, "left_out": left, "near": own.near}
                result |= {"low": ratio * own.low, "high": ratio * own.high}
                result |= {"apart_low": left * apart.low, "apart_high": left * apart.high}
            yield result

    def line(self, result: Result, *, count: str, left: str) -> str:
        if not result["ratio"]:
            return f"{count} {result['id']}: {result['error'] or 'ran out of memory'}{left}"
        return f"{count} {result['id']}: predicted / measured {result['ratio']:.3f}{left}"

    def record(self, results: Sequence[Result]) -> Record:
        asked, values, rows = asked_rows(), dict(constants()), measured.witnesses()
        made = [
            asdict(each) | {"without": score(predicted(values | {each.name: each.neutral}, asked))}
            for each in fitted().constants
        ]
        ran, failed = ([row for row in results if row["ran"] is which and not row["error"]] for which in (True, False))
        memory = {"ran": len(ran), "refused": sum(not row["fits"] for row in ran), "failed": len(failed)}
        memory["refused_whole"] = sum(not row["fits_whole"] for row in ran)
        memory["promised"] = sum(row["fits"] for row in failed)
        held = [(level, *_held(rows, inside=level)) for level in LEVELS]
        saved, priced = [each for row in ran for each in row["prices"]], []
        for what in dict.fromkeys(what for what, _, _ in saved):
            times, memories = zip(*(shares for name, *shares in saved if name == what), strict=True)
            shares = {"time": median(times), "most": max(times), "memory": median(memories)}
            priced.append({"what": what, "rows": len(times), **shares})
        return {
            "rows": list(results),
            "prices": sorted(priced, key=lambda each: (-each["time"], -each["memory"])),
            "scores": {by: scores(results, key) for by, key in BY.items()},
            "score": score(predicted(values, asked)),
            "constants": made,
            "growth": fitted().growth,
            "calibration": [{"stated": level, "inside": own, "apart": apart} for level, own, apart in held],
            "regrets": regrets(results),
            "memory": memory,
        }
