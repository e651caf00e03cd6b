"""Out of memory in one line: when, how much, what was predicted, and the next setting that fits."""

import contextlib
import re
import traceback
from collections.abc import Iterator
from dataclasses import replace

import torch

from dsgpt.common.errors import OutOfMemory
from dsgpt.common.text import divisors
from dsgpt.config.run_config import RunConfig
from dsgpt.planner.memory import worst_peak
from dsgpt.planner.setup import Setup
from dsgpt.telemetry.memory import peak_bytes
from dsgpt.training.run_description import predicted_peak_memory, setup_of

MOMENTS = {
    "_build": "at the start",
    "_load_checkpoint": "while the checkpoint was loaded",
    "save": "in a save",
    "_validate": "in a validation",
    "measure_inference": "in the inference figure",
    "backward": "in the backward pass",
    "step": "in the optimizer step",
    "_clip_and_step": "in the optimizer step",
}
"""The moment of an error, by the first of these functions that its traceback has; else the forward pass."""
SAFE = 0.9
"""A setting is said to fit if it needs at most this share of the memory, or of what the failed one was to need."""


@contextlib.contextmanager
def out_of_memory_explained(config: RunConfig) -> Iterator[None]:
    """Raises ``OutOfMemory`` if the memory of this rank's device runs out inside."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        functions = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        moment = next((MOMENTS[name] for name in MOMENTS if name in functions), "in the forward pass")
        asked = re.search(r"Tried to (allocate [\d.]+ \wiB)", str(error))
        peak, predicted = peak_bytes(config.device), predicted_peak_memory(config)
        facts = [
            f"tried to {asked[1]}" if asked else "",
            f"{peak / 1e9:.3g} GB at the peak so far" if peak is not None else "",
            f"{predicted['worst']['total'] / 1e9:.3g} GB were predicted for a step" if predicted else "",
        ]
        raise OutOfMemory(
            f"rank {config.topology.rank} is out of memory {moment}: {', '.join(filter(None, facts))}; "
            f"{_next_setting(config, start=moment == MOMENTS['_build']) if predicted else 'see ds_configs/README.md'}"
        ) from error


def _next_setting(config: RunConfig, *, start: bool) -> str:
    """The least change that fits by the formulas: of micro batch, activation checkpointing, then ZeRO's stage."""
    setup = setup_of(config)
    limit = SAFE * worst_peak(setup, device=config.device)[1].total
    if config.device == "cuda":
        limit = min(limit, SAFE * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    for words, candidate in _smaller(setup, start=start):
        if worst_peak(candidate, device=config.device)[1].total <= limit:
            return f"this fits by the formulas: {words}"
    return "nothing smaller fits by the formulas: take more GPUs, or offload (src/plan.py --recommend)"


def _smaller(setup: Setup, *, start: bool) -> Iterator[tuple[str, Setup]]:
    """Setups of the same training that need less memory, with the flags that ask for them, in order of effort."""
    share = setup.micro_batch_size * setup.gradient_accumulation_steps
    stages = [setup.recipe.zero_stage]
    if setup.run_type == "optimized" and setup.sizes.ranks_per_copy == 1 and setup.world_size > 1:
        stages += range(stages[0] + 1, 4)
    for stage in stages[start:]:
        zero = replace(setup.recipe.zero_optimization, stage=stage)
        recipe = replace(setup.recipe, zero_optimization=zero)
        in_recipe = f"zero_optimization.stage {stage} in the recipe, " if stage > stages[0] else ""
        for checkpointing in sorted({setup.activation_checkpointing, True}):
            flag = "--activation_checkpointing " if checkpointing > setup.activation_checkpointing else ""
            for micro in sorted(divisors(share), reverse=True):
                if micro <= setup.micro_batch_size:
                    yield (
                        f"{in_recipe}{flag}--micro_batch_size_per_gpu {micro}",
                        replace(
                            setup,
                            recipe=recipe,
                            activation_checkpointing=checkpointing,
                            micro_batch_size=micro,
                            gradient_accumulation_steps=share // micro,
                        ),
                    )
