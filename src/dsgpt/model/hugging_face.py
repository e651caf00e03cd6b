"""The names and layouts that ``transformers.GPT2LMHeadModel`` gives the same weights.

Hugging Face's GPT-2 keeps OpenAI's ``Conv1D``, whose weight is the transpose of ``nn.Linear``'s.
"""

from collections.abc import Iterable, Iterator

from torch import Tensor

from dsgpt.model.config import GPT2Config

_BLOCK_NAMES = {
    "ln_1": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "ln_2": "ln_2",
    "mlp.fc": "mlp.c_fc",
    "mlp.proj": "mlp.c_proj",
}
_TRANSPOSED = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc.weight", "mlp.proj.weight")


def hugging_face_name(name: str) -> str:
    """``blocks.0.attn.qkv.weight`` to ``transformer.h.0.attn.c_attn.weight``, and so on."""
    if not name.startswith("blocks."):
        return f"transformer.{name}"
    _, layer, rest = name.split(".", 2)
    module, kind = rest.rsplit(".", 1)
    return f"transformer.h.{layer}.{_BLOCK_NAMES[module]}.{kind}"


def to_hugging_face(weights: Iterable[tuple[str, Tensor]], config: GPT2Config) -> Iterator[tuple[str, Tensor]]:
    """Our named weights (or their gradients) as ``GPT2LMHeadModel`` names and lays them out, padding cut off."""
    for name, value in weights:
        if name == "wte.weight":
            value = value[: config.vocab_size]  # noqa: PLW2901
        yield hugging_face_name(name), value.t() if name.endswith(_TRANSPOSED) else value
