"""Hugging Face's GPT-2: its names, layouts and settings, and published weights read one tensor at a time.

The names, layouts and settings that ``transformers.GPT2LMHeadModel`` uses for the same model. Hugging Face's GPT-2
keeps OpenAI's ``Conv1D``, whose weight is the transpose of ``nn.Linear``'s, and has no padding in its vocabulary.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsgpt.common.errors import UserError
from dsgpt.common.files import Advance, sha256_of
from dsgpt.common.json_files import clipped, clipped_text, read_json
from dsgpt.formats.tensor_files import StoredTensor, open_pickled, open_safetensors, stored_in_fp32
from dsgpt.model.config import LARGEST, SHAPE_FLAGS, GPT2Config
from dsgpt.model.gpt2 import parameter_shapes

_MATRICES = {"attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj", "mlp.fc": "mlp.c_fc", "mlp.proj": "mlp.c_proj"}
"""The modules of a block that have other names there; the weights of these are transposed."""
_TRANSPOSED = tuple(f"{module}.weight" for module in _MATRICES)
_EMBEDDING = "wte.weight"

PREFIX = "transformer."
"""Prefix of the names in ``GPT2LMHeadModel``; OpenAI's published files and ``GPT2Model`` do not have it."""
HEAD = "lm_head.weight"
"""The output head. It is tied to the embedding, so files need not contain it."""

_SHAPE_KEYS = {"n_positions" if field == "block_size" else field: field for field in SHAPE_FLAGS}
"""Fields of ``GPT2Config`` by the names in config.json."""
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_ARCHITECTURE = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    **dict.fromkeys(("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"), False),
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
    return f"{PREFIX}h.{layer}.{_MATRICES.get(module, module)}.{kind}"


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


def hugging_face_tensor(name: str, stored: StoredTensor, config: GPT2Config) -> StoredTensor:
    """The canonical parameter ``name`` in Hugging Face's layout, not read yet."""
    shape = hugging_face_shape(name, stored.shape, config)
    return replace(stored, shape=shape, read=lambda: hugging_face_value(name, stored.read(), config), read_slices=None)


def padded(embedding: Tensor, config: GPT2Config) -> Tensor:
    """The embedding of a vocabulary in fp32, with the rows that pad it: zero, as they are after training."""
    rows = torch.zeros(config.padded_vocab_size, config.n_embd)
    rows[: config.vocab_size] = embedding[: config.vocab_size]
    return rows


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
        **dict.fromkeys(("bos_token_id", "eos_token_id"), end_of_text),
        **dict.fromkeys(("dtype", "torch_dtype"), _TORCH_NAMES[dtype]),  # transformers before 4.56 reads the second
    }


def published_shape(place: Path) -> dict[str, int]:
    """The shape in a ``config.json``, as fields of a ``GPT2Config`` without dropout.

    Raises:
        UserError: it cannot be read, or is not that of a GPT-2; a line for every setting that makes it another model.
    """
    values = read_json(place)
    if values.get("model_type") != "gpt2":
        raise UserError(f"{place}: model_type is {clipped(values.get('model_type'))}: only gpt2 can be loaded")
    faults = [
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
            faults.append(f"{place}: {theirs} must be a whole number from 1 to {LARGEST[ours]:,}, not {clipped(value)}")
    if not faults and shape["n_embd"] % shape["n_head"]:
        faults.append(f"{place}: n_head {shape['n_head']} does not divide n_embd {shape['n_embd']}")
    if not faults and values.get("n_inner") not in (None, 4 * shape["n_embd"]):
        faults.append(f"{place}: n_inner is {clipped(values['n_inner'])}, in GPT-2 it is four times n_embd")
    if faults:
        raise UserError(*faults)
    return shape


# Published weights in a Hugging Face folder, read one tensor at a time.

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""Files with the weights, in the order of preference; each may be split into parts, listed in ``NAME.index.json``."""
_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
"""The causal mask, which older files contain as a weight."""


class PretrainedWeights:
    """The weights of a Hugging Face folder as canonical parameters; each call reads one.

    Args:
        folder: contains ``model.safetensors`` or ``pytorch_model.bin``, whole or in parts.
        config: the shape that the weights must have; None for that of ``config.json``.

    Raises:
        UserError: a file cannot be read, the model is no GPT-2, or tensors are missing, unknown, there twice or of
            another shape.
    """

    def __init__(self, folder: Path, config: GPT2Config | None = None) -> None:
        self.config = config = config or GPT2Config(**published_shape(folder / "config.json"))
        self.files = weight_files(folder)
        reader = open_safetensors if self.files[0].suffix == ".safetensors" else open_pickled
        self._stored: dict[str, StoredTensor] = {}
        for file in self.files:
            for name, tensor in reader(file).items():
                if (bare := name.removeprefix(PREFIX)) in self._stored:
                    twice = f"is there twice, with and without the prefix {PREFIX!r} or in two files"
                    unknown = "which of them belongs to the model is unknown"
                    raise UserError(f"{file}: {clipped_text(bare)} {twice}: {unknown}")
                self._stored[bare] = tensor
        self._shapes = parameter_shapes(config)
        stored, place = self._stored, self.files[0]
        expected = {_stored_name(name): hugging_face_shape(name, shape, config) for name, shape in self._shapes.items()}
        if HEAD in stored:
            expected[HEAD] = expected[_EMBEDDING]
        there = {name: stored[name] for name in expected if name in stored}
        problems = []
        if missing := [name for name in expected if name not in stored]:
            lacks = f"{', '.join(missing[:3])} is missing"
            problems.append(f"{place}: {lacks}: it must hold every weight that config.json announces")
        if extra := [name for name in stored if name not in expected and not _BUFFERS.fullmatch(name)]:
            problems.append(f"{place}: {', '.join(extra[:3])} is not a weight of a GPT-2 language model")
        problems += [
            f"{place}: {name} has the shape {list(tensor.shape)}, by config.json it must be {list(expected[name])}"
            for name, tensor in there.items()
            if tensor.shape != expected[name]
        ]
        unfit = "holds no floating-point numbers: quantized weights cannot be loaded"
        problems += [f"{place}: {name} {unfit}" for name, tensor in there.items() if tensor.dtype is None]
        if problems:
            raise UserError(*problems[:4])

    def __call__(self, name: str, shape: torch.Size) -> Tensor:
        """The canonical parameter ``name`` of ``shape``, fp32 on the CPU.

        Raises:
            UserError: the output head in the file differs from the embedding.
        """
        if tuple(shape) != tuple(self._shapes[name]):
            raise ValueError(f"{name} has the shape {tuple(self._shapes[name])}, but {tuple(shape)} was asked for")
        value = self._stored[_stored_name(name)].read()
        if name == _EMBEDDING and HEAD in self._stored and not torch.equal(self._stored[HEAD].read(), value):
            raise UserError(f"{self.files[0]}: {HEAD} differs from wte.weight: in GPT-2 they are the same tensor")
        if name == _EMBEDDING:
            return padded(value, self.config)
        return (value.t() if name.endswith(_TRANSPOSED) else value).float().contiguous()

    def tensors(self) -> dict[str, StoredTensor]:
        """All parameters by canonical name, not read yet."""
        return stored_in_fp32(self._shapes, lambda name: self(name, self._shapes[name]))

    def sha256(self, progress: Advance = lambda _: None) -> str:
        """The hash of the file; of several files, the hash of the lines that ``sha256sum`` prints for them."""
        hashes = {file.name: sha256_of(file, progress) for file in self.files}
        if len(hashes) == 1:
            return hashes[self.files[0].name]
        lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(hashes.items()))
        return hashlib.sha256(lines.encode()).hexdigest()

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(file.stat().st_size for file in self.files)


def weight_files(folder: Path) -> list[Path]:
    """The files with the weights of a Hugging Face folder.

    Raises:
        UserError: there are none, or a part is missing.
    """
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return [folder / name]
        if (index := folder / index_file(name)).is_file():
            parts = [folder / part for part in parts_of(index)]
            if missing := next((part for part in parts if not part.is_file()), None):
                raise UserError(f"{missing}: is missing, but {index.name} names it")
            return parts
    raise UserError(f"{folder}: holds neither {' nor '.join(WEIGHT_FILES)}")


def index_file(name: str) -> str:
    """The file that lists the parts of the weight file ``name``."""
    return f"{name}.index.json"


def parts_of(index: Path) -> list[str]:
    """The names of the parts that ``index`` lists; they are in the same folder.

    Raises:
        UserError: it is not such an index, or names a file elsewhere.
    """
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()) or not names:
        raise UserError(f"{index}: does not say which file holds which weight")
    parts = sorted(set(names.values()))
    for part in parts:
        if Path(part).name != part or len(part.encode()) > 255 or "\0" in part:
            raise UserError(f"{index}: names {clipped_text(part)}, which is not a file beside it")
    return parts


def _stored_name(name: str) -> str:
    return hugging_face_name(name).removeprefix(PREFIX)
