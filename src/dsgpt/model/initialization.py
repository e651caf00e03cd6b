"""Initial weights as a pure function of (seed, parameter name).

No value depends on the order in which parameters are made, nor on the rank that makes them. However a model is split
over ranks, each part starts from the same values as in the whole model.
"""

import hashlib

import torch
from torch import Tensor

from dsgpt.model.config import GPT2Config

WEIGHT_STD = 0.02
"""N(0, 0.02): Radford et al. 2018 (GPT-1), section 4.1, which GPT-2 keeps."""


def initial_value(name: str, shape: torch.Size, *, config: GPT2Config, seed: int) -> Tensor:
    """The initial value of one parameter, fp32 on CPU, of ``shape``.

    Projections back into the residual stream are scaled by 1/sqrt(2 * n_layer): Radford et al. 2019 (GPT-2), section
    2.3, "we scale the weights of residual layers at initialization by a factor of 1/sqrt(N)", N residual layers.
    """
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if ".ln_" in f".{name}":
        return torch.ones(shape)
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    std = WEIGHT_STD / (2 * config.n_layer) ** 0.5 if name.endswith("proj.weight") else WEIGHT_STD
    if name != "wte.weight":
        return torch.normal(0.0, std, shape, generator=generator)
    value = torch.zeros(shape)  # the padded rows stay zero: no id selects them, and they get no gradient
    value[: config.vocab_size] = torch.normal(0.0, std, (config.vocab_size, config.n_embd), generator=generator)
    return value


@torch.no_grad()
def initialize(model: torch.nn.Module, *, config: GPT2Config, seed: int) -> None:
    """Give every parameter of a whole, unsharded ``model`` its initial value, in place."""
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_value(name, parameter.shape, config=config, seed=seed))
