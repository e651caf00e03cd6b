"""What a run computed, fact by fact: what two runs must agree in to have done the same work."""

from typing import Any

from dsgpt.config.same_work import TRAINING_FACTS, WORK_FACTS
from dsgpt.reports.fields import Fields
from dsgpt.reports.segments import over_time, quantized, read_segments, resumed_untold

RANDOM = "random"
"""The initial weights of a run without ``--init_from``: by its seed, which is a fact of its own."""
UNCHANGED: dict[str, Any] = {}
"""Nothing changed when the run was resumed, or it never was."""
EXECUTED_BY = "executed by"
"""The change of strategy or ranks, which does not change the training."""
ENDS_WITH_THE_RUN = ("WarmupDecayLR", "WarmupCosineLR")
"""Schedules that decay until the end of the run, where the recipe names no other step."""


def read_work(record: Fields, *, steps: float | None, tokens: float | None) -> dict[str, Any]:
    """Every fact of the work by its name; None where the record does not say.

    Args:
        record: of generation 2.1; one of the older generation holds no fact.
        steps: optimizer steps made.
        tokens: tokens trained on.
    """
    config, data = record.section("training_config"), record.section("data")
    model, seed = config.section("model"), config.whole("seed")
    facts = {
        "global batch": config.number("global_batch_size"),
        "sequence length": config.number("seq_len"),
        "train data": data.text("train_sha256"),
        "train tokens": data.number("train_tokens"),
        "validation data": data.text("val_sha256"),
        "validation tokens": data.number("val_tokens"),
        "validation windows": config.number("val_windows"),
        **{fact: model.number(fact.removeprefix("model ")) for fact in WORK_FACTS if fact.startswith("model ")},
        "optimizer steps": steps,
        "tokens": tokens,
        "precision": config.text("precision"),
        "initial weights": _initial_weights(config),
        "optimizer type": config.raw("optimizer"),
        "optimizer settings": _optimizer_settings(config),
        "learning rate": config.number("lr"),
        "scheduler": _scheduler(config),
        "gradient clipping": config.number("gradient_clipping"),
        "loss scaling": _loss_scaling(config),
        "quantized communication": _quantized(record),
        "seed": None if seed is None else str(seed),
        "changed at resume": _changes(record, config),
    }
    return {fact: facts[fact] for fact in (*WORK_FACTS, *TRAINING_FACTS)}


def _initial_weights(config: Fields) -> str | None:
    """``random``, or the sha256 of those that the run started from."""
    if not config.has("init_from"):
        return None
    return RANDOM if config.raw("init_from") is None else config.section("init_from").text("sha256")


def _optimizer_settings(config: Fields) -> Any:
    """What the optimizer was given beside its type and learning rate, which are facts of their own.

    Which implementation of the same formulas computed it (``torch_adam``) changes no training.
    """
    settings = config.raw("optimizer_params")
    if not isinstance(settings, dict):
        return settings
    return {key: value for key, value in settings.items() if key not in {"type", "lr", "torch_adam"}}


def _scheduler(config: Fields) -> Any:
    """The schedule, with the step at which its decay ends; without one in the recipe, that is the last of the run."""
    scheduler = config.raw("scheduler")
    if not (isinstance(scheduler, dict) and "total_num_steps" in scheduler and _ends_with_the_run(scheduler)):
        return scheduler
    return {**scheduler, "total_num_steps": config.number("total_steps")}


def _ends_with_the_run(scheduler: dict[str, Any]) -> bool:
    return scheduler.get("type") in ENDS_WITH_THE_RUN and scheduler.get("total_num_steps") is None


def _loss_scaling(config: Fields) -> Any:
    """How the loss was scaled; records that do not say it scaled none but in fp16."""
    if config.has("loss_scaling"):
        return config.raw("loss_scaling")
    return {"type": "none"} if config.text("precision") in {"fp32", "bf16"} else None


def _quantized(record: Fields) -> str | None:
    """What Zero++ rounded to 8 bits or less on its way: a run may go on with or without it."""
    if record.sections("segments"):
        segments = read_segments(record)
        found = [segment.quantized for segment in segments]
        return None if None in found else over_time(segments, found)
    if resumed_untold(record):
        return None
    given = record.section("deepspeed_config").raw("given")
    return quantized(record.section("training_config"), given if isinstance(given, dict) else None)


def _changes(record: Fields, config: Fields) -> Any:
    """What ``--allow_changed`` let change, by its name and step; who executes the run may change freely."""
    changes = record.raw("changed_at_resume")
    if not isinstance(changes, list):
        never_resumed = record.has("resumed_from") and record.raw("resumed_from") is None
        return UNCHANGED if never_resumed and changes is None else None
    scheduler = config.raw("scheduler")
    longer_is_the_same = isinstance(scheduler, dict) and not _ends_with_the_run(scheduler)
    found = {}
    for change in changes:
        if not isinstance(change, dict):
            return None
        name, step = str(change.get("name")), change.get("step")
        if name == EXECUTED_BY or (name == "total steps" and longer_is_the_same):
            continue
        found[f"{name} after step {step}"] = {key: _or_none(change.get(key)) for key in ("before", "after")}
    return found


def _or_none(value: Any) -> Any:
    """A null in a change stands for the absence of the thing, which is known."""
    return "none" if value is None else value
