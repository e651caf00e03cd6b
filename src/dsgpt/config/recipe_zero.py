"""The blocks ``zero_optimization`` and ``aio`` of a recipe: the ZeRO stage, offload, and Zero++."""

from typing import Any

from dsgpt.common.problems import Section, is_number
from dsgpt.config import recipe_keys as keys

_OFFLOADS = {"offload_optimizer": keys.OFFLOAD_OPTIMIZER_KEYS, "offload_param": keys.OFFLOAD_PARAM_KEYS}


def read_zero(top: Section) -> dict[str, Any]:
    """The fields of ``Recipe`` that ZeRO decides; mistakes go to the problems of ``top``, the whole file."""
    stage, places, secondary = 0, dict.fromkeys(_OFFLOADS, "none"), 1
    quantized = dict.fromkeys(("weights", "gradients"), False)
    if (block := top.section("zero_optimization")) is not None:
        block.check_keys(keys.ZERO_KEYS, refused=keys.REFUSED_ZERO_KEYS)
        block.check_kinds(keys.ZERO_KEYS)
        stage = block.whole("stage", 0, low=0, high=3)
        places = {name: _read_place(block, name, stage) for name in _OFFLOADS}
        secondary = block.whole("zero_hpz_partition_size", 1, low=1)
        quantized = {name: block.values.get(f"zero_quantized_{name}") is True for name in quantized}
        _check_zero_plus_plus(block, stage, secondary, quantized)
    _check_aio(top, nvme="nvme" in places.values())
    return {
        "zero_stage": stage,
        **places,
        "hpz_partition_size": secondary,
        "quantized_weights": quantized["weights"],
        "quantized_gradients": quantized["gradients"],
    }


def _read_place(zero: Section, name: str, stage: int) -> str:
    """Where an offload goes: ``none``, ``cpu`` or ``nvme``."""
    block = zero.section(name)
    if block is None:
        return "none"
    block.check_keys(_OFFLOADS[name])
    block.check_kinds(_OFFLOADS[name])
    place = block.choice("device", "none", ("none", "cpu", "nvme"))
    if place == "none":
        return place
    if name == "offload_param" and stage != 3:
        zero.complain(name, "needs ZeRO stage 3")
    elif place == "nvme" and stage != 3:
        zero.complain(name, "to nvme needs ZeRO stage 3; at stages 1 and 2 take device cpu")
    elif stage == 0:
        zero.complain(name, "needs ZeRO stage 1, 2 or 3")
    return place


def _check_zero_plus_plus(block: Section, stage: int, secondary: int, quantized: dict[str, bool]) -> None:
    wanted = [f"zero_quantized_{name}" for name, on in quantized.items() if on]
    if secondary > 1:
        wanted.append("zero_hpz_partition_size")
    if stage != 3:
        for name in wanted:
            block.complain(name, "needs ZeRO stage 3")


def _check_aio(top: Section, *, nvme: bool) -> None:
    """How files are read and written where offload goes to nvme; it means nothing elsewhere."""
    block = top.section("aio")
    if block is None:
        return
    block.check_keys(keys.AIO_KEYS, refused=keys.REFUSED_AIO_KEYS)
    block.check_kinds(keys.AIO_KEYS)
    size, multiple = block.values.get("block_size", keys.AIO_BLOCK_MULTIPLE), keys.AIO_BLOCK_MULTIPLE
    if not is_number(size) or size < multiple or size % multiple:
        block.complain("block_size", f"must be a multiple of {multiple} bytes, not {size!r}")
    if not nvme:
        top.complain("aio", "means nothing without offload to nvme: leave it out")
