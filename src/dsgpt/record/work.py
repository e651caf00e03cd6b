"""The segments of a run, and the facts of its work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

from dsgpt.common.text import busy_words, counted, hardware_words
from dsgpt.config.options import TRAINING_FACTS, WORK_FACTS
from dsgpt.record.schema import Fields

HARDWARE, DEVICES, STRATEGY, INSTRUCTIONS = "hardware", "devices", "strategy", "instruction sets"
# The segments of a run: which steps each of its processes executed, and how they differ.

NOTED = ("host", "launcher", "code", INSTRUCTIONS)
"""Entries of ``setup`` that may differ between segments whose times are compared; mentioned in the notes."""
VERSIONS = {"python": "Python", "torch": "PyTorch", "deepspeed": "DeepSpeed", "cuda": "CUDA"}
FIGURES = ("train_time_sec", "mean_tokens_per_sec_global", "max_cuda_mem_allocated_bytes_rank0", "peak_rss_bytes_rank0")
"""Keys of a segment."""


@dataclass(frozen=True)
class Worked:
    """The work of a run or of a turn, or that which is planned, as ``equal_work.judge`` takes it."""

    name: str
    """Name for messages."""
    work: Mapping[str, Any]
    """Values of the facts of ``dsgpt.config.options``, by fact."""
    resumed: bool = False
    """Whether the record names a checkpoint from which the run was resumed."""
    weights: str | None = None
    """Hash of its weights at the end; None if it did not train with ``--exact``."""


@dataclass(frozen=True)
class Segment:
    """The steps that one process executed."""

    first_step: int
    last_step: int | None
    """The last step; None if the record does not say."""
    setup: Mapping[str, str | None] = field(default_factory=dict)
    """Strategy, devices and machine that executed them, by name; empty if nothing was recorded."""
    figures: Mapping[str, float | None] = field(default_factory=dict)
    """``FIGURES`` of this segment."""
    busy: str = ""
    """Words that report other processes on the CPUs; empty if there were none."""
    quantized: str | None = None
    """Communication that Zero++ quantized, a fact of the work."""


def read_segments(record: Fields) -> tuple[Segment, ...]:
    """The segments that executed steps, in order; the last one if none did.

    Earlier steps without a record are one more segment, the first. A record without segments has one, of all steps.
    """
    recorded = []
    for section in record.sections("segments"):
        first, last = section.number("first_step"), section.number("last_step")
        if first is not None and last is not None:
            figures = {name: section.number(name) for name in FIGURES}
            busy = busy_words({"cpu_share_of_others": section.number("cpu_share_of_others")})
            recorded.append(Segment(int(first), int(last), _setup(section, section), figures, busy, quantized(section)))
    segments = [each for each in recorded if each.last_step and each.last_step >= each.first_step] or recorded[-1:]
    if not segments:
        segments = [Segment(1, None, _setup(record, record.section("training_config")))]
    if segments[0].first_step > 1:
        segments.insert(0, Segment(1, segments[0].first_step - 1))
    return tuple(segments)


def _setup(place: Fields, config: Fields) -> dict[str, str | None]:
    hardware, env = place.section("hardware"), place.section("env")
    micro, accumulation = config.number("micro_batch_size_per_gpu"), config.number("grad_accum_steps")
    return {
        HARDWARE: machine(place),
        INSTRUCTIONS: hardware.text("instruction_sets"),
        DEVICES: devices(hardware),
        STRATEGY: config.text("strategy") or config.text("run_type"),
        "micro batch x accumulation": f"{micro:.0f} x {accumulation:.0f}" if micro and accumulation else None,
        "compile": _yes_or_no(config.raw("compile")),
        "padded logits": _yes_or_no(config.raw("pad_logits")),
        "CUDA graphs": _yes_or_no(config.raw("cuda_graphs")),
        "activation checkpointing": _yes_or_no(config.raw("activation_checkpointing")),
        **{shown: env.text(f"{name}_version") for name, shown in VERSIONS.items()},
        "host": place.text("host"),
        "launcher": hardware.text("launcher"),
        "code": place.text("git_commit"),
    }


def _yes_or_no(value: object) -> str | None:
    return {True: "yes", False: "no"}.get(value) if isinstance(value, bool) else None


def quantized(config: Fields) -> str | None:
    """Communication that Zero++ quantized: ``none``, ``weights``, ``gradients`` or both; None if unknown."""
    asked = {what: config.raw(f"quantized_{what}") for what in ("weights", "gradients")}
    if not all(isinstance(value, bool) for value in asked.values()):
        return None
    return " and ".join(what for what, value in asked.items() if value) or "none"


def machine(record: Fields) -> str | None:
    """The hardware in words; the host's name if nothing else was recorded.

    The number of visible GPUs is left out: a machine with hidden GPUs is the same machine.
    """
    hardware = record.section("hardware")
    cores = hardware.number("cpu_count")
    words = hardware_words(hardware.text("gpu_name"), hardware.text("cpu_name"), int(cores) if cores else None)
    return words or record.text("host")


def devices(hardware: Fields) -> str | None:
    """The devices that the run used: "2 GPUs", "2 CPU devices of 1 thread"."""
    world, kind, threads = hardware.number("world_size"), hardware.text("device"), hardware.number("threads_per_device")
    if not world or kind is None:
        return None
    if kind == "cuda":
        return counted(world, "GPU")
    return counted(world, f"{kind.upper()} device") + (f" of {counted(threads, 'thread')}" if threads else "")


def over_time(segments: Sequence[Segment], values: Sequence[str | None]) -> str | None:
    """A value per segment in words: "ddp", or "zero2 to step 200, ddp from step 201"; None if no value is known."""
    same = groupby(zip(values, segments, strict=True), key=itemgetter(0))
    pieces: list[tuple[str | None, int]] = [(value, next(group)[1].first_step) for value, group in same]
    if len(pieces) == 1:
        return pieces[0][0]
    known = [(value or "not recorded", start) for value, start in pieces]
    earlier = [f"{value} to step {following - 1:,}" for (value, _), (_, following) in pairwise(known)]
    return ", ".join([*earlier, f"{known[-1][0]} from step {known[-1][1]:,}"])


def setup_over_time(segments: Sequence[Segment], what: str) -> str | None:
    """``over_time`` for one entry of the segments' ``setup``."""
    return over_time(segments, [segment.setup.get(what) for segment in segments])


def differences(segments: Sequence[Segment], *, noted: bool) -> list[str]:
    """The entries of ``setup`` that differ between the recorded segments, one text for each.

    Args:
        segments: of one run.
        noted: compare the entries of ``NOTED``; otherwise those that affect times and memory, without the hardware,
            which has its own warning.
    """
    recorded = [segment for segment in segments if segment.setup]
    names = NOTED if noted else [name for name in recorded[-1].setup if name not in {HARDWARE, *NOTED}]
    differing = [name for name in names if len({segment.setup[name] for segment in recorded}) > 1]
    return [f"{name} {setup_over_time(recorded, name)}" for name in differing]


# The facts of a run's work: two runs did the same work if all of them agree.

RANDOM = "random"
"""The initial weights of a run without ``--init_from``: they depend on the seed, which is a separate fact."""
UNCHANGED: dict[str, Any] = {}
"""Nothing changed when the run was resumed, or it was never resumed."""
EXECUTED_BY = "executed by"
"""Name of a change of strategy or ranks, which does not change the training and needs no ``--allow_changed``."""
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
    model, seed, precision = config.section("model"), config.whole("seed"), config.text("precision")
    initial_weights = config.section("init_from").text("sha256")
    if config.has("init_from") and config.raw("init_from") is None:
        initial_weights = RANDOM
    settings = config.raw("optimizer_params")
    if isinstance(settings, dict):  # type and rate are facts of their own; torch_adam only says whose code computes
        settings = {key: value for key, value in settings.items() if key not in {"type", "lr", "torch_adam"}}
    scheduler = config.raw("scheduler")
    if isinstance(scheduler, dict) and "total_num_steps" in scheduler and _ends_with_the_run(scheduler):
        scheduler = {**scheduler, "total_num_steps": config.number("total_steps")}
    segments = read_segments(record)
    by_segment = [segment.quantized for segment in segments]
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
        "precision": precision,
        "initial weights": initial_weights,
        "optimizer type": config.raw("optimizer"),
        "optimizer settings": settings,
        "learning rate": config.number("lr"),
        "scheduler": scheduler,
        "gradient clipping": config.number("gradient_clipping"),
        "loss scaling": config.raw("loss_scaling"),
        "quantized communication": None if None in by_segment else over_time(segments, by_segment),
        "seed": None if seed is None else str(seed),
        # a record of an earlier version, which had none, lacks the key
        "document masks": _yes_or_no(bool(config.raw("mask_documents"))) if config.has("seed") else None,
        "changed at resume": _changes(record, config),
    }
    return {fact: facts[fact] for fact in (*WORK_FACTS, *TRAINING_FACTS)}


def _ends_with_the_run(scheduler: dict[str, Any]) -> bool:
    return scheduler.get("type") in ENDS_WITH_THE_RUN and scheduler.get("total_num_steps") is None


def _changes(record: Fields, config: Fields) -> Any:
    """Changes that ``--allow_changed`` accepted, by name and step, without changes of strategy or ranks."""
    changes = record.raw("changed_at_resume")
    if not isinstance(changes, list):
        never_resumed = record.has("resumed_from") and record.raw("resumed_from") is None
        return UNCHANGED if never_resumed and changes is None else None
    scheduler = config.raw("scheduler")
    longer_is_the_same = isinstance(scheduler, dict) and not _ends_with_the_run(scheduler)
    by_name = {}
    for change in changes:
        if not isinstance(change, dict):
            return None
        name, step = str(change.get("name")), change.get("step")
        if name == EXECUTED_BY or (name == "total steps" and longer_is_the_same):
            continue
        values = {when: change.get(when) for when in ("before", "after")}
        # null means that the setting was absent, not that it is unknown
        absent = {when: "none" for when, value in values.items() if value is None}
        by_name[f"{name} after step {step}"] = values | absent
    return by_name
