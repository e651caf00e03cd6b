"""Exports a model to a folder that other tools can use: Hugging Face's layout, DeepSpeed's, or this project's own.

Tensors are copied from file to file one at a time, on the CPU, without a network. The folder appears complete or not
at all.

A checkpoint in DeepSpeed's own layout, as ZeRO-2 on one rank would have saved it, for DeepSpeed's own tools.

    latest                                                      names the folder below
    global_step200/mp_rank_00_model_states.pt                   the weights by name, and the order of the flat groups
    global_step200/zero_pp_rank_0_mp_rank_00_optim_states.pt    master weights and moments, each group one flat tensor

Keys are those of ``DeepSpeedEngine`` and ``DeepSpeedZeroOptimizer`` in ``LAYOUT_VERSION``; DeepSpeed is not imported.
Its files are pickles: this module writes them, and no code here reads them.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dsgpt.checkpoints import store
from dsgpt.checkpoints.manifest import MANIFEST, parse_manifest, read_manifest
from dsgpt.checkpoints.selection import find_checkpoint, is_hugging_face, is_model_file, open_model_files, open_weights
from dsgpt.checkpoints.training_state import COUNTERS, MOMENTS, StateReader, save_pickled
from dsgpt.common.errors import Problems, UserError
from dsgpt.common.files import sha256_of, sync_directory, write_json_atomic
from dsgpt.common.text import next_line, script_words
from dsgpt.formats.hugging_face import (
    PretrainedWeights,
    hugging_face_config,
    hugging_face_name,
    hugging_face_shape,
    hugging_face_value,
    published_shape,
    read_json,
)
from dsgpt.formats.tensor_files import DTYPES, StoredTensor, write_safetensors
from dsgpt.formats.tokenizer_files import CONFIG, SETTINGS, end_ids, end_of_text_id, fault_of, tokenizer_files
from dsgpt.machine.console import Console
from dsgpt.model.config import GPT2Config
from dsgpt.model.names import decays

# A folder that appears under its name only when it is complete.


def check_out(out: Path) -> None:
    """Check that a new folder can be made at ``out``.

    Raises:
        UserError: something is there already, or its parent cannot be written.
    """
    if out.is_dir() and not out.is_symlink():
        if any(out.iterdir()):
            raise UserError(f"{out}: is not empty: name a folder that does not exist yet")
    elif os.path.lexists(out):
        raise UserError(f"{out}: exists and is not a folder: name one that does not exist yet")
    place = out.absolute().parent
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise UserError(f"{out}: {place} is a file, not a folder: name another folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"{out}: no permission to write in {place}: name another folder")


def check_room(out: Path, size: int) -> None:
    """Check that ``size`` bytes are free where ``out`` will be.

    Raises:
        UserError: fewer are free.
    """
    place = out.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < size:
        raise UserError(f"{out}: needs {size / 1e9:.2f} GB, and {place} has {free / 1e9:.2f} GB free")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A context that gives a hidden folder next to ``out``; at its end the folder is renamed to ``out``.

    After an error the folder is removed.

    Raises:
        UserError: the file system refuses, here or while the caller fills the folder.
    """
    target = out.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", suffix=".partial", dir=target.parent))
    except OSError as error:
        raise UserError(f"{out}: cannot be made ({error.strerror}): name another folder") from error
    try:
        yield folder
        umask = os.umask(0)
        os.umask(umask)
        folder.chmod(0o777 & ~umask)  # mkdtemp's is private
        sync_directory(folder)
        folder.rename(target)  # replaces an empty folder
        sync_directory(target.parent)
    except OSError as error:
        raise UserError(f"{out}: could not be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


LAYOUT_VERSION = "0.19.8"
"""The version of DeepSpeed that has these keys."""
_ZERO_STAGE = 2
_MODEL_FILE = "mp_rank_00_model_states.pt"
_OPTIMIZER_FILE = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
_EMBEDDING, _HEAD = "wte.weight", "lm_head.weight"
"""One tensor under two names. The second is written as a copy, among the buffers. DeepSpeed would list it under
``shared_params``, but then its script gives both names the same memory, which ``--safe_serialization`` refuses."""

Moments = Mapping[str, Mapping[str, StoredTensor]]
"""By the name of the moment, such as ``exp_avg``, then by canonical name."""


def open_moments(checkpoint: Path | None) -> tuple[Moments, int | None]:
    """The moments of a checkpoint, none read yet, and the number of steps that changed the weights; None if unknown.

    Args:
        checkpoint: verified except for the two files that hold these; None or weights alone give no moments.

    Raises:
        UserError: one of the two files is missing or damaged.
    """
    if checkpoint is None or COUNTERS not in parse_manifest(checkpoint).files:
        return {}, None
    read_manifest(checkpoint, only=lambda name: name in (MOMENTS, COUNTERS))
    state = StateReader(checkpoint)
    return state.stored_moments(), state.counters.optimizer_steps


def bytes_needed(tensors: Mapping[str, StoredTensor], moments: Moments) -> tuple[int, int]:
    """Bytes that ``write_deepspeed`` reads, and bytes that it needs on the drive while it writes."""
    weights = sum(tensor.bytes for tensor in tensors.values())
    read = weights + sum(tensor.bytes for values in moments.values() for tensor in values.values())
    # Both files hold the weights, and one the embedding twice. Flat copies of everything exist for a while.
    return read, weights + tensors[_EMBEDDING].bytes + 2 * read


def write_deepspeed(
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    moments: Moments,
    *,
    step: int,
    optimizer_steps: int | None,
    progress: Callable[[int], None],
) -> None:
    """Write the layout into ``folder``.

    Args:
        folder: has none of the names above yet.
        tensors: every weight in fp32 by canonical name, in the model's order.
        moments: as ``open_moments`` gives them.
        step: of the run, for the folder's name.
        optimizer_steps: the steps that changed the weights; None if unknown.
        progress: called with the bytes read since its last call.

    Raises:
        OSError: the file system refuses.
    """
    tag = f"global_step{step}"
    inner = folder / tag
    inner.mkdir()
    groups = [[name for name in tensors if decays(name)], [name for name in tensors if not decays(name)]]

    def flat(values: Mapping[str, StoredTensor], names: Iterable[str]) -> Tensor:
        return _flattened(inner / "flat", [values[name] for name in names], progress)

    masters = [flat(tensors, names) for names in groups]
    slices = [_slices(tensors, names) for names in groups]
    skipped = 0 if optimizer_steps is None else step - optimizer_steps
    save_pickled(_model_states(tensors, masters, slices, step=step, skipped=skipped), inner / _MODEL_FILE)
    states = [{key: flat(values, names) for key, values in moments.items()} for names in groups]
    if optimizer_steps is not None and "exp_avg" in moments:  # only Adam counts its steps
        states = [{"step": torch.tensor(float(optimizer_steps))} | state for state in states]
    save_pickled(_optimizer_states(masters, slices, states), inner / _OPTIMIZER_FILE)
    sync_directory(inner)
    (folder / "latest").write_text(tag, encoding="utf-8")


def _flattened(scratch: Path, tensors: Iterable[StoredTensor], progress: Callable[[int], None]) -> Tensor:
    """All ``tensors`` flat and end to end, mapped from a deleted file: at most one of them is in memory at a time.

    The system frees the file's space when the tensor is freed.
    """
    with scratch.open("xb") as file:
        for stored in tensors:
            file.write(stored.read().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            progress(stored.bytes)
    size = scratch.stat().st_size // torch.float32.itemsize
    mapped = torch.from_file(str(scratch), shared=False, size=size, dtype=torch.float32)
    scratch.unlink()
    return mapped


def _slices(tensors: Mapping[str, StoredTensor], names: Iterable[str]) -> dict[str, SimpleNamespace]:
    """The position of each parameter in its flat group: the two attributes of DeepSpeed's ``fragment_address``."""
    start, found = 0, {}
    for name in names:
        numel = torch.Size(tensors[name].shape).numel()
        found[name] = SimpleNamespace(numel=numel, start=start)
        start += numel
    return found


def _model_states(
    tensors: Mapping[str, StoredTensor],
    masters: list[Tensor],
    slices: list[dict[str, SimpleNamespace]],
    *,
    step: int,
    skipped: int,
) -> dict[str, Any]:
    shapes = [{name: torch.Size(tensors[name].shape) for name in group} for group in slices]
    views = {
        name: master.narrow(0, place.start, place.numel).view(tensors[name].shape)
        for master, group in zip(masters, slices, strict=True)
        for name, place in group.items()
    }
    return {
        "module": {name: views[name] for name in tensors} | {_HEAD: views[_EMBEDDING].clone()},
        "buffer_names": [_HEAD],
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": {},
        "shared_params": {},
        "frozen_param_fragments": {},
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": skipped,
        "global_steps": step,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": _ZERO_STAGE}},
        "ds_version": LAYOUT_VERSION,
    }


def _optimizer_states(
    masters: list[Tensor],
    slices: list[dict[str, SimpleNamespace]],
    states: list[dict[str, Tensor]],
) -> dict[str, Any]:
    base = {
        "state": {number: state for number, state in enumerate(states) if state},
        "param_groups": [{"params": [number]} for number in range(len(masters))],
    }
    ours = {
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": masters,
        "zero_stage": _ZERO_STAGE,
        "group_paddings": [0] * len(masters),
        "param_alignment_paddings": [[0] * len(group) for group in slices],
        "partition_count": [1] * len(masters),
        "ds_version": LAYOUT_VERSION,
        "param_slice_mappings": slices,
    }
    return {"optimizer_state_dict": ours, "ds_config": {}, "ds_version": LAYOUT_VERSION}


_LAYOUTS = {"hf": "Hugging Face", "portable": "portable", "deepspeed": "DeepSpeed"}
"""Names of ``options.EXPORT_FORMS`` in messages."""
_ABOUT = ("step", "strategy", "run_id")
"""Fields of the checkpoint's manifest that a portable folder's manifest keeps."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model in files."""

    name: str
    """Its source, for messages."""
    config: GPT2Config
    tensors: dict[str, StoredTensor]
    """By canonical name, not read yet."""
    tokenizer: list[Path]
    """The tokenizer's files to export; empty where there are none."""
    about: dict[str, Any]
    """Its source, for the manifest."""
    ends: tuple[int, ...] = ()
    """Ids that end a text, by the source's ``generation_config.json``."""
    checkpoint: Path | None = None
    """The folder that holds it; None for a Hugging Face folder."""
    left_out: str = ""
    """Why the tokenizer of the source is not exported; empty where it is, or where there is none."""


def export(source: Path, out: Path, *, form: str, dtype: str, which: str, console: Console) -> None:
    """Write the model of ``source`` into the new folder ``out``.

    Args:
        source: a run folder, a checkpoint, an exported ``portable`` folder, or a Hugging Face folder of a GPT-2.
        out: must not exist, or be empty.
        form: one of ``options.EXPORT_FORMS``.
        dtype: ``fp32``, ``bf16`` or ``fp16``.
        which: the ``latest`` or the ``best`` checkpoint of a run.
        console: shows what is read and written.

    Raises:
        UserError: the model is unusable, there is no place for ``out``, or the dtype cannot hold the values.
    """
    problems = Problems()
    if form == "deepspeed" and dtype != "fp32":
        problems.add(f"--dtype {dtype}: DeepSpeed keeps its master weights in fp32: leave --dtype out")
    with _collected(problems):
        check_out(out)
    with _collected(problems):
        model = open_model(source, which=which, console=console)
    problems.raise_if_any()
    tensors = {name: _in_dtype(name, tensor, dtype) for name, tensor in model.tensors.items()}
    model = replace(model, tensors=tensors)
    size = needed = sum(tensor.bytes for tensor in tensors.values())
    write = partial(_write_hugging_face if form == "hf" else _write_portable, dtype=dtype)
    if form == "deepspeed":
        moments, optimizer_steps = open_moments(model.checkpoint)
        size, needed = bytes_needed(tensors, moments)
        write = partial(_write_deepspeed, moments=moments, optimizer_steps=optimizer_steps)
    check_room(out, needed)
    console.say(f"from        {model.name}: {model.config.parameter_count():,} parameters")
    progress = console.progress(total=size, what="writing", unit="B", lines=True)
    with new_folder(out) as folder:
        write(folder, model, progress=progress.advance)
    progress.close()
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    console.say(f"to          {out}: {_LAYOUTS[form]}, {dtype}, {written / 1e6:,.1f} MB")
    console.say(_usage_line(model, out, form=form))


@contextlib.contextmanager
def _collected(problems: Problems) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        problems.add(*error.problems)


def open_model(source: Path, *, which: str, console: Console, flag: str = "--from") -> Model:
    """Find and verify the model in ``source``, which was given with ``flag``; see ``export``.

    Raises:
        UserError: there is none.
    """
    if is_hugging_face(source):
        if which == "best":
            raise UserError(f"{flag} {source}: is a Hugging Face folder; --which best needs a run folder")
        return _open_hugging_face(source)
    checkpoint = find_checkpoint(source, which=which, flag=flag)
    named = parse_manifest(checkpoint).files
    size = sum(facts.size for name, facts in named.items() if is_model_file(name))
    progress = console.progress(total=size, what="verifying", unit="B", lines=True)
    files = open_model_files(checkpoint, progress=progress.advance)
    progress.close()
    tensors = open_weights(files)
    about = {key: getattr(files.manifest, key) for key in _ABOUT}
    tokenizer, left_out = _tokenizer_of(files.tokenizer, named=False) if files.tokenizer else ([], "")
    return Model(
        name=f"{checkpoint} ({about['strategy']}, step {about['step']})" if about["strategy"] else str(checkpoint),
        config=files.config,
        tensors=tensors,
        tokenizer=tokenizer,
        about=about,
        checkpoint=checkpoint,
        left_out=left_out,
    )


def _tokenizer_of(folder: Path, *, named: bool) -> tuple[list[Path], str]:
    """The tokenizer's files in ``folder``, or none and the reason: one that could harm its users is left out."""
    fault = fault_of(folder, named=named)
    return ([], f"{folder}: {fault}") if fault else (tokenizer_files(folder), "")


def _open_hugging_face(folder: Path) -> Model:
    problems = Problems()
    values = read_json(folder / "config.json")
    shape = published_shape(values, place=str(folder / "config.json"), problems=problems)
    problems.raise_if_any()
    assert shape is not None  # ``published_shape`` returns None only where it reports a problem
    config = GPT2Config(**shape)
    weights = PretrainedWeights(folder, config)
    tokenizer, left_out = _tokenizer_of(folder, named=True)
    return Model(
        name=f"{folder} (Hugging Face)",
        config=config,
        tensors=weights.tensors(),
        tokenizer=[path for path in tokenizer if path.name != CONFIG],  # ``config.json`` is the model's
        about=dict.fromkeys(_ABOUT) | {"source": folder.name, "source_sha256": weights.sha256()},
        left_out=left_out,
        ends=end_ids(folder),
    )


def _in_dtype(name: str, stored: StoredTensor, dtype: str) -> StoredTensor:
    return replace(stored, dtype=DTYPES[dtype], read=partial(_converted, name, stored, DTYPES[dtype]))


def _converted(name: str, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
    value = stored.read()
    converted = value.to(dtype)
    if not torch.isfinite(converted).all():
        if torch.isfinite(value).all():
            raise UserError(
                f"{_name(dtype)} cannot hold {name}, which reaches {value.abs().max():.3g}: use --dtype fp32"
            )
        raise UserError(f"{name} holds values that are NaN or infinite: these weights are unusable")
    return converted


def _name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


def write_hugging_face(model: Model, out: Path, *, dtype: str) -> None:
    """Write an opened model in Hugging Face's layout into the new folder ``out``.

    Raises:
        UserError: there is no room for it, or the dtype cannot hold the values.
    """
    tensors = {name: _in_dtype(name, tensor, dtype) for name, tensor in model.tensors.items()}
    check_room(out, sum(tensor.bytes for tensor in tensors.values()))
    with new_folder(out) as folder:
        _write_hugging_face(folder, replace(model, tensors=tensors), dtype=dtype, progress=lambda _: None)


def _write_hugging_face(folder: Path, model: Model, *, dtype: str, progress: Callable[[int], None]) -> None:
    for path in model.tokenizer:
        shutil.copyfile(path, folder / path.name)
    end_of_text = end_of_text_id(folder)
    if end_of_text is not None and end_of_text >= model.config.vocab_size:
        end_of_text = None
    settings = folder / SETTINGS
    if settings.is_file():  # users of the tokenizer need the model's context length
        write_json_atomic(settings, read_json(settings) | {"model_max_length": model.config.block_size})
    tensors = {hugging_face_name(name): _laid_out(name, tensor, model.config) for name, tensor in model.tensors.items()}
    write_safetensors(folder / "model.safetensors", tensors, metadata={"format": "pt"}, progress=progress)
    write_json_atomic(folder / "config.json", hugging_face_config(model.config, dtype=dtype, end_of_text=end_of_text))
    ends = list(model.ends) if len(model.ends) > 1 else end_of_text
    generation = {"_from_model_config": True, "bos_token_id": end_of_text, "eos_token_id": ends}
    write_json_atomic(folder / "generation_config.json", generation)


def _laid_out(name: str, stored: StoredTensor, config: GPT2Config) -> StoredTensor:
    return replace(
        stored,
        shape=hugging_face_shape(name, stored.shape, config),
        read=lambda: hugging_face_value(name, stored.read(), config),
    )


def _write_portable(folder: Path, model: Model, *, dtype: str, progress: Callable[[int], None]) -> None:
    _write_shape_and_tokenizer(folder, model)
    write_safetensors(folder / store.WEIGHTS, model.tensors, progress=progress)
    manifest = {"portable": "weights", "dtype": dtype, **model.about, "files": _facts(folder)}
    write_json_atomic(folder / MANIFEST, manifest)


def _write_shape_and_tokenizer(folder: Path, model: Model) -> None:
    if model.tokenizer:
        (folder / store.TOKENIZER).mkdir()
    for path in model.tokenizer:
        shutil.copyfile(path, folder / store.TOKENIZER / path.name)
    write_json_atomic(folder / store.MODEL, model.config.as_dict())


def _write_deepspeed(
    folder: Path, model: Model, *, moments: Moments, optimizer_steps: int | None, progress: Callable[[int], None]
) -> None:
    _write_shape_and_tokenizer(folder, model)
    step = model.about["step"] or 0
    write_deepspeed(folder, model.tensors, moments, step=step, optimizer_steps=optimizer_steps, progress=progress)


def _facts(folder: Path) -> Mapping[str, Any]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": sha256_of(path)} for path in paths
    }


def _usage_line(model: Model, out: Path, *, form: str) -> str:
    if form == "deepspeed" and not model.left_out:
        return f"use it      .venv/bin/python -m deepspeed.utils.zero_to_fp32 {out} WEIGHTS"
    if model.left_out:
        return f"tokenizer   left out: {model.left_out}"
    if not model.tokenizer:
        return "tokenizer   none, because the training data had none: the model reads and writes only ids"
    if form == "hf":
        return f'use it      AutoModelForCausalLM.from_pretrained("{out}"), AutoTokenizer.from_pretrained("{out}")'
    return next_line(script_words("src/generate.py", "--checkpoint", out, "--prompt", "The"))
