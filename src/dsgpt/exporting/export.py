"""Exports a model to a folder that other tools can use: Hugging Face's layout, DeepSpeed's, or this project's own.

Tensors are copied from file to file one at a time, on the CPU, without a network. The folder appears complete or not
at all.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsgpt.checkpointing import store
from dsgpt.checkpointing.manifest import MANIFEST, parse_manifest
from dsgpt.checkpointing.selection import (
    find_checkpoint,
    is_hugging_face,
    is_model_file,
    open_model_files,
    open_weights,
)
from dsgpt.common.errors import UserError
from dsgpt.common.files import sha256_of, write_json_atomic
from dsgpt.common.next_step import next_line, script_words
from dsgpt.common.problems import Problems
from dsgpt.exporting.deepspeed_layout import Moments, bytes_needed, open_moments, write_deepspeed
from dsgpt.exporting.new_folder import check_out, check_room, new_folder
from dsgpt.formats.hugging_face import (
    hugging_face_config,
    hugging_face_name,
    hugging_face_shape,
    hugging_face_value,
    published_shape,
)
from dsgpt.formats.pretrained import PretrainedWeights, read_json
from dsgpt.formats.tensor_files import DTYPES, StoredTensor, write_safetensors
from dsgpt.formats.tokenizer_files import CONFIG, SETTINGS, fault_of, tokenizer_files
from dsgpt.formats.vocabulary_files import end_ids, end_of_text_id
from dsgpt.model.config import GPT2Config
from dsgpt.telemetry.console import Console

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
