"""The end of a run: how fast the trained model answers, and the word that everything is done."""

from datetime import UTC, datetime
from typing import Any

import torch

from dsgpt.common.errors import Interrupted
from dsgpt.common.files import write_atomic
from dsgpt.config.run_config import RunConfig
from dsgpt.inference.latency import measure_latency
from dsgpt.model.gpt2 import GPT2
from dsgpt.runtime.interruption import Interruption
from dsgpt.strategies.base import Strategy
from dsgpt.strategies.pytorch.master_weights import DTYPES
from dsgpt.telemetry.console import Console, duration
from dsgpt.telemetry.record import COMPLETE_FILE, RECORD_FILE
from dsgpt.training.journal import Journal


def measure_inference(
    config: RunConfig,
    console: Console,
    device: torch.device,
    strategy: Strategy,
    journal: Journal,
    interruption: Interruption,
) -> None:
    """Time the trained model on the main rank while the others wait; the same plain model for every strategy.

    A GPU that training fills may have no room for it: then inference stays unknown, and the run is complete all the
    same. A request to stop ends it at once: nothing of it would be saved.
    """
    weights = whole_weights(strategy, keep=config.topology.is_main)
    if not config.topology.is_main or interruption.reason:
        return
    try:
        with interruption.patience(False):
            journal.record.inference = _latency(config, device, weights)
    except Interrupted:
        return
    except torch.OutOfMemoryError:
        console.say("inference   not measured: the GPU has no memory left for a second copy of the model")
    if journal.record.inference is not None:
        console.say(
            f"inference   {journal.record.inference['new_tokens']} tokens in "
            f"{journal.record.inference['latency_sec']:.2f} s, {journal.record.inference['tokens_per_sec']:.0f} "
            "tokens/s (batch 1, greedy, key-value cache)"
        )


def whole_weights(strategy: Strategy, *, keep: bool) -> dict[str, torch.Tensor]:
    """Every weight in fp32 on the CPU where ``keep``, nothing elsewhere; collective."""
    weights = {}
    for name, parameter in strategy.iter_state():
        if keep:
            weights[name] = parameter.weight.to("cpu", copy=True).contiguous()
    return weights


def _latency(config: RunConfig, device: torch.device, weights: dict[str, torch.Tensor]) -> dict[str, Any] | None:
    model = GPT2(config.model)
    model.load_state_dict({**weights, "lm_head.weight": weights["wte.weight"]})
    model.to(device, DTYPES[config.precision]).eval()
    ids = torch.from_numpy(config.val.memmap()[: config.model.block_size].astype("int64")).to(device)
    return measure_latency(model, ids)


def mark_complete(config: RunConfig, journal: Journal, console: Console) -> None:
    """Write ``RUN_COMPLETE.txt`` and say the result; main rank only."""
    summary = journal.record.summary
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    line = (
        f"finished {config.total_steps} steps at {finished}: train loss {_loss(summary['final_train_loss'])}, "
        f"validation loss {_loss(summary['final_val_loss'])}"
    )
    write_atomic(config.run_dir / COMPLETE_FILE, f"{line}\n".encode())
    seconds, speed = summary["train_time_sec"], summary["mean_tokens_per_sec_global"]
    console.say(
        f"{line}, training {'of unknown time' if seconds is None else duration(seconds)}"
        + (f", {speed:,.0f} tokens/s" if speed else "")
    )
    console.say(f"the record is {config.run_dir / RECORD_FILE}")


def _loss(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"
