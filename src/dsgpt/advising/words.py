"""Figures of a plan in words: bytes, times, money, and the name of a setup."""

import re
from collections.abc import Callable, Sequence

from dsgpt.planning.parameters import EMBEDDING, ParameterSize
from dsgpt.planning.prices import Cost
from dsgpt.planning.setup import Setup
from dsgpt.runtime.topology import Topology

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


def priced(cost: Cost) -> str:
    """``$12.34 (2024-06-01)``: a sum, and the date of the price that it follows from."""
    return dollars(cost.usd) + (f" ({cost.known_on})" if cost.known_on else "")


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


def held_in_words(setup: Setup, rank: int) -> str:
    """What ``rank`` has: its stage's layers, its shard of matrices, its positions and its data."""
    place = place_of(setup, rank)
    words = [_layers(setup.held(rank), whole=setup.sizes.pipeline == 1)]
    if setup.sizes.tensor > 1:
        words.append(f"matrices {place.tensor_rank + 1}/{setup.sizes.tensor}")
    if setup.sizes.sequence > 1:
        words.append(f"positions {place.sequence_rank + 1}/{setup.sizes.sequence}")
    if setup.data_parallel_size > 1:
        words.append(f"data {place.data_rank + 1}/{setup.data_parallel_size}")
    return ", ".join(words)


def place_of(setup: Setup, rank: int) -> Topology:
    """The stage, the shards and the data of ``rank``."""
    return Topology(
        rank=rank,
        local_rank=0,
        world_size=setup.world_size,
        local_world_size=setup.world_size,
        launcher="",
        sizes=setup.sizes,
    )


def _layers(held: Sequence[ParameterSize], *, whole: bool) -> str:
    """``all layers``, or ``embedding, blocks 0-23``."""
    if whole:
        return "all layers"
    found = sorted({int(match[1]) for part in held if (match := re.match(r"blocks\.(\d+)\.", part.name))})
    ends = ["embedding"] * any(part.name == EMBEDDING for part in held)
    return ", ".join([*ends, f"blocks {found[0]}-{found[-1]}"] if found else ends)
