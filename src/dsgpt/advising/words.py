"""Figures of a plan in words: bytes, times, money, and the name of a setup."""

from collections.abc import Callable

from dsgpt.planning.setup import Setup

GB = 10**9


def size(count: float) -> str:
    """``12.3 GB`` of 10^9 bytes, as datasheets count; small ones in MB."""
    return f"{count / GB:,.1f} GB" if count >= GB / 10 else f"{count / 1e6:,.1f} MB"


def duration(seconds: float) -> str:
    """``1.3 ms``, ``2.4 s``, ``5.0 min``, ``7.1 h``, ``3.2 days``."""
    for limit, unit, name in ((1, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds / 86400:,.1f} days"


def dollars(amount: float) -> str:
    """``$12.34``; without cents from 100 on."""
    return f"${amount:,.0f}" if amount >= 100 else f"${amount:,.2f}"


def between(low: float, high: float, form: Callable[[float], str]) -> str:
    """``1.0 h to 2.0 h``."""
    return f"{form(low)} to {form(high)}"


def strategy_name(setup: Setup) -> str:
    """``ddp``, ``zero2``, ``tensor2-zero1``, ``zero3-offload``: the word of the records, for a setup."""
    if setup.run_type != "optimized":
        return setup.run_type
    sizes, recipe = setup.sizes, setup.recipe
    split = {"pipeline": sizes.pipeline, "sequence": sizes.sequence, "tensor": sizes.tensor}
    names = [f"{name}{ranks}" for name, ranks in split.items() if ranks > 1]
    devices = {recipe.offload_optimizer, recipe.offload_param}
    place = next((word for device, word in (("nvme", "nvme"), ("cpu", "offload")) if device in devices), None)
    return "-".join([*names, f"zero{recipe.zero_stage}", *([place] if place else [])])


def batch_in_words(setup: Setup) -> str:
    """``32 sequences = 2 in a micro batch x 2 accumulated x 8 data ranks``."""
    micro, steps, ranks = setup.micro_batch_size, setup.gradient_accumulation_steps, setup.data_parallel_size
    return f"{micro * steps * ranks} sequences = micro batch {micro} x {steps} accumulated x {ranks} data ranks"
