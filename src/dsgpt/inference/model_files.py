"""A model in files: found and verified, loaded, and written for other tools.

Exports are in Hugging Face's layout, DeepSpeed's, or this project's own. Tensors are copied from file to file one at a
time, on the CPU, without a network. The folder appears complete or not at all.
"""

import os
import shutil
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsgpt.checkpoints import store
from dsgpt.checkpoints.manifest import MANIFEST, FileFacts, Manifest, parse_manifest, read_manifest
from dsgpt.checkpoints.pieces import open_weights
from dsgpt.checkpoints.store import find_checkpoint, is_hugging_face, is_model_file, open_model_files
from dsgpt.checkpoints.training_state import COUNTERS, StateReader, is_state_file, save_pickled, state_files
from dsgpt.common.errors import Problems, UserError
from dsgpt.common.files import Advance, sync_directory, write_json_atomic
from dsgpt.common.json_files import read_json
from dsgpt.common.text import next_line, script_words
from dsgpt.formats.foreign_weights import ForeignModel, open_foreign_weights
from dsgpt.formats.hugging_face import PretrainedWeights, hugging_face_config, hugging_face_name, hugging_face_tensor
from dsgpt.formats.tensor_files import DTYPES, StoredTensor, write_safetensors
from dsgpt.formats.tokenizer_files import SETTINGS, end_ids, end_of_text_id, fault_of, open_tokenizer, tokenizer_files
from dsgpt.machine.console import Console
from dsgpt.machine.device import cuda_devices, slow_precision
from dsgpt.model.config import GPT2Config, decays
from dsgpt.model.gpt2 import GPT2

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model in files: verified, and not read yet."""

    source: Path
    """The checkpoint, the portable folder or the Hugging Face folder."""
    config: GPT2Config
    tensors: dict[str, StoredTensor]
    """Tensors by canonical name."""
    folder: Path | None
    """Folder of the tokenizer; None if there is none."""
    ends: tuple[int, ...] = ()
    """Ids that end a text, besides the tokenizer's own."""
    manifest: Manifest | None = None
    """Manifest of the checkpoint or portable folder; None for a Hugging Face folder."""
    published: PretrainedWeights | None = None
    """Weights of a Hugging Face folder; None for other folders."""
    foreign: ForeignModel | None = None
    """A file of another trainer; None for folders."""

    @cached_property
    def refused(self) -> str:
        """Why its tokenizer must not be used; empty where it may."""
        folder = self.source if self.published else self.folder
        fault = fault_of(folder, named=self.published is not None) if folder else None
        return f"{folder}: {fault}" if fault else ""

    @property
    def tokenizer(self) -> list[Path]:
        """The tokenizer's files; empty if there is none, or it must not be used."""
        if self.folder is None or self.refused:
            return []
        return tokenizer_files(self.folder, config=self.manifest is not None)


def open_model(source: Path, *, which: str, flag: str, console: Console | None = None) -> StoredModel:
    """Find and verify the model in ``source``.

    Args:
        source: a run folder, a checkpoint of any strategy, a portable folder, a Hugging Face folder of a GPT-2, or a
            file of nanoGPT, llm.c or Megatron-LM.
        which: the checkpoint of a run folder: ``latest`` or ``best``.
        flag: the flag that ``source`` was given with, for messages.
        console: shows the progress.

    Raises:
        UserError: there is no usable model.
    """
    if source.is_file():
        foreign = open_foreign_weights(source)
        return StoredModel(source=source, config=foreign.config, tensors=foreign.tensors, folder=None, foreign=foreign)
    if is_hugging_face(source):
        if which == "best":
            raise UserError(f"{flag} {source}: is a Hugging Face folder; --which best needs a run folder")
        published, ends = PretrainedWeights(source), end_ids(source)
        config, tensors = published.config, published.tensors()
        folder = source if tokenizer_files(source, config=False) else None
        return StoredModel(source=source, config=config, tensors=tensors, folder=folder, ends=ends, published=published)
    source = find_checkpoint(source, which=which, flag=flag)
    size = sum(facts.size for name, facts in parse_manifest(source).files.items() if is_model_file(name))
    progress = (console or Console(speaks=False)).progress(total=size, what="verifying", unit="B", lines=True)
    files = open_model_files(source, progress=progress.advance)
    progress.close()
    config, tensors = files.config, open_weights(files)
    return StoredModel(source=source, config=config, tensors=tensors, folder=files.tokenizer, manifest=files.manifest)


def build_model(
    config: GPT2Config, weights: Mapping[str, Tensor], *, device: torch.device, dtype: torch.dtype = torch.float32
) -> GPT2:
    """The model in evaluation mode, with ``weights``, every weight whole on the CPU by its canonical name."""
    with torch.device("meta"):
        model = GPT2(config)
    model.load_state_dict({**weights, "lm_head.weight": weights["wte.weight"]}, assign=True)
    model.lm_head.weight = model.wte.weight
    return model.to(device=device, dtype=dtype).eval()


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model in evaluation mode and its tokenizer."""

    model: GPT2
    tokenizer: "PreTrainedTokenizerBase | None"
    stored: StoredModel

    def needed_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer.

        Raises:
            UserError: there is none.
        """
        if self.tokenizer is None:
            why = ", because its training data had none" if self.stored.manifest else ""
            raise UserError(f"{self.stored.source}: has no tokenizer{why}: cannot read text")
        return self.tokenizer


def load(path: Path, *, which: str, device: torch.device, precision: str) -> Loaded:
    """Verify and read the model in ``path``, as ``open_model``, which ``--checkpoint`` named.

    Args:
        path: the folder.
        which: the checkpoint of a run folder.
        device: where the model goes.
        precision: ``fp32``, ``bf16`` or ``fp16``.

    Raises:
        UserError: there is no usable model, a weight is not finite, or its tokenizer cannot be used.
    """
    stored = open_model(path, which=which, flag="--checkpoint")
    tokenizer = None
    if stored.folder is not None:
        tokenizer = open_tokenizer(stored.folder, what=str(stored.folder), named=stored.manifest is None)
    weights = {name: tensor.read() for name, tensor in stored.tensors.items()}
    model = build_model(stored.config, weights, device=device, dtype=DTYPES[precision])
    for name, value in model.named_parameters():
        if not torch.isfinite(value).all():
            values = f"values that are NaN or infinite in {precision}"
            raise UserError(f"--checkpoint {path}: {name} holds {values}: it is unusable")
    return Loaded(model=model, tokenizer=tokenizer, stored=stored)


def device_for(kind: str, *, precision: str, problems: Problems) -> torch.device:
    """The device that ``--device`` names; what it cannot do is noted in ``problems``.

    Prints a line to standard error if it computes slowly in ``precision``.
    """
    if kind == "cuda" and not cuda_devices():
        problems.add("--device cuda: PyTorch sees no NVIDIA GPU here; use --device cpu")
    device = torch.device("cuda" if kind != "cpu" and cuda_devices() else "cpu")
    if precision == "fp16" and device.type == "cpu":
        problems.add("--precision fp16 needs a GPU: use fp32 or bf16 on a CPU")
    if line := slow_precision(precision, device=device.type):
        print(f"note: {line}", file=sys.stderr)
    return device


# Exports.

_LAYOUTS = {"hf": "Hugging Face", "portable": "portable", "deepspeed": "DeepSpeed"}
"""Names of ``commands.EXPORT_FORMS`` in messages."""


def export(source: Path, out: Path, *, form: str, dtype: str, which: str, console: Console) -> None:
    """Write the model of ``source`` into the new folder ``out``.

    Args:
        source: a run folder, a checkpoint, an exported ``portable`` folder, or a Hugging Face folder of a GPT-2.
        out: must not exist, or be empty.
        form: one of ``commands.EXPORT_FORMS``.
        dtype: ``fp32``, ``bf16`` or ``fp16``.
        which: the ``latest`` or the ``best`` checkpoint of a run.
        console: shows what is read and written.

    Raises:
        UserError: the model is unusable, there is no place for ``out``, or the dtype cannot hold the values.
    """
    problems = Problems()
    if form == "deepspeed" and dtype != "fp32":
        problems.add(f"--dtype {dtype}: DeepSpeed keeps its master weights in fp32: leave --dtype out")
    place, is_folder = _nearest(out.absolute().parent), out.is_dir() and not out.is_symlink()
    if is_folder and any(out.iterdir()):
        problems.add(f"{out}: is not empty: name a folder that does not exist yet")
    elif os.path.lexists(out) and not is_folder:
        problems.add(f"{out}: exists and is not a folder: name one that does not exist yet")
    elif not place.is_dir():
        problems.add(f"{out}: {place} is a file, not a folder: name another folder")
    elif not os.access(place, os.W_OK | os.X_OK):
        problems.add(f"{out}: no permission to write in {place}: name another folder")
    with problems.collect():
        model = open_model(source, which=which, flag="--from", console=console)
    problems.raise_if_any()
    write_model(model, out, form=form, dtype=dtype, console=console)


def write_model(model: StoredModel, out: Path, *, form: str, dtype: str, console: Console) -> None:
    """Write an opened model into the new folder ``out``; see ``export``.

    Raises:
        UserError: there is no room for it, the file system refuses, the dtype cannot hold the values, or moments are
            missing or damaged.
    """
    tensors = {name: _in_dtype(name, tensor, dtype) for name, tensor in model.tensors.items()}
    model = replace(model, tensors=tensors)
    size = needed = sum(tensor.bytes for tensor in tensors.values())
    write: Callable[..., None] = partial(_write_hugging_face if form == "hf" else _write_portable, dtype=dtype)
    if form == "deepspeed":
        moments: Moments = {}
        optimizer_steps: int | None = None
        if model.manifest is not None and COUNTERS in model.manifest.files:
            read_manifest(model.source, only=is_state_file)
            model.manifest.require(model.source, state_files(model.source))
            state = StateReader(model.source)
            moments = {key: state.stored(key) for key in state.index.moments}
            optimizer_steps = state.counters.optimizer_steps
        size += sum(tensor.bytes for values in moments.values() for tensor in values.values())
        # Both files hold the weights, and one the embedding twice. Flat copies of everything exist for a while.
        needed += tensors[_EMBEDDING].bytes + 2 * size
        write = partial(_write_deepspeed, moments=moments, optimizer_steps=optimizer_steps)
    place = _nearest(out)
    if (free := shutil.disk_usage(place).free) < needed:
        raise UserError(f"{out}: needs {needed / 1e9:.2f} GB, and {place} has {free / 1e9:.2f} GB free")
    maker = f" ({model.foreign.maker})" if model.foreign else "" if model.manifest else " (Hugging Face)"
    if model.manifest and model.manifest.strategy:
        maker = f" ({model.manifest.strategy}, step {model.manifest.step})"
    console.say(f"from        {model.source}{maker}: {model.config.parameter_count():,} parameters")
    progress = console.progress(total=size, what="writing", unit="B", lines=True)
    _write_folder(out, partial(write, model=model, progress=progress.advance))
    progress.close()
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    console.say(f"to          {out}: {_LAYOUTS[form]}, {dtype}, {written / 1e6:,.1f} MB")
    if model.foreign and model.foreign.note:
        console.say(f"note        {model.foreign.note}")
    if model.refused:
        console.say(f"tokenizer   left out: {model.refused}")
    elif form == "deepspeed":
        console.say(f"use it      .venv/bin/python -m deepspeed.utils.zero_to_fp32 {out} WEIGHTS")
    elif model.foreign:
        console.say("tokenizer   none in the file: copy the one that made the ids into the folder")
    elif not model.tokenizer:
        console.say("tokenizer   none, because the training data had none: the model reads and writes only ids")
    elif form == "hf":
        line = f'AutoModelForCausalLM.from_pretrained("{out}"), AutoTokenizer.from_pretrained("{out}")'
        console.say(f"use it      {line}")
    else:
        console.say(next_line(script_words("src/generate.py", "--checkpoint", out, "--prompt", "The")))


def _in_dtype(name: str, stored: StoredTensor, dtype: str) -> StoredTensor:
    def read() -> Tensor:
        value = stored.read()
        converted = value.to(DTYPES[dtype])
        if not torch.isfinite(converted).all():
            if torch.isfinite(value).all():
                raise UserError(f"{dtype} cannot hold {name}, which reaches {value.abs().max():.3g}: use --dtype fp32")
            raise UserError(f"{name} holds values that are NaN or infinite: these weights are unusable")
        return converted

    return replace(stored, dtype=DTYPES[dtype], read=read)


def _nearest(path: Path) -> Path:
    """``path``, or the nearest folder above it that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def _write_folder(out: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a hidden folder, which is then renamed to ``out``; after an error it is removed.

    Raises:
        UserError: the file system refuses.
    """
    target = out.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = target.with_name(f".{target.name}-{uuid.uuid4().hex}.partial")
        folder.mkdir()
    except OSError as error:
        raise UserError(f"{out}: cannot be made ({error.strerror}): name another folder") from error
    try:
        write(folder)
        sync_directory(folder)
        folder.rename(target)  # replaces an empty folder
        sync_directory(target.parent)
    except OSError as error:
        raise UserError(f"{out}: could not be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# Hugging Face's layout, and this project's own.


def _write_hugging_face(folder: Path, model: StoredModel, *, dtype: str, progress: Advance) -> None:
    for path in model.tokenizer:
        shutil.copyfile(path, folder / path.name)
    if (end_of_text := end_of_text_id(folder)) is not None and end_of_text >= model.config.vocab_size:
        end_of_text = None
    settings = folder / SETTINGS
    if settings.is_file():  # users of the tokenizer need the model's context length
        write_json_atomic(settings, read_json(settings) | {"model_max_length": model.config.block_size})
    laid_out = ((name, hugging_face_tensor(name, each, model.config)) for name, each in model.tensors.items())
    tensors = {hugging_face_name(name): each for name, each in laid_out}
    write_safetensors(folder / "model.safetensors", tensors, progress=progress, format="pt")
    write_json_atomic(folder / "config.json", hugging_face_config(model.config, dtype=dtype, end_of_text=end_of_text))
    ends = {"bos_token_id": end_of_text, "eos_token_id": list(model.ends) if len(model.ends) > 1 else end_of_text}
    write_json_atomic(folder / "generation_config.json", {"_from_model_config": True, **ends})


def _write_portable(folder: Path, model: StoredModel, *, dtype: str, progress: Advance) -> None:
    _write_shape_and_tokenizer(folder, model)
    write_safetensors(folder / store.WEIGHTS, model.tensors, progress=progress)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): asdict(FileFacts.synced(path)) for path in paths}
    about = {key: getattr(model.manifest, key, None) for key in ("step", "strategy", "run_id")}
    if model.published is not None:
        about |= {"source": model.source.name, "source_sha256": model.published.sha256()}
    write_json_atomic(folder / MANIFEST, {"portable": "weights", "dtype": dtype, **about, "files": files})


def _write_shape_and_tokenizer(folder: Path, model: StoredModel) -> None:
    if model.tokenizer:
        (folder / store.TOKENIZER).mkdir()
    for path in model.tokenizer:
        shutil.copyfile(path, folder / store.TOKENIZER / path.name)
    write_json_atomic(folder / store.MODEL, model.config.as_dict())


# A checkpoint in DeepSpeed's own layout, as ZeRO-2 on one rank would have saved it, for DeepSpeed's own tools.
#
#     latest                                                      names the folder below
#     global_step200/mp_rank_00_model_states.pt                   the weights by name, and the order of the flat groups
#     global_step200/zero_pp_rank_0_mp_rank_00_optim_states.pt    master weights and moments, each group one flat tensor
#
# Keys are those of ``DeepSpeedEngine`` and ``DeepSpeedZeroOptimizer`` in ``LAYOUT_VERSION``; DeepSpeed is not imported.
# Its files are pickles: this module writes them, and no code here reads them.

LAYOUT_VERSION = "0.19.8"
"""The version of DeepSpeed that has these keys."""
_ZERO_STAGE = 2
_MODEL_FILE = "mp_rank_00_model_states.pt"
_OPTIMIZER_FILE = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
_EMBEDDING, _HEAD = "wte.weight", "lm_head.weight"
"""One tensor under two names. The second is written as a copy, among the buffers. DeepSpeed would list it under
``shared_params``, but then its script gives both names the same memory, which ``--safe_serialization`` refuses."""

Moments = Mapping[str, Mapping[str, StoredTensor]]
"""Tensors by the name of the moment, such as ``exp_avg``, then by canonical name."""


def _write_deepspeed(
    folder: Path, model: StoredModel, *, moments: Moments, optimizer_steps: int | None, progress: Advance
) -> None:
    """Write DeepSpeed's layout into ``folder``.

    Args:
        folder: has none of the names above yet.
        model: with every weight in fp32, in the model's order.
        moments: of the optimizer; none of weights alone.
        optimizer_steps: the steps that changed the weights; None if unknown.
        progress: called with the bytes read since its last call.

    Raises:
        OSError: the file system refuses.
    """
    _write_shape_and_tokenizer(folder, model)
    tensors, step = model.tensors, (model.manifest and model.manifest.step) or 0
    inner = folder / f"global_step{step}"
    inner.mkdir()

    def flat(values: Mapping[str, StoredTensor], names: list[str]) -> Tensor:
        """All tensors flat and end to end, mapped from a deleted file: at most one of them is in memory at a time."""
        with (scratch := inner / "flat").open("xb") as file:
            for name in names:
                file.write(values[name].read().contiguous().reshape(-1).view(torch.uint8).numpy().data)
                progress(values[name].bytes)
        size = scratch.stat().st_size // torch.float32.itemsize
        mapped = torch.from_file(str(scratch), shared=False, size=size, dtype=torch.float32)
        scratch.unlink()  # the system frees the space with the tensor
        return mapped

    groups = [[name for name in tensors if decays(name) == decayed] for decayed in (True, False)]
    masters = [flat(tensors, names) for names in groups]
    views: dict[str, Tensor] = {}
    slices: list[dict[str, SimpleNamespace]] = [{}, {}]
    """The position of each parameter in its flat group: the two attributes of DeepSpeed's ``fragment_address``."""
    for master, names, places in zip(masters, groups, slices, strict=True):
        sizes = [torch.Size(tensors[name].shape).numel() for name in names]
        for name, part in zip(names, torch.split(master, sizes), strict=True):
            places[name] = SimpleNamespace(numel=part.numel(), start=part.storage_offset())
            views[name] = part.view(tensors[name].shape)
    model_states = {
        "module": {name: views[name] for name in tensors} | {_HEAD: views[_EMBEDDING].clone()},
        "buffer_names": [_HEAD],
        "param_shapes": [{name: torch.Size(tensors[name].shape) for name in names} for names in groups],
        **{name: {} for name in ("frozen_param_shapes", "shared_params", "frozen_param_fragments")},
        **dict.fromkeys(("optimizer", "lr_scheduler", "data_sampler", "random_ltd")),
        "skipped_steps": 0 if optimizer_steps is None else step - optimizer_steps,
        "global_steps": step,
        **dict.fromkeys(("dp_world_size", "mp_world_size"), 1),
        "ds_config": {"zero_optimization": {"stage": _ZERO_STAGE}},
        "ds_version": LAYOUT_VERSION,
    }
    save_pickled(model_states, inner / _MODEL_FILE)
    states = [{key: flat(values, names) for key, values in moments.items()} for names in groups]
    if optimizer_steps is not None and "exp_avg" in moments:  # only Adam counts its steps
        states = [{"step": torch.tensor(float(optimizer_steps))} | state for state in states]
    optimizer_states = {
        "base_optimizer_state": {
            "state": {number: state for number, state in enumerate(states) if state},
            "param_groups": [{"params": [number]} for number in range(len(masters))],
        },
        "single_partition_of_fp32_groups": masters,
        "zero_stage": _ZERO_STAGE,
        "group_paddings": [0] * len(masters),
        "param_alignment_paddings": [[0] * len(names) for names in groups],
        "partition_count": [1] * len(masters),
        "ds_version": LAYOUT_VERSION,
        "param_slice_mappings": slices,
    }
    whole = {"optimizer_state_dict": optimizer_states, "ds_config": {}, "ds_version": LAYOUT_VERSION}
    save_pickled(whole, inner / _OPTIMIZER_FILE)
    sync_directory(inner)
    (folder / "latest").write_text(inner.name, encoding="utf-8")
