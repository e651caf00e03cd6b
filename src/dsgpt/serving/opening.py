"""Opens a model for serving: exports it on the fly, and loads the export with transformers."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dsgpt.common.errors import UserError
from dsgpt.exporting.export import open_model, write_hugging_face
from dsgpt.formats.tokenizer_files import open_tokenizer
from dsgpt.runtime.device import cuda_devices
from dsgpt.telemetry.console import Console

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel, PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model and what belongs to it."""

    name: str
    """In requests."""
    model: "GPT2LMHeadModel"
    tokenizer: "PreTrainedTokenizerBase"
    positions: int
    """The model's context length in tokens."""
    vocabulary: int
    end_of_text: frozenset[int]
    """Ids that end a text: the tokenizer's, and those of the model's ``generation_config.json``."""
    created: int
    """When its weights were written, in seconds since 1970."""


def open_served(source: Path, *, which: str, name: str | None, device_kind: str) -> ServedModel:
    """Open the model of any folder that ``src/convert.py --from`` reads. Nothing of its tokenizer is executed.

    Args:
        source: a run folder, a checkpoint, a portable folder, or a Hugging Face folder of a GPT-2.
        which: the ``latest`` or the ``best`` checkpoint of a run.
        name: of the model in requests; None for the name of the folder.
        device_kind: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        UserError: there is no usable model, it has no tokenizer, or there is no such device.
    """
    gpus = cuda_devices()
    if device_kind == "cuda" and not gpus:
        raise UserError("--device cuda: PyTorch sees no NVIDIA GPU here; use --device cpu")
    model = open_model(source, which=which, console=Console(speaks=False), flag="--checkpoint")
    if model.left_out:
        raise UserError(f"--checkpoint {model.left_out}")
    if not model.tokenizer:
        raise UserError(
            f"--checkpoint {source}: has no tokenizer, because its training data had none: cannot read text"
        )
    from transformers import GPT2LMHeadModel  # noqa: PLC0415 - takes seconds; mistakes should not

    with tempfile.TemporaryDirectory(prefix="dsgpt-serve-") as place:
        folder = Path(place) / "model"
        write_hugging_face(model, folder, dtype="fp32")
        loaded: Any = GPT2LMHeadModel.from_pretrained(
            folder, attn_implementation="sdpa", dtype=torch.float32, local_files_only=True, use_safetensors=True
        )
        tokenizer = open_tokenizer(folder, what=f"--checkpoint {source}")
    ends = {tokenizer.eos_token_id, *model.ends} - {None}
    return ServedModel(
        name=name or source.resolve().name,
        model=loaded.to("cuda" if gpus and device_kind != "cpu" else "cpu").eval(),
        tokenizer=tokenizer,
        positions=model.config.block_size,
        vocabulary=model.config.vocab_size,
        end_of_text=frozenset(end for end in ends if end < model.config.vocab_size),
        created=int((model.checkpoint or source).stat().st_mtime),
    )
