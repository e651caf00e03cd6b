"""Text in, text out, with the model and tokenizer of a checkpoint."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dsgpt.checkpointing.selection import ModelFiles, find_checkpoint, open_model_files
from dsgpt.common.errors import UserError
from dsgpt.common.problems import Problems
from dsgpt.formats.tokenizer_files import open_tokenizer, reason_of
from dsgpt.inference.decode import generate
from dsgpt.inference.trained_model import load_model
from dsgpt.model.config import GPT2Config
from dsgpt.runtime.device import cuda_devices

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def sample(
    path: Path,
    *,
    which: str,
    prompt: str,
    samples: int,
    new_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    device_kind: str,
) -> Iterator[str]:
    """Yield ``samples`` texts: the prompt and up to ``new_tokens`` more tokens, or fewer where a document ends.

    Args:
        path: a run folder, or one checkpoint.
        which: the checkpoint of a run folder: ``latest`` or ``best``.
        prompt: the start of every text; empty for the start of a document.
        samples: texts.
        new_tokens: the most tokens to add; the model's positions may end earlier.
        temperature: 0 always takes the likeliest token.
        top_k: the number of likeliest tokens to sample from.
        seed: of the random stream that all samples share.
        device_kind: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        UserError: no usable checkpoint, no tokenizer in it, or numbers that make no sense.
    """
    _check(
        samples=samples,
        new_tokens=new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        device_kind=device_kind,
    )
    files, tokenizer = _open(path, which=which)
    device = torch.device("cuda" if device_kind != "cpu" and cuda_devices() else "cpu")
    model = load_model(files, device)
    ids = _encode(prompt, tokenizer, model.config)
    generator = torch.Generator(device).manual_seed(seed)
    for _ in range(samples):
        tokens = generate(
            model,
            torch.tensor(ids, device=device),
            new_tokens=min(new_tokens, model.config.block_size - len(ids)),
            temperature=temperature,
            top_k=top_k,
            generator=generator,
        )
        text = tokenizer.decode(list(itertools.takewhile(lambda token: token != tokenizer.eos_token_id, tokens)))
        yield f"{prompt}{text}"


def _open(path: Path, *, which: str) -> tuple[ModelFiles, "PreTrainedTokenizerBase"]:
    checkpoint = find_checkpoint(path, which=which, flag="--checkpoint")
    files = open_model_files(checkpoint)
    if files.tokenizer is None:
        raise UserError(f"{checkpoint}: has no tokenizer, because its training data had none: cannot read text")
    return files, open_tokenizer(files.tokenizer, what=str(files.tokenizer))


def _encode(prompt: str, tokenizer: "PreTrainedTokenizerBase", config: GPT2Config) -> list[int]:
    """The ids of the prompt: at least one, all in the model's vocabulary, with a position left for one more."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError("--prompt is not valid UTF-8 text") from error
    try:
        ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False)
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise UserError(f"--prompt {prompt!r}: the tokenizer cannot encode it ({reason_of(error)})") from error
    if not ids and tokenizer.eos_token_id is None:
        raise UserError("--prompt is empty, and this tokenizer has no end-of-text token to start from: give a prompt")
    ids = ids or [tokenizer.eos_token_id]
    if max(ids) >= config.vocab_size:
        raise UserError(
            f"--prompt {prompt!r}: its largest id is {max(ids)}, but the model was trained with a vocabulary of "
            f"{config.vocab_size}: use another prompt"
        )
    if len(ids) >= config.block_size:
        raise UserError(
            f"--prompt has {len(ids)} tokens, and the model reads at most {config.block_size - 1}: shorten it"
        )
    return ids


def _check(*, samples: int, new_tokens: int, temperature: float, top_k: int, seed: int, device_kind: str) -> None:
    problems = Problems()
    for flag, value in (("--num_samples", samples), ("--max_new_tokens", new_tokens), ("--top_k", top_k)):
        if value < 1:
            problems.add(f"{flag} must be at least 1, not {value}")
    if not 0 <= temperature < float("inf"):
        problems.add(f"--temperature must be a number of at least 0, not {temperature}")
    if not 0 <= seed < 2**63:
        problems.add(f"--seed must be a whole number from 0 to 2^63 - 1, not {seed}")
    if device_kind == "cuda" and not cuda_devices():
        problems.add("--device cuda: PyTorch sees no NVIDIA GPU here; use --device cpu")
    problems.raise_if_any()
