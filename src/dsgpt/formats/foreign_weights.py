"""Weights of nanoGPT, llm.c and Megatron-LM as canonical parameters, each read when it is asked for.

Written from what those projects say about their files:

* nanoGPT (``train.py``, ``model.py``): ``ckpt.pt``, a ``torch.save`` file with ``model_args`` and ``model``.
* llm.c (``train_gpt2.py: write_model``): 256 int32 (20240326; 3 for fp32 or 5 for bf16; positions, vocabulary, layers,
  heads, width, rows of the embedding), then every tensor, each kind with all layers together.
* Megatron-LM (``megatron/training/checkpointing.py``): ``mp_rank_00/model_optim_rng.pt``, a ``torch.save`` file with
  ``args``, ``model`` and ``checkpoint_version``, which says in which order queries, keys and values are. Of each tensor
  rank, and of each tensor rank and pipeline stage (``mp_rank_01_003``), there is a file.

Nothing in a file is executed: what a ``torch.save`` file names besides tensors becomes an ``_Inert``.
"""

import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from dsgpt.common.errors import UserError
from dsgpt.common.json_files import clipped, clipped_text
from dsgpt.formats.hugging_face import HEAD, hugging_face_name, padded
from dsgpt.formats.tensor_files import StoredTensor, stored_in_fp32
from dsgpt.formats.tokenizer_files import reason_of
from dsgpt.model.config import SHAPE_FLAGS, GPT2Config
from dsgpt.model.gpt2 import parameter_shapes

_LLMC_MAGIC, _LLMC_HEADER = 20240326, 256
_LLMC_DTYPES = {3: torch.float32, 5: torch.bfloat16}
_LLMC_ORDER = ("ln_1", "attn.qkv", "attn.proj", "ln_2", "mlp.fc", "mlp.proj")
_MEGATRON_NAMES = {
    **dict.fromkeys(("input_layernorm", "self_attention.linear_qkv.layer_norm"), "ln_1"),
    **dict.fromkeys((f"{name}attention.query_key_value" for name in ("", "self_")), "attn.qkv"),
    **dict.fromkeys(("attention.dense", "self_attention.dense", "self_attention.linear_proj"), "attn.proj"),
    **dict.fromkeys(("post_attention_layernorm", "pre_mlp_layernorm", "mlp.linear_fc1.layer_norm"), "ln_2"),
    **dict.fromkeys(("mlp.dense_h_to_4h", "mlp.linear_fc1"), "mlp.fc"),
    **dict.fromkeys(("mlp.dense_4h_to_h", "mlp.linear_fc2"), "mlp.proj"),
    "self_attention.linear_qkv": "attn.qkv",
}
"""Modules of a layer, in Megatron-LM's earlier and its core models."""
_MEGATRON_GPT2 = {
    "normalization": "LayerNorm",
    "layernorm_epsilon": 1e-5,
    "position_embedding_type": "learned_absolute",
    **dict.fromkeys(("swiglu", "squared_relu", "group_query_attention"), False),
    **dict.fromkeys(("untie_embeddings_and_output_weights", "apply_layernorm_1p"), False),
    "apply_residual_connection_post_layernorm": False,
    "add_bias_linear": True,
    "num_experts": None,
}
"""Arguments of a GPT-2; older releases lack some of them, with the same meaning."""
_MEGATRON_SPLIT = dict.fromkeys(("wte.weight", HEAD, "mlp.fc.weight", "mlp.fc.bias"), 0)
_MEGATRON_SPLIT |= dict.fromkeys(("attn.proj.weight", "mlp.proj.weight"), 1)
"""The dimension in which tensor ranks split a tensor that is not of queries, keys and values. Others are whole."""
_EXACT_GELU = (
    "{} computes GELU exactly, GPT-2 and this program by its tanh formula: an activation differs by up to 0.0005, so "
    "logits do slightly"
)


@dataclass(frozen=True, kw_only=True)
class ForeignModel:
    """A model of another trainer."""

    maker: str
    config: GPT2Config
    tensors: dict[str, StoredTensor]
    """By canonical name, fp32, not read yet."""
    note: str = ""
    """Where it computes something else than ours; empty if nowhere."""


class _Inert:
    """Stands for any object that a file names: it keeps the object's state, and does nothing."""

    def __init__(self, *_: object) -> None:
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


def open_foreign_weights(path: Path) -> ForeignModel:
    """The model in a file of nanoGPT, llm.c or Megatron-LM, which is recognized by its contents.

    Raises:
        UserError: it is none of them, is damaged, or its model is no GPT-2.
    """
    if not zipfile.is_zipfile(path):
        header = np.fromfile(path, dtype="<i4", count=_LLMC_HEADER).tolist()
        if len(header) == _LLMC_HEADER and header[0] == _LLMC_MAGIC:
            return _open_llmc(path, header)
        known = "nanoGPT's ckpt.pt, llm.c's .bin, Megatron-LM's"
        raise UserError(f"{path}: is neither a run folder nor a file of weights that is known: {known}")
    values = _loaded(path)
    if isinstance(values, dict) and isinstance(values.get("model"), dict):
        if isinstance(values.get("model_args"), dict):
            return _open_nanogpt(path, values)
        if isinstance(args := getattr(values.get("args"), "state", None), dict):
            return _open_megatron(path, values, args)
    raise UserError(f"{path}: has neither nanoGPT's model_args nor Megatron-LM's args beside a model")


def _loaded(path: Path) -> Any:
    """What ``torch.save`` wrote, its tensors not read yet."""
    try:
        named = get_unsafe_globals_in_checkpoint(path)
        with warnings.catch_warnings(action="ignore"), safe_globals([(_Inert, name) for name in named]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # the unpickler calls what the file says: any error may come from these calls
        raise UserError(f"{path}: is not a readable file of tensors ({reason_of(error)})") from error


def _open_nanogpt(path: Path, values: Mapping[str, Any]) -> ForeignModel:
    args = values["model_args"]
    config = _config(path, {name: args.get(name) for name in SHAPE_FLAGS})
    stored = {name.removeprefix("_orig_mod."): value for name, value in values["model"].items()}
    ours = {hugging_face_name(name): name for name in parameter_shapes(config)}
    head, embedding = stored.pop(HEAD, None), stored.get(hugging_face_name("wte.weight"))
    if isinstance(head, Tensor) and isinstance(embedding, Tensor) and not torch.equal(head, embedding):
        raise UserError(f"{path}: {HEAD} differs from the embedding, which is the head of a GPT-2")
    found = {
        ours.get(name, name): value
        for name, value in stored.items()
        if not re.fullmatch(r"transformer\.h\.\d+\.attn\.bias", name)  # the causal mask
    }
    if args.get("bias") is False:  # without biases, which is the same as biases of zero
        lacking = {name: shape for name, shape in parameter_shapes(config).items() if name.endswith(".bias")}
        found |= {name: torch.zeros(shape) for name, shape in lacking.items() if name not in found}
    return _model(path, "nanoGPT", config, found, note=_EXACT_GELU.format("nanoGPT"))


def _open_llmc(path: Path, header: list[int]) -> ForeignModel:
    names = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
    config, dtype = _config(path, dict(zip(names, header[2:7], strict=True))), _LLMC_DTYPES.get(header[1])
    if dtype is None:
        raise UserError(f"{path}: is of llm.c's version {header[1]}; 3 (fp32) and 5 (bf16) can be read")
    shapes = parameter_shapes(config) | {"wte.weight": torch.Size((header[7], config.n_embd))}
    order = ["wte.weight", "wpe.weight"]
    for module in _LLMC_ORDER:
        order += [f"blocks.{layer}.{module}.{kind}" for kind in ("weight", "bias") for layer in range(config.n_layer)]
    order += ["ln_f.weight", "ln_f.bias"]
    start, needed = 4 * _LLMC_HEADER // dtype.itemsize, sum(shapes[name].numel() for name in order)
    size, announced = path.stat().st_size, (start + needed) * dtype.itemsize
    if size != announced:
        raise UserError(f"{path}: has {size:,} bytes, by its header {announced:,}: it is cut off")
    numbers, found = torch.from_file(str(path), shared=False, size=start + needed, dtype=dtype), {}
    for name in order:
        found[name] = numbers[start : start + shapes[name].numel()].view(shapes[name])
        start += shapes[name].numel()
    return _model(path, "llm.c", config, found)


def _open_megatron(path: Path, values: Mapping[str, Any], args: Mapping[str, Any]) -> ForeignModel:
    others = [
        f"{path}: its {name} is {clipped(args[name])}, in a GPT-2 it is {value}"
        for name, value in _MEGATRON_GPT2.items()
        if args.get(name, value) != value
    ]
    if others:
        raise UserError(*others)
    tensor = args.get("tensor_model_parallel_size") or args.get("model_parallel_size") or 1
    pipeline = args.get("pipeline_model_parallel_size") or 1
    if not all(isinstance(size, int) and size > 0 for size in (tensor, pipeline)):
        raise UserError(f"{path}: was written by {clipped(tensor)} times {clipped(pipeline)} ranks, which is no number")
    parts: dict[str, list[Tensor]] = {}  # of each tensor rank
    layers = 0
    for stage in range(pipeline):
        for rank in range(tensor):
            folder = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline > 1 else "")
            file = path.absolute().parent.parent / folder / path.name
            own: Any = values if tensor * pipeline == 1 else _loaded(file)
            same = isinstance(own, dict) and str(own.get("iteration")) == str(values.get("iteration"))
            if not same or not isinstance(own.get("model"), dict):
                raise UserError(f"{file}: is not of the checkpoint of {path}")
            for name, value in _flat(own["model"]).items():
                parts.setdefault(_megatron_name(name, first=layers), []).append(value)
        layers = 1 + max((int(name.split(".")[1]) for name in parts if name.startswith("blocks.")), default=-1)
    tables = [[one for one in parts.get(name, ()) if one.ndim == 2] for name in ("wte.weight", "wpe.weight")]
    shape = {"n_layer": layers, "n_head": args.get("num_attention_heads"), "vocab_size": sum(map(len, tables[0]))}
    sizes = [one[0].shape if one else (None, None) for one in tables]
    config = _config(path, shape | {"n_embd": sizes[0][1], "block_size": sizes[1][0]})
    version = values.get("checkpoint_version") or 0

    def joined(name: str, values: list[Tensor]) -> Tensor:
        """A tensor from its parts; queries, keys and values one after the other, each with all its heads."""
        dim, rows = _MEGATRON_SPLIT.get(".".join(name.split(".")[-3:])), values[0].shape[1:]
        if ".attn.qkv." in name:
            heads, size = config.n_head // tensor, config.n_embd // config.n_head
            if version >= 2:
                values = [value.view(heads, 3, size, -1).transpose(0, 1) for value in values]
            elif version >= 1:
                values = [value.view(heads, size, 3, -1).permute(2, 0, 1, 3) for value in values]
            return torch.cat([value.reshape(3, heads * size, -1) for value in values], 1).reshape(-1, *rows)
        return values[0] if dim is None or tensor == 1 else torch.cat(values, dim)

    found: dict[str, Tensor] = {}
    for name, each in parts.items():
        try:
            found[name] = joined(name, each if len(each) == tensor else [])
        except (RuntimeError, IndexError) as error:
            shapes = clipped([list(value.shape) for value in each])
            raise UserError(f"{path}: {clipped_text(name)} has parts that make no tensor: {shapes}") from error
    if (head := found.pop(HEAD, None)) is not None and not torch.equal(head, found.get("wte.weight", head)):
        raise UserError(f"{path}: the last stage's embedding differs from the first one's")
    tanh = args.get("bias_gelu_fusion") or args.get("openai_gelu")
    note = "" if tanh else _EXACT_GELU.format("Megatron-LM without --bias-gelu-fusion")
    return _model(path, f"Megatron-LM, checkpoint version {version:g}", config, found, note=note)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """The tensors of nested dicts, by their names with dots."""
    found: dict[str, Tensor] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor) and not name.endswith("_extra_state"):
            found[f"{prefix}{name}"] = value
    return found


def _megatron_name(name: str, *, first: int) -> str:
    """The canonical name of a parameter, whose stage begins with layer ``first``; its own if no GPT-2 has it."""
    bare = re.sub(r"^(module\.)?(language_model\.)?((transformer|encoder|decoder)\.)?", "", name)
    bare = bare.replace(".layer_norm_", ".layer_norm.")
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", bare):
        layer, module, kind = match.groups()
        return f"blocks.{first + int(layer)}.{_MEGATRON_NAMES[module]}.{kind}" if module in _MEGATRON_NAMES else name
    outside = {"embedding.word_embeddings": "wte", "embedding.position_embeddings": "wpe", "final_layernorm": "ln_f"}
    outside |= dict.fromkeys(("word_embeddings_for_head", "output_layer"), HEAD.removesuffix(".weight"))
    module, _, kind = bare.rpartition(".")
    return f"{outside[module]}.{kind}" if module in outside else name


def _config(path: Path, shape: Mapping[str, Any]) -> GPT2Config:
    if not all(isinstance(value, int) for value in shape.values()):
        raise UserError(f"{path}: does not give the model's shape: {clipped(dict(shape))}")
    try:
        return GPT2Config(**shape)
    except ValueError as error:
        raise UserError(f"{path}: has an impossible shape: {error}") from error


def _model(path: Path, maker: str, config: GPT2Config, found: Mapping[str, Tensor], *, note: str = "") -> ForeignModel:
    """The model with the parameters ``found``, in fp32 and the embedding's rows beyond the vocabulary zero.

    Raises:
        UserError: one is missing, unknown, of another shape, or of no type of weights.
    """
    shapes = parameter_shapes(config)
    problems = [f"{path}: {name} is missing" for name in shapes if name not in found]
    problems += [f"{path}: {clipped_text(name)} is no weight of a GPT-2" for name in found if name not in shapes]
    for name, shape in shapes.items():
        value = found[name][: config.vocab_size] if name == "wte.weight" and name in found else found.get(name)
        rows = config.vocab_size if name == "wte.weight" else shape[0]
        if value is None or (value.is_floating_point() and value.shape == (rows, *shape[1:])):
            continue
        is_now = f"the shape {list(value.shape)} and the type {value.dtype}"
        problems.append(f"{path}: {name} has {is_now}, not {list(shape)}")
    if problems:
        raise UserError(*problems[:4])

    def read(name: str) -> Tensor:
        value = found[name].float()
        return padded(value, config) if name == "wte.weight" else value.clone()

    return ForeignModel(maker=maker, config=config, tensors=stored_in_fp32(shapes, read), note=note)
