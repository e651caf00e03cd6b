"""The facts of a run's work: two runs did the same work if all of them agree."""

from typing import Any

from dsgpt.config.same_work import TRAINING_FACTS, WORK_FACTS
from dsgpt.reports.fields import Fields
from dsgpt.reports.segments import only_last_process_recorded, over_time, quantized, read_segments

RANDOM = "random"
"""The initial weights of a run without ``--init_from``: they depend on the seed, which is a separate fact."""
UNCHANGED: dict[str, Any] = {}
"""Nothing changed when the run was resumed, or it was never resumed."""
EXECUTED_BY = "executed by"
"""Name of a change of strategy or ranks, which does not change the training."""
ENDS_WITH_THE_RUN = ("WarmupDecayLR", "WarmupCosineLR")
"""Schedules that decay until the end of the run, unless the recipe names another step."""


def read_work(record: Fields, *, steps: float | None, tokens: float | None) -> dict[str, Any]:
    """Every fact of the work by name; None if the record does not say.

    Args:
        record: of schema 2.1; records of the older generation contain no fact.
        steps: optimizer steps made.
        tokens: tokens trained on.
    """
    config, data = record.section("training_config"), record.section("data")
    model, seed = config.section("model"), config.whole("seed")
    facts = {
        "global batch": config.number("global_batch_size"),
        "sequence length": config.number("seq_len"),
        "train data": data.text("train_sha256"),
        "tokens in the train file": data.number("train_tokens"),
        "validation data": data.text("val_sha256"),
        "tokens in the validation file": data.number("val_tokens"),
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
    """``random``, or the sha256 of the weights that the run started from."""
    if not config.has("init_from"):
        return None
    return RANDOM if config.raw("init_from") is None else config.section("init_from").text("sha256")


def _optimizer_settings(config: Fields) -> Any:
    """The optimizer's settings without type and learning rate, which are separate facts.

    ``torch_adam`` is left out: it selects an implementation of the same formulas.
    """
    settings = config.raw("optimizer_params")
    if not isinstance(settings, dict):
        return settings
    return {key: value for key, value in settings.items() if key not in {"type", "lr", "torch_adam"}}


def _scheduler(config: Fields) -> Any:
    """The schedule, with the step at which its decay ends: by default the last step of the run."""
    scheduler = config.raw("scheduler")
    if not (isinstance(scheduler, dict) and "total_num_steps" in scheduler and _ends_with_the_run(scheduler)):
        return scheduler
    return {**scheduler, "total_num_steps": config.number("total_steps")}


def _ends_with_the_run(scheduler: dict[str, Any]) -> bool:
    return scheduler.get("type") in ENDS_WITH_THE_RUN and scheduler.get("total_num_steps") is None


def _loss_scaling(config: Fields) -> Any:
    """How the loss was scaled. Versions that did not record it scaled only in fp16."""
    if config.has("loss_scaling"):
        return config.raw("loss_scaling")
    return {"type": "none"} if config.text("precision") in {"fp32", "bf16"} else None


def _quantized(record: Fields) -> str | None:
    """What Zero++ quantized for communication, which may change at a resume."""
    if record.sections("segments"):
        segments = read_segments(record)
        found = [segment.quantized for segment in segments]
        return None if None in found else over_time(segments, found)
    if only_last_process_recorded(record):
        return None
    given = record.section("deepspeed_config").raw("given")
    return quantized(record.section("training_config"), given if isinstance(given, dict) else None)


def _changes(record: Fields, config: Fields) -> Any:
    """What changed with ``--allow_changed``, by name and step, without changes of strategy or ranks."""
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
    """``none`` for null: in a change, null means that the setting was absent, not that it is unknown."""
    return "none" if value is None else value
