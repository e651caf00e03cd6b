"""What rounded weights lose: a trained model predicts the same text in each precision, and with weights in 8 bits."""

from pathlib import Path
from typing import Any

from dsgpt.evaluation.evaluate import evaluate
from dsgpt.evaluation.request import Request
from dsgpt.telemetry.console import Console

WEIGHTS = (("fp32", "none"), ("bf16", "none"), ("bf16", "int8"))
"""Precision and quantization."""


def measure_losses(checkpoint: Path, data: Path, *, device: str) -> dict[str, Any]:
    """Loss and perplexity of the model of ``checkpoint`` on the token file ``data``, as the record has them.

    Raises:
        UserError: the model or the file cannot be used.
    """
    found: dict[str, Any] = {}
    for precision, quantize in WEIGHTS:
        request = Request(checkpoint=checkpoint, data=data, precision=precision, quantize=quantize, device=device)
        record = evaluate(request, console=Console(speaks=False))
        name = precision if quantize == "none" else quantize
        found[name] = {key: record[key] for key in ("loss", "perplexity", "bits_per_byte")}
    return {"checkpoint": checkpoint.as_posix(), "tokens": record["tokens"], "weights": found}
