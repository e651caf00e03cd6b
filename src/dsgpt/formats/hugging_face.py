"""The names, layouts and settings that ``transformers.GPT2LMHeadModel`` uses for the same model.

Hugging Face's GPT-2 keeps OpenAI's ``Conv1D``, whose weight is the transpose of ``nn.Linear``'s, and has no padding in
its vocabulary.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from dsgpt.common.json_files import clipped
from dsgpt.common.problems import Problems
from dsgpt.model.config import LARGEST, GPT2Config

_BLOCK_NAMES = {
    "ln_1": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "ln_2": "ln_2",
    "mlp.fc": "mlp.c_fc",
    "mlp.proj": "mlp.c_proj",
}
_TRANSPOSED = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc.weight", "mlp.proj.weight")
_EMBEDDING = "wte.weight"

PREFIX = "transformer."
"""Prefix of the names in ``GPT2LMHeadModel``; OpenAI's published files and ``GPT2Model`` do not have it."""
HEAD = "lm_head.weight"
"""The output head. It is tied to the embedding, so files need not contain it."""

_SHAPE_KEYS = {
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
    "n_positions": "block_size",
    "vocab_size": "vocab_size",
}
"""From the names in config.json to the fields of ``GPT2Config``."""
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_ARCHITECTURE = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
"""The settings of the published GPT-2, which are also transformers' defaults."""
_SAME_FUNCTION = {"activation_function": ("gelu_pytorch_tanh",)}
_TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def hugging_face_name(name: str) -> str:
    """``blocks.0.attn.qkv.weight`` to ``transformer.h.0.attn.c_attn.weight``, and so on."""
    if not name.startswith("blocks."):
        return f"{PREFIX}{name}"
    _, layer, rest = name.split(".", 2)
    module, kind = rest.rsplit(".", 1)
    return f"{PREFIX}h.{layer}.{_BLOCK_NAMES[module]}.{kind}"


def hugging_face_shape(name: str, shape: Iterable[int], config: GPT2Config) -> tuple[int, ...]:
    """The shape that Hugging Face gives the canonical parameter ``name`` of shape ``shape``."""
    shape = tuple(shape)
    if name == _EMBEDDING:
        return config.vocab_size, *shape[1:]
    return shape[::-1] if name.endswith(_TRANSPOSED) else shape


def hugging_face_value(name: str, value: Tensor, config: GPT2Config) -> Tensor:
    """The canonical parameter ``name`` (or its gradient) in Hugging Face's layout, unpadded; a view of ``value``."""
    if name == _EMBEDDING:
        return value[: config.vocab_size]
    return value.t() if name.endswith(_TRANSPOSED) else value


def canonical_value(name: str, value: Tensor, config: GPT2Config) -> Tensor:
    """The inverse of ``hugging_face_value``, in fp32. The padding is zero, as it is after training."""
    if name == _EMBEDDING:
        padded = torch.zeros(config.padded_vocab_size, config.n_embd)
        padded[: config.vocab_size] = value
        return padded
    value = value.t() if name.endswith(_TRANSPOSED) else value
    return value.float().contiguous()


def to_hugging_face(weights: Iterable[tuple[str, Tensor]], config: GPT2Config) -> Iterator[tuple[str, Tensor]]:
    """Named weights (or gradients) with the names and layout of ``GPT2LMHeadModel``, without padding."""
    for name, value in weights:
        yield hugging_face_name(name), hugging_face_value(name, value, config)


def hugging_face_config(config: GPT2Config, *, dtype: str, end_of_text: int | None) -> dict[str, Any]:
    """The contents of ``config.json``.

    Args:
        config: the shape.
        dtype: that of the weights in the same folder: ``fp32``, ``bf16`` or ``fp16``.
        end_of_text: the id that begins and ends documents; None if unknown.
    """
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: getattr(config, ours) for theirs, ours in _SHAPE_KEYS.items()},
        "n_inner": None,
        **_ARCHITECTURE,
        **dict.fromkeys(_DROPOUTS, config.dropout),
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": _TORCH_NAMES[dtype],
        "torch_dtype": _TORCH_NAMES[dtype],  # the same for transformers before 4.56
    }


def published_shape(values: dict[str, Any], *, place: str, problems: Problems) -> dict[str, int] | None:
    """The shape in a ``config.json``, as fields of a ``GPT2Config`` without dropout; None if it is not a GPT-2.

    Args:
        values: the contents of the file.
        place: the file, for messages.
        problems: receives a line for every setting that makes it another model.
    """
    if values.get("model_type") != "gpt2":
        problems.add(f"{place}: model_type is {clipped(values.get('model_type'))}: only gpt2 can be loaded")
        return None
    found = [
        f"{place}: {key} is {clipped(values[key])}, in GPT-2 it is {expected!r}: the weights would mean something else "
        "here"
        for key, expected in _ARCHITECTURE.items()
        if values.get(key, expected) not in (expected, *_SAME_FUNCTION.get(key, ()))
    ]
    shape: dict[str, int] = {}
    for theirs, ours in _SHAPE_KEYS.items():
        value = values.get(theirs)
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST[ours]:
            shape[ours] = value
        else:
            found.append(f"{place}: {theirs} must be a whole number from 1 to {LARGEST[ours]:,}, not {clipped(value)}")
    if not found and shape["n_embd"] % shape["n_head"]:
        found.append(f"{place}: n_head {shape['n_head']} does not divide n_embd {shape['n_embd']}")
    if not found and values.get("n_inner") not in (None, 4 * shape["n_embd"]):
        found.append(f"{place}: n_inner is {clipped(values['n_inner'])}, in GPT-2 it is four times n_embd")
    problems.add(*found)
    return None if found else shape
