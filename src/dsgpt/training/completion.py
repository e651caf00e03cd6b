"""The end of a run: the inference speed of the trained model, and the file that says that the run is complete."""

import logging
from datetime import UTC, datetime
from typing import Any

import torch

from dsgpt.common.errors import Interrupted, UserError
from dsgpt.common.files import write_atomic
from dsgpt.common.next_step import next_line, script_words
from dsgpt.config.run_config import RunConfig
from dsgpt.inference.latency import measure_latency
from dsgpt.inference.trained_model import build_model
from dsgpt.runtime.interruption import Interruption
from dsgpt.strategies.base import Strategy
from dsgpt.strategies.initial_weights import DTYPES
from dsgpt.telemetry.console import duration
from dsgpt.telemetry.record import COMPLETE_FILE, RECORD_FILE

logger = logging.getLogger(__name__)


def measure_inference(
    config: RunConfig, strategy: Strategy, *, device: torch.device, interruption: Interruption
) -> dict[str, Any] | None:
    """Time generation with the trained model, on the main rank while the others continue; collective.

    Every strategy is measured with the same plain model. A request to stop ends the measurement at once, because an
    incomplete measurement is not saved.

    Returns:
        The ``inference`` block of the record; None on other ranks, and where it was not measured: the run was asked to
        stop, the model has a single position, or this machine cannot generate with it. Then a line says why.
    """
    weights = whole_weights(strategy, keep=config.topology.is_main)
    if not config.topology.is_main or interruption.reason:
        return None
    measured = None
    try:
        with interruption.patience(False):
            measured = _latency(config, weights, device=device)
    except Interrupted:
        return None
    except torch.OutOfMemoryError:
        logger.info("inference   not measured: the GPU has no memory left for a second copy of the model")
    # PyTorch raises no narrower type for what a CPU or a GPU lacks, mmap raises OSError without memory. The training is
    # done and saved, and no other rank takes part in the measurement: only its figure is lost.
    # UserError: the trained model's logits are not finite.
    except (RuntimeError, MemoryError, OSError, UserError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        logger.warning(f"inference   not measured: {reason}; the trained model is saved")
    if measured is not None:
        logger.info(
            f"inference   {measured['new_tokens']} tokens in {measured['latency_sec']:.2f} s, "
            f"{measured['tokens_per_sec']:.0f} tokens/s (batch 1, greedy, key-value cache)"
        )
    return measured


def whole_weights(strategy: Strategy, *, keep: bool) -> dict[str, torch.Tensor]:
    """Every weight in fp32 on the CPU if ``keep``, else an empty dict; collective."""
    weights = {}
    for name, parameter in strategy.iter_state():
        if keep:
            weights[name] = parameter.weight.to("cpu", copy=True).contiguous()
    return weights


def _latency(config: RunConfig, weights: dict[str, torch.Tensor], *, device: torch.device) -> dict[str, Any] | None:
    model = build_model(config.model, weights, device=device, dtype=DTYPES[config.precision])
    ids = torch.from_numpy(config.val.memmap()[: config.model.block_size].astype("int64")).to(device)
    return measure_latency(model, ids)


def mark_complete(config: RunConfig, summary: dict[str, Any]) -> None:
    """Write ``RUN_COMPLETE.txt`` and print the result; main rank only.

    Args:
        config: the run.
        summary: that of its record.
    """
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    line = (
        f"finished {config.total_steps} steps at {finished}: train loss {_loss(summary['final_train_loss'])}, "
        f"validation loss {_loss(summary['final_val_loss'])}"
    )
    write_atomic(config.run_dir / COMPLETE_FILE, f"{line}\n".encode())
    seconds, speed = summary["train_time_sec"], summary["mean_tokens_per_sec_global"]
    logger.info(
        f"{line}, training time {'unknown' if seconds is None else duration(seconds)}"
        + (f", {speed:,.0f} tokens/s" if speed else "")
    )
    logger.info(f"the record is {config.run_dir / RECORD_FILE}")
    if config.train.sidecar.tokenizer:
        then = script_words("src/generate.py", "--checkpoint", config.run_dir, "--prompt", "The")
    else:
        then = script_words("src/evaluate.py", "--checkpoint", config.run_dir, "--data", config.val.path)
    logger.info(next_line(then))


def _loss(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"
