"""The initial value of every parameter, the same under every strategy: drawn from seed and name, or published."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from dsgpt.config.run_config import RunConfig
from dsgpt.model.gpt2 import initial_value

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The precision by the name that a configuration gives it."""
InitialValues = Callable[[str, torch.Size], Tensor]
"""(canonical name, whole shape) to the whole initial value, fp32 on the CPU; the same on every rank."""


def initial_values(config: RunConfig) -> InitialValues:
    """The function from which the strategies of this run get initial weights, whole, before they split them.

    Raises:
        UserError: the source that ``--init_from`` names is gone.
    """
    if config.init_from is not None:
        return config.init_from.weights(config.model)
    return partial(initial_value, config=config.model, seed=config.options.seed)


@torch.no_grad()
def initialize_whole(model: nn.Module, config: RunConfig) -> None:
    """Give every parameter of a whole, unsharded ``model`` its initial value, in place."""
    values = initial_values(config)
    for name, parameter in model.named_parameters():
        parameter.copy_(values(name, parameter.shape))
