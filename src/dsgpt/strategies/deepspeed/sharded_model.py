"""A model that is split over the ranks while it is built (ZeRO-3's ``zero.Init``): no rank ever holds all of it."""

import gc
from typing import Any

import torch

from dsgpt.config.run_config import RunConfig
from dsgpt.model.gpt2 import GPT2
from dsgpt.strategies.deepspeed.protocols import attached
from dsgpt.strategies.initial_weights import initial_values

_INIT_KEYS = ("zero_optimization", "bf16", "fp16", "aio")


def build_sharded(config: RunConfig, engine_config: dict[str, Any]) -> GPT2:
    """GPT-2 with the baseline's initial weights, each split over all ranks as soon as it exists; collective.

    A rank holds its part of every parameter. It also holds one whole layer while that layer is built, and one whole
    parameter while that parameter gets its value.

    Args:
        config: the run.
        engine_config: the JSON that the engine will get.
    """
    import deepspeed  # noqa: PLC0415 - takes seconds

    # ``zero.Init`` checks the batch sizes too, but does not know the groups of ranks yet: any micro batch is fine here,
    # and the engine checks the real sizes later.
    init_config = {key: engine_config[key] for key in _INIT_KEYS if key in engine_config}
    with deepspeed.zero.Init(config_dict_or_path={**init_config, "train_micro_batch_size_per_gpu": 1}):
        model = GPT2(config.model, activation_checkpointing=config.activation_checkpointing)
    # Frees the head's own weight, which the embedding replaced: DeepSpeed's closures put it into a reference cycle.
    gc.collect()
    values = initial_values(config)
    for name, parameter in model.named_parameters():
        with torch.no_grad(), deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
            if config.topology.is_main:
                parameter.copy_(values(name, attached(parameter, "ds_shape")))
    return model
