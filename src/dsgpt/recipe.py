"""What the DeepSpeed JSON means to EVERY strategy: batch, optimizer, schedule, precision and clipping.

The file is DeepSpeed's own format. ``read_recipe`` checks all of it, whichever strategy will run: one recipe can be
handed from a laptop's baseline to a cluster. Imports neither torch nor DeepSpeed.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsgpt import recipe_keys as keys
from dsgpt.problems import Problems, Section, is_number

DEFAULT_GRADIENT_CLIPPING = 1.0
"""DeepSpeed's default since 0.19.3; written out for every strategy so that none inherits another one."""


@dataclass(frozen=True, kw_only=True)
class OptimizerRecipe:
    """The ``optimizer`` block. Weight decay applies to matrices and embeddings only."""

    type: str
    """``AdamW`` or ``SGD``."""
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    torch_adam: bool = False
    """With optimizer offload: torch's AdamW, which needs no compiler, instead of DeepSpeed's faster one."""


@dataclass(frozen=True, kw_only=True)
class SchedulerRecipe:
    """The ``scheduler`` block, with DeepSpeed's own defaults."""

    type: str
    """``WarmupLR``, ``WarmupDecayLR`` or ``WarmupCosineLR``."""
    total_num_steps: int | None = None
    """Optimizer steps until the end of the decay; None for the steps of the run."""
    warmup_num_steps: int = 1000
    warmup_type: str = "log"
    """``log`` or ``linear``."""
    warmup_min_lr: float = 0.0
    warmup_max_lr: float | None = None
    warmup_min_ratio: float = 0.0
    cos_min_ratio: float = 0.0001


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """The ``fp16`` block: how the loss is scaled so that fp16 gradients do not vanish."""

    loss_scale: float = 0.0
    """A fixed scale; 0 for a dynamic one."""
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    """Steps without overflow before the scale doubles."""
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: int = 1


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A checked recipe file."""

    path: Path
    sha256: str
    raw: dict[str, Any]
    """The JSON as given."""
    optimizer: OptimizerRecipe
    scheduler: SchedulerRecipe | None
    gradient_clipping: float
    """Largest global gradient norm; 0 for no clipping."""
    precision: str | None
    """``fp32``, ``bf16``, ``fp16``, or None where the file leaves it open."""
    loss_scaling: LossScaling
    train_batch_size: int | None
    micro_batch_size: int | None
    gradient_accumulation_steps: int | None
    steps_per_print: int | None
    zero_stage: int
    offload_optimizer: str
    """``none``, ``cpu`` or ``nvme``."""
    offload_param: str
    deepspeed_only: tuple[str, ...] = field(default=())
    """Keys present that mean nothing without DeepSpeed."""


def read_recipe(path: Path, problems: Problems) -> Recipe | None:
    """Read and check a recipe; mistakes go to ``problems``, and None comes back where no recipe can be made of it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        problems.add(f"--deepspeed_config {path}: cannot be read ({error.strerror}); recipes are in ds_configs/")
        return None
    try:
        raw = _parse(data)
    except (ValueError, RecursionError) as error:
        problems.add(f"--deepspeed_config {path}: is not valid JSON: {error}")
        return None
    if not isinstance(raw, dict):
        problems.add(f"--deepspeed_config {path}: must be an object in braces, not {raw!r}")
        return None
    top = Section(raw, place=str(path), problems=problems)
    top.check_keys(keys.SHARED_KEYS | keys.DEEPSPEED_KEYS.keys(), refused=keys.REFUSED_KEYS)
    top.check_kinds(keys.DEEPSPEED_KEYS)
    _refuse_auto(raw, str(path), problems)
    if (ours := top.section("dsgpt")) is not None:
        ours.check_keys(())
    optimizer = _read_optimizer(top)
    zero_stage, offload_optimizer, offload_param = _read_zero(top)
    rest = {
        "scheduler": _read_scheduler(top),
        "gradient_clipping": top.number("gradient_clipping", DEFAULT_GRADIENT_CLIPPING, low=0),
        "precision": _read_precision(top),
        "loss_scaling": _read_loss_scaling(top),
        "train_batch_size": top.whole("train_batch_size", None, low=1),
        "micro_batch_size": top.whole("train_micro_batch_size_per_gpu", None, low=1),
        "gradient_accumulation_steps": top.whole("gradient_accumulation_steps", None, low=1),
        "steps_per_print": top.whole("steps_per_print", None, low=1),
    }
    if optimizer is None:
        return None
    return Recipe(
        path=path,
        sha256=hashlib.sha256(data).hexdigest(),
        raw=raw,
        optimizer=optimizer,
        zero_stage=zero_stage,
        offload_optimizer=offload_optimizer,
        offload_param=offload_param,
        deepspeed_only=tuple(key for key in top.values if key in keys.DEEPSPEED_KEYS),
        **rest,
    )


def _parse(data: bytes) -> Any:
    """JSON as its standard has it: Python's reader also takes NaN, Infinity, and a key twice, of which it drops one.

    Raises:
        ValueError, RecursionError: it is not JSON.
    """

    def refuse_constant(word: str) -> None:
        raise ValueError(f"{word} is no JSON number")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for index, (key, _) in enumerate(pairs):
            if any(key == other for other, _ in pairs[:index]):
                raise ValueError(f'the key "{key}" is given twice: keep one of them')
        return dict(pairs)

    return json.loads(data, parse_constant=refuse_constant, object_pairs_hook=unique)


def _refuse_auto(value: Any, place: str, problems: Problems) -> None:
    """``"auto"`` is filled in by other trainers; here every value has one meaning."""
    if value == "auto":
        problems.add(f'{place} is "auto": write the value, or leave the key out for its default')
    elif isinstance(value, dict):
        for key, inner in value.items():
            _refuse_auto(inner, f"{place}: {key}", problems)


def _read_optimizer(top: Section) -> OptimizerRecipe | None:
    block = top.section("optimizer")
    if "optimizer" not in top.values:
        top.complain("optimizer", 'is missing; for example {"type": "AdamW", "params": {"lr": 0.0006}}')
    if block is None:
        return None
    block.check_keys({"type", "params"})
    kind = block.choice("type", None, keys.OPTIMIZER_PARAMS)
    params = block.section("params")
    if kind is None or params is None:
        if not {"type", "params"} <= set(block.values):
            block.complain("", 'needs "type" (AdamW or SGD) and "params" with at least "lr"')
        return None
    params.check_keys(keys.OPTIMIZER_PARAMS[kind])
    lr = params.number("lr", None, low=0)
    momentum, nesterov = params.number("momentum", 0.0, low=0, high=1), params.boolean("nesterov", False)
    if nesterov and not momentum:
        params.complain("nesterov", "needs a momentum above 0")
    if "lr" not in params.values:
        params.complain("lr", "is missing")
    if lr is None:
        return None
    return OptimizerRecipe(
        type=kind,
        lr=lr,
        betas=_read_betas(params),
        eps=params.number("eps", 1e-8, low=0),
        weight_decay=params.number("weight_decay", 0.0, low=0),
        momentum=momentum,
        nesterov=nesterov,
        torch_adam=params.boolean("torch_adam", False),
    )


def _read_betas(params: Section) -> tuple[float, float]:
    betas = params.values.get("betas", [0.9, 0.999])
    if not isinstance(betas, list) or len(betas) != 2 or not all(is_number(b) and 0 <= b < 1 for b in betas):
        params.complain("betas", f"must be two numbers of at least 0 and below 1, not {betas!r}")
        return (0.9, 0.999)
    return (float(betas[0]), float(betas[1]))


def _read_scheduler(top: Section) -> SchedulerRecipe | None:
    block = top.section("scheduler")
    if block is None:
        return None
    block.check_keys({"type", "params"})
    kind = block.choice("type", None, keys.SCHEDULER_PARAMS)
    if kind is None:
        if "type" not in block.values:
            block.complain("type", f"is missing; one of {', '.join(keys.SCHEDULER_PARAMS)}")
        return None
    params = block.section("params") or Section({}, place=block.place, problems=Problems())
    params.check_keys(keys.SCHEDULER_PARAMS[kind])
    return SchedulerRecipe(
        type=kind,
        total_num_steps=params.whole("total_num_steps", None, low=1),
        warmup_num_steps=params.whole("warmup_num_steps", 1000, low=1),
        warmup_type=params.choice("warmup_type", "log", ("log", "linear")),
        warmup_min_lr=params.number("warmup_min_lr", 0.0, low=0),
        warmup_max_lr=params.number("warmup_max_lr", None, low=0),
        warmup_min_ratio=params.number("warmup_min_ratio", 0.0, low=0, high=1),
        cos_min_ratio=params.number("cos_min_ratio", 0.0001, low=0, high=1),
    )


def _read_precision(top: Section) -> str | None:
    enabled: dict[str, bool] = {}
    for name, known in keys.PRECISION_KEYS.items():
        block = top.section(name)
        if block is not None:
            block.check_keys(known)
            enabled[name] = block.boolean("enabled", False)
    if all(enabled.values()) and len(enabled) > 1:
        top.complain("fp16", "and bf16 are both enabled; keep one")
    chosen = [name for name, on in enabled.items() if on]
    return chosen[0] if chosen else ("fp32" if enabled else None)


def _read_loss_scaling(top: Section) -> LossScaling:
    block = top.section("fp16")
    if block is None:
        return LossScaling()
    return LossScaling(
        loss_scale=block.number("loss_scale", 0.0, low=0),
        initial_scale_power=block.whole("initial_scale_power", 16, low=0, high=32),
        loss_scale_window=block.whole("loss_scale_window", 1000, low=1),
        hysteresis=block.whole("hysteresis", 2, low=1),
        consecutive_hysteresis=block.boolean("consecutive_hysteresis", False),
        min_loss_scale=block.whole("min_loss_scale", 1, low=1),
    )


def _read_zero(top: Section) -> tuple[int, str, str]:
    """ZeRO stage, and the devices of optimizer and parameter offload."""
    block = top.section("zero_optimization")
    if block is None:
        return 0, "none", "none"
    block.check_keys(keys.ZERO_KEYS)
    block.check_kinds(keys.ZERO_KEYS)
    stage = block.whole("stage", 0, low=0, high=3)
    devices = []
    for name, known in (
        ("offload_optimizer", keys.OFFLOAD_OPTIMIZER_KEYS),
        ("offload_param", keys.OFFLOAD_PARAM_KEYS),
    ):
        offload = block.section(name)
        if offload is not None:
            offload.check_keys(known)
            offload.check_kinds(known)
        devices.append(offload.choice("device", "none", ("none", "cpu", "nvme")) if offload else "none")
    if devices[0] != "none" and stage == 0:
        block.complain("offload_optimizer", "needs ZeRO stage 1, 2 or 3")
    if devices[1] != "none" and stage != 3:
        block.complain("offload_param", "needs ZeRO stage 3")
    return stage, devices[0], devices[1]
