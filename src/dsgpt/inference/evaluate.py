"""Evaluation of a model: perplexity, the tasks of lm-evaluation-harness, and the record of both.

Perplexity over windows that may overlap. Of overlapping windows only the tokens that no earlier window predicted
count, so each token counts once, with at least ``length - stride`` tokens before it
(https://huggingface.co/docs/transformers/perplexity).
"""

import itertools
import math
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dsgpt.checkpoints.store import VALIDATED_ON, is_hugging_face
from dsgpt.common.errors import Problems, UserError
from dsgpt.common.files import Advance, sha256_of, write_json_atomic
from dsgpt.config.compatibility import ALLOW_MASKS
from dsgpt.data.loader import IGNORED_TARGET
from dsgpt.data.token_file import TokenFile, open_token_file
from dsgpt.formats.tensor_files import DTYPES
from dsgpt.formats.tokenizer_files import TOKENIZER, other_meaning, token_ids
from dsgpt.inference.commands import EvaluateRequest, text_of
from dsgpt.inference.decoder import round_to_int8
from dsgpt.inference.generation import decoded, encoded
from dsgpt.inference.model_files import Loaded, device_for, export, load
from dsgpt.machine.console import Console
from dsgpt.model.gpt2 import GPT2
from dsgpt.record.schema import finite

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Record = dict[str, Any]


def evaluate(request: EvaluateRequest, *, console: Console) -> Record:
    """Evaluate, write the record if one is asked for, and return it.

    Raises:
        UserError: the model or the text cannot be used.
    """
    problems = Problems()
    device = device_for(request.device, precision=request.precision, problems=problems)
    problems.raise_if_any()
    record: Record = {"checkpoint": str(request.checkpoint), "precision": request.precision}
    record |= {"quantize": request.quantize, "device": device.type}
    started = time.perf_counter()
    if request.tasks:
        record |= {"tasks": evaluate_tasks(request, device=device.type), "limit": request.limit}
    else:
        record |= _predicted(request, device=device, console=console)
    record["seconds"] = round(time.perf_counter() - started, 3)
    record = finite(record)
    if request.output:
        request.output.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(request.output, record)
    return record


def _predicted(request: EvaluateRequest, *, device: torch.device, console: Console) -> Record:
    """Perplexity and bits per byte, as keys of the record."""
    loaded = load(request.checkpoint, which=request.which, device=device, precision=request.precision)
    model, manifest = loaded.model, loaded.stored.manifest
    if request.quantize == "int8":
        round_to_int8(model)
    problems, positions = Problems(), model.config.block_size
    # As in training, if the checkpoint says so: later positions never learned anything.
    trained: Any = manifest.fixed.get(VALIDATED_ON[2]) if manifest else None
    known = isinstance(trained, int) and 0 < trained <= positions
    length: int = request.seq_length or (trained if known else positions)
    stride = request.stride or length
    if length > positions:
        problems.add(f"--seq_length {length}: the model reads at most {positions} tokens")
    if stride > length:
        problems.add(f"--stride {stride} is longer than the windows of {length} tokens")
    problems.raise_if_any()
    if request.text is not None:
        source, text = request.text, read_text(request.text, loaded.needed_tokenizer())
    else:
        assert request.data is not None  # as the request was checked
        most = length + (request.windows - 1) * stride if request.windows else None
        source, text = request.data, read_data(request.data, loaded, most=most)
    if (largest := int(text.ids.max())) >= model.config.vocab_size:
        trained = f"the model was trained with a vocabulary of {model.config.vocab_size}"
        raise UserError(f"{source}: its largest id is {largest}, but {trained}: use data of the model's own tokenizer")
    end_of_text = manifest.fixed.get("end of masked documents") if manifest and request.data else None
    if isinstance(end_of_text, int):
        if device.type == "cuda" and (request.precision == "fp32" or os.environ.get(ALLOW_MASKS) != "1"):
            limits = f"a GPU evaluates in bf16 or fp16 alone, and only with {ALLOW_MASKS}=1"
            trained = f"was trained with --mask_documents, as which {limits}"
            raise UserError(f"{request.checkpoint}: {trained}: add --device cpu")
        model.end_of_text = end_of_text
    tokens = len(text.ids) - 1
    windows = windows_of(tokens, length=length, stride=stride)
    progress = console.progress(total=len(windows), what="evaluating", unit="window", lines=True)
    nats = predict(model, text.ids, windows=windows, batch_size=request.batch_size, progress=progress.advance)
    progress.close()
    loss = nats / tokens
    if not math.isfinite(loss):
        raise UserError(f"{source}: the loss is {loss}, though the model's weights are finite: it is unusable")
    validation: Record | None = None  # how the training validated exactly these weights, if it did so on the same file
    if manifest and manifest.val_loss is not None and text.sha256 is not None:
        data, count, validated, precision = (manifest.fixed.get(name) for name in (*VALIDATED_ON, "precision"))
        if data == text.sha256 and isinstance(count, int) and isinstance(validated, int):
            validation = {"loss": manifest.val_loss, "windows": count, "seq_length": validated, "precision": precision}
    record: Record = {"data": str(source), "tokens": tokens, "bytes": text.bytes, "windows": len(windows)}
    record |= {"seq_length": length, "stride": stride, "loss": loss}
    record["perplexity"] = math.exp(loss) if loss < 700 else math.inf  # a larger one has no floating-point number
    record["bits_per_byte"] = nats / math.log(2) / text.bytes if text.bytes else None
    record |= {"same_tokenizer": text.same_tokenizer, "mask_documents": model.end_of_text is not None}
    return record | {"validation": validation}


# Every id of a text, predicted once.


Window = tuple[int, int, int]
"""A part of the ids that the model reads at once: its first id, the id behind its last one, and how many of the
predictions of its ids' successors count, the last ones."""


def windows_of(targets: int, *, length: int, stride: int) -> list[Window]:
    """Windows that predict each of ``targets`` ids once; the first and the last may count more or fewer than others."""
    windows: list[Window] = []
    end = 0
    while end < targets:
        before, end = end, min(targets, end + stride if windows else length)
        windows.append((max(0, end - length), end, end - before))
    return windows


@torch.inference_mode()
def predict(model: GPT2, ids: Tensor, *, windows: list[Window], batch_size: int, progress: Advance) -> float:
    """The sum of the cross-entropies of all ids but the first, in nats.

    Args:
        model: in evaluation mode.
        ids: at least two; (n,), on the CPU.
        windows: of ``windows_of``, at most as long as the model's positions.
        batch_size: windows that are computed together.
        progress: gets the number of windows since its last call.
    """
    device, nats = model.wte.weight.device, 0.0
    same_length = (list(group) for _, group in itertools.groupby(windows, key=lambda each: each[1] - each[0]))
    for batch in (group[at : at + batch_size] for group in same_length for at in range(0, len(group), batch_size)):
        inputs = torch.stack([ids[start:end] for start, end, _ in batch]).long()  # (B, T)
        targets = torch.stack([ids[start + 1 : end + 1] for start, end, _ in batch]).long()
        for row, (_, _, counted) in zip(targets, batch, strict=True):
            row[: len(row) - counted] = IGNORED_TARGET
        nats += float(model(inputs.to(device), targets.to(device), reduction="sum"))
        progress(len(batch))
    return nats


# The ids that an evaluation predicts, and the bytes of the text that they stand for.


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A text as ids; all but the first are predicted."""

    ids: Tensor
    """(n,)."""
    bytes: int | None
    """Size of the predicted text in UTF-8, without ends of documents; None if the model has no tokenizer."""
    sha256: str | None = None
    """SHA-256 of a token file, from its sidecar."""
    same_tokenizer: bool | None = True
    """Whether an id means the same to the model; None if that is unknown."""


def read_text(path: Path, tokenizer: "PreTrainedTokenizerBase") -> Evaluated:
    """A text file, after the token that ends documents, if the tokenizer has one.

    Raises:
        UserError: it cannot be read, is no text, or has too few tokens.
    """
    text = text_of(path, f"--text {path}")
    # a text that names an end-of-text token is encoded as for training: the name is ordinary text
    ids = encoded(text, tokenizer, what=f"--text {path}", split_special_tokens=True)
    size = len(text.encode())
    if tokenizer.eos_token_id is not None:
        ids = [tokenizer.eos_token_id, *ids]
    elif ids:
        size -= len(decoded(ids[:1], tokenizer).encode())
    if len(ids) < 2 or not size:
        raise UserError(f"--text {path}: has no token to predict")
    return Evaluated(ids=torch.tensor(ids), bytes=size)


def read_data(path: Path, loaded: Loaded, *, most: int | None) -> Evaluated:
    """A token file.

    Args:
        path: the .bin.
        loaded: the model that reads it.
        most: predicted ids, from the start of the file; None for all.

    Raises:
        UserError: it is not a token file, was made with another tokenizer, or has too few tokens.
    """
    file, tokenizer = open_token_file(path), loaded.tokenizer
    if file.tokens < 2:
        raise UserError(f"--data {path}: has {file.tokens} token: there is nothing to predict")
    same = _check_tokenizer(file, loaded.stored.folder)
    ids = torch.from_numpy(file.memmap()[: None if most is None else most + 1].astype(np.int64))
    size = None
    if tokenizer is not None:  # without ends of documents
        end = -1 if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        documents = ids[1:].tensor_split((ids[1:] == end).nonzero()[:, 0])
        size = sum(len(decoded(part[part != end].tolist(), tokenizer).encode()) for part in documents)
    return Evaluated(ids=ids, bytes=size or None, sha256=file.sidecar.sha256, same_tokenizer=same)


def _check_tokenizer(file: TokenFile, folder: Path | None) -> bool | None:
    """Compare the tokenizer that made ``file`` with the model's in ``folder``: by hash, or else id by id.

    Returns:
        True; None where the file or the model names no tokenizer.

    Raises:
        UserError: an id means something else to the model, or that cannot be found out.
    """
    facts, beside = file.sidecar.tokenizer, file.path.parent / "tokenizer"
    if folder is None or facts is None or facts.sha256 is None:
        return None
    hashes = (sha256_of(each / TOKENIZER) if (each / TOKENIZER).is_file() else None for each in (folder, beside))
    if next(hashes) == facts.sha256:
        return True
    ours, theirs = token_ids(beside) if next(hashes) == facts.sha256 else None, token_ids(folder)
    if ours is None or theirs is None:
        difference = "and that tokenizer is not beside it, to compare their ids"
    elif (text := other_meaning(ours, theirs)) is not None:
        difference = f"in which id {ours[text]} is {text!r}"
    else:
        return True
    cure = f"prepare the text with the model's (data_prep/preprocess.py --tokenizer {folder})"
    raise UserError(f"--data {file.path}: was made with another tokenizer than that of the model, {difference}: {cure}")


# The tasks of lm-evaluation-harness, on a model exported for transformers.


def evaluate_tasks(request: EvaluateRequest, *, device: str) -> dict[str, dict[str, float]]:
    """Let the harness evaluate the model, which is exported first if it is not in a Hugging Face folder.

    Returns:
        By task, then by the harness's name of the metric, such as ``acc`` or ``acc_stderr``, its value.

    Raises:
        UserError: the harness is not installed, a task is unknown, or the model cannot be exported.
    """
    try:
        from lm_eval import simple_evaluate  # noqa: PLC0415 - optional, and takes seconds
        from lm_eval.models.huggingface import HFLM  # noqa: PLC0415
        from lm_eval.tasks import TaskManager  # noqa: PLC0415
    except ImportError as error:
        cure = "install it with .venv/bin/python -m pip install -e '.[eval]'"
        raise UserError(f"--tasks needs lm-evaluation-harness ({error}): {cure}") from error
    manager = TaskManager(include_path=str(request.include_path) if request.include_path else None)
    if unknown := [name for name in request.tasks if name not in manager.all_tasks]:
        cure = ".venv/bin/python -m lm_eval ls tasks lists them"
        raise UserError(f"--tasks: there is no task {', '.join(unknown)}; {cure}")
    folder, which = request.checkpoint, request.which
    with tempfile.TemporaryDirectory(prefix="dsgpt-eval-") as temporary:
        if is_hugging_face(folder):
            load(folder, which=which, device=torch.device("cpu"), precision="fp32")  # refuses what is unusable
        else:
            folder = Path(temporary) / "model"
            export(request.checkpoint, folder, form="hf", dtype="fp32", which=which, console=Console(speaks=False))
        dtype = DTYPES[request.precision]
        model = HFLM(pretrained=str(folder), device=device, dtype=dtype, batch_size=request.batch_size)
        results = simple_evaluate(model=model, tasks=list(request.tasks), limit=request.limit, task_manager=manager)
    return {
        task: {
            name.removesuffix(",none"): float(value)  # the harness writes ``acc,none`` for ``acc`` without a filter
            for name, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and "," in name
        }
        for task, values in results["results"].items()
    }
