"""A model and its tokenizer, from a run, a checkpoint, a portable folder or a Hugging Face folder."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsgpt.checkpoints.manifest import Manifest, parse_manifest
from dsgpt.checkpoints.store import find_checkpoint, is_hugging_face, is_model_file, open_model_files
from dsgpt.checkpoints.training_state import open_weights
from dsgpt.common.errors import Problems, UserError
from dsgpt.formats.hugging_face import PretrainedWeights
from dsgpt.formats.tensor_files import DTYPES, StoredTensor
from dsgpt.formats.tokenizer_files import CONFIG, end_ids, fault_of, open_tokenizer, tokenizer_files
from dsgpt.machine.console import Console
from dsgpt.machine.device import cuda_devices, slow_precision
from dsgpt.model.config import GPT2Config
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
    """By canonical name."""
    folder: Path | None
    """Of its tokenizer; None where there is none."""
    refused: str = ""
    """Why its tokenizer must not be used; empty where it may."""
    ends: tuple[int, ...] = ()
    """Ids that end a text, besides the tokenizer's own."""
    manifest: Manifest | None = None
    """Of its checkpoint or portable folder; None for a Hugging Face folder."""
    trained_length: int | None = None
    """Tokens of the sequences that it was trained on: later positions never learned anything. None if unknown."""
    published: PretrainedWeights | None = None
    """Of a Hugging Face folder."""

    @property
    def tokenizer(self) -> list[Path]:
        """The tokenizer's files; empty if there is none, or it must not be used."""
        if self.folder is None or self.refused:
            return []
        own_config = self.manifest is not None  # otherwise ``config.json`` is the model's
        return [path for path in tokenizer_files(self.folder) if own_config or path.name != CONFIG]


def open_model(source: Path, *, which: str, flag: str, console: Console | None = None) -> StoredModel:
    """Find and verify the model in ``source``.

    Args:
        source: a run folder, a checkpoint of any strategy, a portable folder, or a Hugging Face folder of a GPT-2.
        which: the checkpoint of a run folder: ``latest`` or ``best``.
        flag: the flag that ``source`` was given with, for messages.
        console: shows the progress.

    Raises:
        UserError: there is no usable model.
    """
    if is_hugging_face(source):
        if which == "best":
            raise UserError(f"{flag} {source}: is a Hugging Face folder; --which best needs a run folder")
        published = PretrainedWeights(source)
        folder = source if any(file.name != CONFIG for file in tokenizer_files(source)) else None
        return StoredModel(
            source=source,
            config=published.config,
            tensors=published.tensors(),
            folder=folder,
            refused=_fault(source, named=True),
            ends=end_ids(source),
            published=published,
        )
    checkpoint = find_checkpoint(source, which=which, flag=flag)
    named = parse_manifest(checkpoint).files
    size = sum(facts.size for name, facts in named.items() if is_model_file(name))
    progress = (console or Console(speaks=False)).progress(total=size, what="verifying", unit="B", lines=True)
    files = open_model_files(checkpoint, progress=progress.advance)
    progress.close()
    return StoredModel(
        source=checkpoint,
        config=files.config,
        tensors=open_weights(files),
        folder=files.tokenizer,
        refused=_fault(files.tokenizer, named=False),
        manifest=files.manifest,
        trained_length=files.trained_length,
    )


def _fault(folder: Path | None, *, named: bool) -> str:
    fault = fault_of(folder, named=named) if folder else None
    return f"{folder}: {fault}" if fault else ""


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
            raise UserError(
                f"--checkpoint {path}: {name} holds values that are NaN or infinite in {precision}: it is unusable"
            )
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
