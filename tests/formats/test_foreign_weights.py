"""Files of nanoGPT, llm.c and Megatron-LM, made by their public layouts: the same logits, and nothing is executed."""

import argparse
import itertools
import os
import re
import shutil
import struct
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from published import drawn
from small_run import random_ids

from dsgpt.common.errors import UserError
from dsgpt.formats import foreign_weights
from dsgpt.formats.hugging_face import hugging_face_name
from dsgpt.inference.model_files import build_model, export, open_model
from dsgpt.machine.console import Console
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2

SHAPE = {"n_layer": 2, "n_head": 4, "n_embd": 24, "block_size": 16, "vocab_size": 101}
IDS = torch.from_numpy(random_ids(32, below=101)).view(2, 16)
MARK = Path("executed")


class Harmful:
    """Writes a file when it is unpickled."""

    def __reduce__(self):
        return (shutil.copy, (__file__, str(MARK)))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GPT2:
    """A model whose every parameter is random; only ids of the vocabulary have rows that are not zero."""
    monkeypatch.chdir(tmp_path)
    made: GPT2 = drawn(GPT2(GPT2Config(**SHAPE)))
    with torch.no_grad():
        made.wte.weight[101:] = 0
    return made


def values_of(model: GPT2) -> dict[str, torch.Tensor]:
    """The parameters without the padding, whose rows and columns are those of ``nn.Linear`` in all three projects."""
    return {name: value.detach()[: 101 if name == "wte.weight" else None] for name, value in model.named_parameters()}


def nanogpt(model: GPT2, path: Path, *, bias: bool = True) -> Path:
    weights = {f"_orig_mod.{hugging_face_name(name)}": value for name, value in values_of(model).items()}
    if not bias:
        weights = {name: value for name, value in weights.items() if not name.endswith(".bias")}
    weights |= {"_orig_mod.lm_head.weight": values_of(model)["wte.weight"]}
    weights["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
    about = {"iter_num": 3, "best_val_loss": torch.tensor(2.5), "config": {"dataset": "x"}, "optimizer": {"state": {}}}
    torch.save({"model": weights, "model_args": {**SHAPE, "bias": bias, "dropout": 0.1}, **about}, path)
    return path


def llmc(model: GPT2, path: Path, version: int) -> Path:
    values, dtype = values_of(model), {3: torch.float32, 5: torch.bfloat16}[version]
    values["wte.weight"] = torch.cat([values["wte.weight"], torch.full((27, 24), 7.0)])  # its padding is not read
    order = ["wte.weight", "wpe.weight"]
    for part in ("ln_1", "attn.qkv", "attn.proj", "ln_2", "mlp.fc", "mlp.proj"):
        order += [f"blocks.{layer}.{part}.{kind}" for kind in ("weight", "bias") for layer in (0, 1)]
    order += ["ln_f.weight", "ln_f.bias"]
    header = struct.pack("<8i", 20240326, version, 16, 101, 2, 4, 24, 128).ljust(1024, b"\0")
    path.write_bytes(header + b"".join(values[name].to(dtype).contiguous().view(torch.uint8).numpy() for name in order))
    return path


LEGACY = {"ln_1": "input_layernorm", "attn.qkv": "attention.query_key_value", "attn.proj": "attention.dense"}
LEGACY |= {"ln_2": "post_attention_layernorm", "mlp.fc": "mlp.dense_h_to_4h", "mlp.proj": "mlp.dense_4h_to_h"}
WORDS = {"word": "wte", "position": "wpe"}
CORE = {"ln_1": "self_attention.linear_qkv.layer_norm", "attn.qkv": "self_attention.linear_qkv"}
CORE |= {"attn.proj": "self_attention.linear_proj", "ln_2": "mlp.linear_fc1.layer_norm"}
CORE |= {"mlp.fc": "mlp.linear_fc1", "mlp.proj": "mlp.linear_fc2"}


def megatron(
    model: GPT2 | dict[str, torch.Tensor],
    path: Path,
    version: float | None,
    *,
    core: bool = False,
    heads: int = 4,
    **args: object,
) -> Path:
    """Rows of ``qkv`` are [3, heads, size] before version 1, [heads, size, 3] in it, and [heads, 3, size] after it."""
    layers, ends = {}, {}
    for name, value in (model if isinstance(model, dict) else values_of(model)).items():
        if not name.startswith("blocks."):
            ends[name] = value
            continue
        _, layer, module = name.rpartition(".")[0].split(".", 2)
        stored = value
        if module == "attn.qkv" and version:
            rows = value.view(3, heads, 6, -1)
            stored = (rows.permute(1, 2, 0, 3) if version == 1 else rows.transpose(0, 1)).reshape(value.shape)
        joint = "_" if core and module.startswith("ln_") else "."
        layers[f"layers.{layer}.{(CORE if core else LEGACY)[module]}{joint}{name.rpartition('.')[2]}"] = stored
    layers |= {f"final_layernorm.{kind}": ends[f"ln_f.{kind}"] for kind in ("weight", "bias") if f"ln_f.{kind}" in ends}
    words = {f"{name}_embeddings": ends[f"{short}.weight"] for name, short in WORDS.items() if "wpe.weight" in ends}
    if core:
        weights = {f"decoder.{name}": value for name, value in layers.items()} | {"decoder._extra_state": None}
        weights = OrderedDict(weights | {f"embedding.{name}.weight": value for name, value in words.items()})
    else:
        embedding = {name: {"weight": value} for name, value in words.items()}
        weights = {"language_model": {"embedding": embedding, "encoder": layers}}
    if "wpe.weight" not in ends:  # the last of several stages
        head = {"weight": ends["wte.weight"]}
        weights |= {"output_layer.weight": head["weight"]} if core else {"word_embeddings_for_head": head}
    given = {"num_attention_heads": 4, "tensor_model_parallel_size": 1, "bias_gelu_fusion": True} | args
    about = {"args": argparse.Namespace(**given), "iteration": 7, "rng_state": [Harmful()]}
    about |= {} if version is None else {"checkpoint_version": version}
    torch.save({"model": weights, **about}, path)
    return path


def split_megatron(model: GPT2, folder: Path, tensor: int, pipeline: int, version: float | None, core: bool) -> Path:
    """The files of all ranks, by the public layout: no rank of Megatron-LM itself can run here.

    Ranks have rows of the embedding and of column-parallel layers, columns of row-parallel weights, and whole heads. A
    stage counts its layers from 0; the last one has a copy of the embedding.
    """
    for rank, stage in itertools.product(range(tensor), range(pipeline)):
        values = {}
        for name, value in values_of(model).items():
            layer = re.match(r"blocks\.(\d+)", name)
            owners = {int(layer[1]) * pipeline // 2} if layer else {pipeline - 1 if "ln_f" in name else 0}
            if stage not in owners | ({pipeline - 1} if name == "wte.weight" else set()):
                continue
            if "qkv" in name:
                part = value.view(3, 4, -1).chunk(tensor, 1)[rank].reshape(-1, *value.shape[1:])
            elif name.startswith("wte") or "mlp.fc" in name:
                part = value.chunk(tensor)[rank]
            else:
                part = value.chunk(tensor, 1)[rank] if name.endswith("proj.weight") else value
            values[name.replace("blocks.1", "blocks.0") if pipeline > 1 else name] = part.clone()
        place = folder / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline > 1 else "")) / "model_optim_rng.pt"
        place.parent.mkdir(parents=True)
        sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
        megatron(values, place, version, core=core, heads=4 // tensor, **sizes)
    return place


def logits_of(source: Path) -> torch.Tensor:
    """Logits of the Hugging Face folder that ``convert.py`` makes of ``source``."""
    out = source.with_suffix(".hf")
    export(source, out, form="hf", dtype="fp32", which="latest", console=Console(speaks=False))
    stored = open_model(out, which="latest", flag="--checkpoint")
    weights = {name: tensor.read() for name, tensor in stored.tensors.items()}
    with torch.no_grad():
        return build_model(stored.config, weights, device=torch.device("cpu"))(IDS)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: nanogpt(model, Path("ckpt.pt")),
        lambda model: llmc(model, Path("gpt2.bin"), 3),
        *(
            lambda model, version=version: megatron(model, Path("m.pt"), version)
            for version in (None, 0, 1.0, 2.0, 3.0)
        ),
        lambda model: megatron(model, Path("core.pt"), 3.0, core=True),
        *(
            lambda model, form=form: split_megatron(model, Path("iter_0000007"), *form)
            for form in (
                (2, 2, 3.0, False),
                (2, 2, 3.0, True),
                (4, 1, 1.0, False),
                (2, 1, None, False),
                (1, 2, 2.0, True),
            )
        ),
    ],
    ids=[
        *("nanoGPT", "llm.c", *(f"Megatron-LM {version}" for version in (None, 0, 1, 2, 3)), "Megatron core"),
        *("2 x 2 ranks", "2 x 2 ranks, core", "4 tensor ranks", "2 tensor ranks", "2 stages, core"),
    ],
)
def test_logits_are_those_of_the_model(model: GPT2, make):
    with torch.no_grad():
        expected = model(IDS)
    torch.testing.assert_close(logits_of(make(model)), expected, rtol=0, atol=1e-6)
    assert not MARK.exists()


def test_without_biases_and_in_bf16(model: GPT2):
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(value.bfloat16())
            if name.endswith(".bias"):
                value.zero_()
        expected = model(IDS)
    for source in (nanogpt(model, Path("ckpt.pt"), bias=False), llmc(model, Path("gpt2.bin"), 5)):
        torch.testing.assert_close(logits_of(source), expected, rtol=0, atol=1e-6)


def test_what_the_note_says(model: GPT2, capsys):
    """nanoGPT, and Megatron-LM without its fused bias and GELU, compute the exact GELU; the others the tanh formula."""
    for said, source in {
        "nanoGPT computes GELU exactly": nanogpt(model, Path("ckpt.pt")),
        "Megatron-LM without --bias-gelu-fusion": megatron(model, Path("m.pt"), 3, bias_gelu_fusion=False),
        "": llmc(model, Path("gpt2.bin"), 3),
    }.items():
        assert foreign_weights.open_foreign_weights(source).note.startswith(said)
    export(Path("ckpt.pt"), Path("out"), form="hf", dtype="fp32", which="latest", console=Console(speaks=True))
    said = capsys.readouterr().out
    assert "ckpt.pt (nanoGPT): " in said and "note        nanoGPT computes GELU" in said and "none in the file" in said


class Worse:
    """Calls the shell when it is unpickled."""

    def __reduce__(self):
        return (os.system, (f"touch {MARK}",))


def refused(source: Path) -> str:
    with pytest.raises(UserError) as error:
        foreign_weights.open_foreign_weights(source)
    return str(error.value)


def test_other_models_and_damaged_files_are_refused(model: GPT2):
    post = refused(megatron(model, Path("m.pt"), 3, apply_residual_connection_post_layernorm=True))
    assert "apply_residual_connection_post_layernorm is True" in post
    both = refused(megatron(model, Path("m.pt"), 3, add_bias_linear=False, swiglu=True)).splitlines()
    assert [line.partition(": its ")[2] for line in both] == [
        "swiglu is True, in a GPT-2 it is False",
        "add_bias_linear is False, in a GPT-2 it is True",
    ]
    whole = llmc(model, Path("gpt2.bin"), 3)
    data = whole.read_bytes()
    for damaged, said in (
        (data[:-4], "it is cut off"),
        (data[:4] + b"\2" + data[5:], "is of llm.c's version 2; 3 (fp32) and 5 (bf16) can be read"),
        (data[:20] + b"\5" + data[21:], "has an impossible shape"),
        (b"\0" * 2000, "nor a file of weights that is known"),
    ):
        whole.write_bytes(damaged)
        assert said in refused(whole)
    torch.save({"model": {}, "args": Worse()}, "worse.pt")
    assert "is not a readable file of tensors" in refused(Path("worse.pt")) and not MARK.exists()
    place = split_megatron(model, Path("iter_0000007"), 2, 1, 3.0, core=False)
    first = place.parents[1] / "mp_rank_00" / place.name
    torch.save(torch.load(first, weights_only=False) | {"iteration": 8}, first)
    assert f"{first.absolute()}: is not of the checkpoint of {place}" in refused(place)
    first.unlink()
    assert f"{first.absolute()}: is not a readable file of tensors ([Errno 2] No such file" in refused(place)
    torch.save({"weights": torch.zeros(2)}, "other.pt")
    assert "has neither nanoGPT's model_args nor Megatron-LM's args" in refused(Path("other.pt"))
    values = torch.load(nanogpt(model, Path("ckpt.pt")))
    values["model"]["_orig_mod.lm_head.weight"] = torch.ones(101, 24)
    torch.save(values, "untied.pt")
    assert "lm_head.weight differs from the embedding" in refused(Path("untied.pt"))
    values = torch.load("ckpt.pt")
    values["model"]["extra"] = values["model"].pop("_orig_mod.transformer.ln_f.bias")[:3]
    values["model"]["_orig_mod.transformer.wpe.weight"] = torch.zeros(15, 24)
    torch.save(values, "ckpt.pt")
    assert [
        line.partition(": ")[2].partition(" and the type")[0] for line in refused(Path("ckpt.pt")).splitlines()
    ] == ["ln_f.bias is missing", "extra is no weight of a GPT-2", "wpe.weight has the shape [15, 24]"]
