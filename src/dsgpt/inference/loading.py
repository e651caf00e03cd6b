"""A model for inference and its tokenizer, from a run or from any folder of weights."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsgpt.checkpoints.manifest import Manifest
from dsgpt.checkpoints.selection import ModelFiles, find_checkpoint, is_hugging_face, open_model_files, open_weights
from dsgpt.common.errors import Problems, UserError
from dsgpt.formats.hugging_face import PretrainedWeights, published_shape, read_json
from dsgpt.formats.tensor_files import DTYPES
from dsgpt.formats.tokenizer_files import CONFIG, end_ids, open_tokenizer, tokenizer_files
from dsgpt.machine.device import cuda_devices, slow_precision
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# A plain model for inference, from the weights of a run.


def build_model(
    config: GPT2Config, weights: Mapping[str, Tensor], *, device: torch.device, dtype: torch.dtype = torch.float32
) -> GPT2:
    """The model in evaluation mode, with ``weights``, every weight whole on the CPU by its canonical name."""
    with torch.device("meta"):
        model = GPT2(config)
    model.load_state_dict({**weights, "lm_head.weight": weights["wte.weight"]}, assign=True)
    model.lm_head.weight = model.wte.weight
    return model.to(device=device, dtype=dtype).eval()


def load_model(files: ModelFiles, device: torch.device) -> GPT2:
    """The model of a checkpoint of any strategy, in fp32.

    Raises:
        UserError: its weights are not those of its shape.
    """
    weights = {name: stored.read() for name, stored in open_weights(files).items()}
    return build_model(files.config, weights, device=device)


# A model for inference and its tokenizer, from a run, a checkpoint, a portable folder or a Hugging Face folder.


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model in evaluation mode and its tokenizer."""

    model: GPT2
    tokenizer: "PreTrainedTokenizerBase | None"
    folder: Path | None = None
    """Of the tokenizer."""
    ends: tuple[int, ...] = ()
    """Ids that end a text, besides the tokenizer's own."""
    lack: str = ""
    """Why there is no tokenizer."""
    trained_length: int | None = None
    """Tokens of the sequences that it was trained on: later positions never learned anything. None if unknown."""
    manifest: Manifest | None = None
    """Of its checkpoint; None for a Hugging Face folder."""

    def needed_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer.

        Raises:
            UserError: there is none.
        """
        if self.tokenizer is None:
            raise UserError(f"{self.lack}: cannot read text")
        return self.tokenizer


def load(path: Path, *, which: str, device: torch.device, precision: str) -> Loaded:
    """Verify and read the model in ``path``.

    Args:
        path: a run folder, a checkpoint of any strategy, a portable folder, or a Hugging Face folder of a GPT-2.
        which: the checkpoint of a run folder: ``latest`` or ``best``.
        device: where the model goes.
        precision: ``fp32``, ``bf16`` or ``fp16``.

    Raises:
        UserError: there is no usable model, a weight is not finite, or its tokenizer cannot be used.
    """
    folder: Path | None
    if is_hugging_face(path):
        if which == "best":
            raise UserError(f"--checkpoint {path}: is a Hugging Face folder; --which best needs a run folder")
        tokenizer, folder, lack = _published_tokenizer(path), path, f"{path}: has no tokenizer"
        model, trained_length, manifest = _published_model(path, device), None, None
    else:
        checkpoint = find_checkpoint(path, which=which, flag="--checkpoint")
        files = open_model_files(checkpoint)
        folder, lack = files.tokenizer, f"{checkpoint}: has no tokenizer, because its training data had none"
        tokenizer = None if folder is None else open_tokenizer(folder, what=str(folder))
        model, trained_length, manifest = load_model(files, device), files.trained_length, files.manifest
    model = model.to(DTYPES[precision])
    for name, value in model.named_parameters():
        if not torch.isfinite(value).all():
            raise UserError(
                f"--checkpoint {path}: {name} holds values that are NaN or infinite in {precision}: it is unusable"
            )
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        folder=folder if tokenizer else None,
        ends=() if manifest else end_ids(path),
        lack=lack,
        trained_length=trained_length,
        manifest=manifest,
    )


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


def _published_tokenizer(folder: Path) -> "PreTrainedTokenizerBase | None":
    if all(file.name == CONFIG for file in tokenizer_files(folder)):
        return None
    return open_tokenizer(folder, what=str(folder), named=True)


def _published_model(folder: Path, device: torch.device) -> GPT2:
    problems = Problems()
    place = folder / CONFIG
    shape = published_shape(read_json(place), place=str(place), problems=problems)
    problems.raise_if_any()
    assert shape is not None  # ``published_shape`` returns None only where it reports a problem
    config = GPT2Config(**shape)
    weights = PretrainedWeights(folder, config).tensors()
    return build_model(config, {name: stored.read() for name, stored in weights.items()}, device=device)
