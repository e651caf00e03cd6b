"""The sizes of a GPT-2's parameters, and which of them a rank holds. Makes no tensor."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from dsgpt.model.config import GPT2Config

EMBEDDING = "wte.weight"
"""The token embedding, tied to the head."""


@dataclass(frozen=True, kw_only=True)
class ParameterSize:
    """One parameter."""

    name: str
    """Canonical: the baseline's."""
    shape: tuple[int, ...]
    decays: bool
    """Whether weight decay applies: the optimizer has a group with it and one without."""
    splits: bool = False
    """Whether tensor ranks hold equal parts of it instead of all of it."""

    @cached_property
    def numel(self) -> int:
        """Elements."""
        product = 1
        for size in self.shape:
            product *= size
        return product


def model_parameters(model: GPT2Config) -> list[ParameterSize]:
    """Every parameter, in the model's order; the embedding with its padded rows, and once although it is used twice."""
    return list(_parameters(model))


@lru_cache(maxsize=16)
def _parameters(model: GPT2Config) -> tuple[ParameterSize, ...]:
    width = model.n_embd
    found = [
        ParameterSize(name=EMBEDDING, shape=(model.padded_vocab_size, width), decays=True),
        ParameterSize(name="wpe.weight", shape=(model.block_size, width), decays=True),
    ]
    for layer in range(model.n_layer):
        found += [replace(part, name=f"blocks.{layer}.{part.name}") for part in _block(width)]
    return (*found, *_layer_norm("ln_f", width))


def _block(width: int) -> list[ParameterSize]:
    return [
        *_layer_norm("ln_1", width),
        *_linear("attn.qkv", width, 3 * width, bias_splits=True),
        *_linear("attn.proj", width, width, bias_splits=False),
        *_layer_norm("ln_2", width),
        *_linear("mlp.fc", width, 4 * width, bias_splits=True),
        *_linear("mlp.proj", 4 * width, width, bias_splits=False),
    ]


def _layer_norm(name: str, width: int) -> list[ParameterSize]:
    return [ParameterSize(name=f"{name}.{part}", shape=(width,), decays=False) for part in ("weight", "bias")]


def _linear(name: str, inputs: int, outputs: int, *, bias_splits: bool) -> list[ParameterSize]:
    """A layer split by its outputs splits the bias too; one split by its inputs adds the bias once, after the sum."""
    return [
        ParameterSize(name=f"{name}.weight", shape=(outputs, inputs), decays=True, splits=True),
        ParameterSize(name=f"{name}.bias", shape=(outputs,), decays=False, splits=bias_splits),
    ]


def on_tensor_rank(parameters: Iterable[ParameterSize], tensor: int) -> list[ParameterSize]:
    """The parameters of one of ``tensor`` ranks: its part of those that are split, and the others whole."""
    return [
        replace(part, shape=(part.shape[0] // tensor, *part.shape[1:])) if part.splits else part for part in parameters
    ]


def total(parameters: Iterable[ParameterSize]) -> int:
    """Elements of all of them."""
    return sum(part.numel for part in parameters)


def optimizer_groups(parameters: Sequence[ParameterSize]) -> list[list[ParameterSize]]:
    """Those with and those without weight decay, each in the model's order, as the optimizer gets them."""
    return [[part for part in parameters if part.decays], [part for part in parameters if not part.decays]]
