"""Evaluates a model as a request says; the record and the lines that show it."""

import math
import time
from pathlib import Path
from typing import Any

from dsgpt.checkpoints.manifest import Manifest
from dsgpt.checkpoints.store import VALIDATED_ON
from dsgpt.common.errors import Problems, UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.inference.decoder import round_to_int8
from dsgpt.inference.loading import device_for, load
from dsgpt.inference.perplexity import Evaluated, evaluate_tasks, predict, read_data, read_text, windows_of
from dsgpt.inference.requests import EvaluateRequest as Request
from dsgpt.machine.console import Console
from dsgpt.model.config import GPT2Config
from dsgpt.record.schema import finite

Record = dict[str, Any]


def evaluate(request: Request, *, console: Console) -> Record:
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
        record["tasks"] = evaluate_tasks(
            request.checkpoint,
            request.tasks,
            which=request.which,
            device=device.type,
            precision=request.precision,
            batch_size=request.batch_size,
            limit=request.limit,
            include_path=request.include_path,
        )
        record["limit"] = request.limit
    else:
        record |= _predicted(request, device_kind=device.type, console=console)
    record["seconds"] = round(time.perf_counter() - started, 3)
    record = finite(record)
    if request.output:
        request.output.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(request.output, record)
    return record


def _predicted(request: Request, *, device_kind: str, console: Console) -> Record:
    """Perplexity and bits per byte, as keys of the record."""
    import torch  # noqa: PLC0415

    loaded = load(
        request.checkpoint,
        which=request.which,
        device=torch.device(device_kind),
        precision=request.precision,
    )
    model = loaded.model
    if request.quantize == "int8":
        round_to_int8(model)
    length = _length(request, model.config, trained=loaded.trained_length)
    stride = request.stride or length
    if request.text is not None:
        source, text = request.text, read_text(request.text, loaded.needed_tokenizer())
    else:
        assert request.data is not None  # as the request was checked
        most = length + (request.windows - 1) * stride if request.windows else None
        source, text = request.data, read_data(request.data, loaded, most=most)
    _check_ids(source, text, model.config)
    count = len(windows_of(len(text.ids) - 1, length=length, stride=stride))
    progress = console.progress(total=count, what="evaluating", unit="window", lines=True)
    found = predict(
        model, text.ids, length=length, stride=stride, batch_size=request.batch_size, progress=progress.advance
    )
    progress.close()
    if not math.isfinite(found.loss):
        raise UserError(f"{source}: the loss is {found.loss}, though the model's weights are finite: it is unusable")
    return {
        "data": str(source),
        "tokens": found.tokens,
        "bytes": text.bytes,
        "windows": found.windows,
        "seq_length": length,
        "stride": stride,
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte(text.bytes) if text.bytes else None,
        "same_tokenizer": text.same_tokenizer,
        "validation": _validation(text, loaded.manifest),
    }


def _validation(text: Evaluated, manifest: Manifest | None) -> Record | None:
    """How the training validated exactly these weights, if it did so on the same file."""
    if manifest is None or manifest.val_loss is None or text.sha256 is None:
        return None
    data, windows, length = (manifest.fixed.get(name) for name in VALIDATED_ON)
    if data != text.sha256 or not isinstance(windows, int) or not isinstance(length, int):
        return None
    precision = manifest.fixed.get("precision")
    return {"loss": manifest.val_loss, "windows": windows, "seq_length": length, "precision": precision}


def _length(request: Request, config: GPT2Config, *, trained: int | None) -> int:
    """Tokens of a window: as asked for, or else as in training (``trained``), or else the whole context.

    Raises:
        UserError: the model cannot read such windows.
    """
    problems = Problems()
    length = request.seq_length or trained or config.block_size
    if length > config.block_size:
        problems.add(f"--seq_length {length}: the model reads at most {config.block_size} tokens")
    if request.stride and request.stride > length:
        problems.add(f"--stride {request.stride} is longer than the windows of {length} tokens")
    problems.raise_if_any()
    return length


def _check_ids(source: Path, text: Evaluated, config: GPT2Config) -> None:
    """Refuse ids that the model does not know."""
    if (largest := int(text.ids.max())) >= config.vocab_size:
        raise UserError(
            f"{source}: its largest id is {largest}, but the model was trained with a "
            f"vocabulary of {config.vocab_size}: use data of the model's own tokenizer"
        )


def lines_of(record: Record) -> list[str]:
    """The record for a console."""
    if "tasks" in record:
        return [
            f"{task:<24} {metric:<24} {value:.4f}"
            for task, metrics in record["tasks"].items()
            for metric, value in metrics.items()
        ]
    lines = [
        f"tokens          {record['tokens']:,} in {record['windows']:,} windows of {record['seq_length']:,}, "
        f"stride {record['stride']:,}",
        f"loss            {record['loss']:.4f} nats per token",
        f"perplexity      {_shown(record['perplexity'], '.4f')}",
    ]
    if record["bytes"]:
        lines.append(f"bits per byte   {record['bits_per_byte']:.4f} ({record['bytes']:,} bytes)")
    else:
        lines.append("bits per byte   unknown: the model has no tokenizer")
    if not record["same_tokenizer"]:
        lines.append("tokenizer       not compared with that of the data: one of them is not named")
    if own := record["validation"]:
        lines.append(
            f"validation      {own['loss']:.4f} by the training itself, in {own['precision']}, on the first "
            f"{own['windows']:,} windows of {own['seq_length']:,}: the same with --windows {own['windows']}"
        )
    return lines


def _shown(value: float | None, form: str) -> str:
    return "infinite" if value is None else format(value, form)
