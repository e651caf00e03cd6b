"""Records for the tests, made up and written where a test asks: no measurement of anything."""

import json
import math
from pathlib import Path
from typing import Any

MODEL = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 32, "vocab_size": 256, "dropout": 0.0}


def record(**changes: Any) -> dict[str, Any]:
    """A complete record of generation 2.1; ``changes`` are ``section__key=value``, or ``key=value`` at the top."""
    values: dict[str, Any] = {
        "schema_version": "2.1",
        "run_id": "fixture",
        "status": "completed",
        "resumed_from": None,
        "host": "fixture-host",
        "hardware": {
            "device": "cpu", "gpu_name": None, "gpu_count_visible": 0, "world_size": 1, "cpu_name": "Fixture CPU",
            "cpu_count": 2, "threads_per_device": 1,
        },
        "data": {"train_path": "t.bin", "train_sha256": "a" * 64, "val_path": "v.bin", "val_sha256": "b" * 64},
        "training_config": {
            "model": dict(MODEL), "seq_len": 32, "global_batch_size": 8, "lr": 0.001, "optimizer": "AdamW",
            "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 4}}, "gradient_clipping": 1.0,
            "precision": "fp32", "strategy": "baseline", "seed": 7, "run_type": "baseline",
            "optimizer_params": {"type": "AdamW", "lr": 0.001, "betas": [0.9, 0.95], "momentum": None,
                                 "torch_adam": False},
            "val_windows": 16,
        },
        "epochs": [
            {"epoch_idx": 0, "optimizer_steps": 20, "tokens_processed_global": 5120, "train_loss_avg_global": 4.5,
             "val_loss_avg_global": 4.0},
            {"epoch_idx": 1, "optimizer_steps": 20, "tokens_processed_global": 5120, "train_loss_avg_global": 3.5,
             "val_loss_avg_global": 3.25},
        ],
        "summary": {
            "total_wall_time_sec": 130.0, "train_time_sec": 100.0, "optimizer_steps": 40,
            "tokens_processed_global": 10240, "final_train_loss": 3.5, "final_val_loss": 3.25, "best_val_loss": 3.25,
            "mean_tokens_per_sec_global": 102.4, "peak_rss_bytes_rank0": 2**30,
            "max_cuda_mem_allocated_bytes_rank0": None, "max_cuda_mem_reserved_bytes_rank0": None,
        },
        "inference": {"prompt_tokens": 16, "new_tokens": 16, "latency_sec": 0.5, "tokens_per_sec": 32.0},
        "train_time_per_epoch": [50.0, 50.0],
        "train_loss_per_epoch": [4.5, 3.5],
        "val_loss_per_epoch": [4.0, 3.25],
        "train_throughput": 102.4,
        "inference_latency": None,
        "inference_throughput": 32.0,
    }  # fmt: skip
    return _changed(values, changes)


def _changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for path, value in changes.items():
        *sections, key = path.split("__")
        target = values
        for section in sections:
            target = target[section]
        target[key] = value
    return values


def flat_record(**changes: Any) -> dict[str, Any]:
    """A record of the older generation: the flat keys alone."""
    return {
        "train_time_per_epoch": [60.0, 40.0],
        "train_loss_per_epoch": [4.5, 3.5],
        "val_loss_per_epoch": [4.0, 3.25],
        "train_throughput": 1000.0,
        "inference_latency": 2.0,
        "inference_throughput": 50.0,
    } | changes


def without(values: dict[str, Any], path: str) -> dict[str, Any]:
    """The record less one key, ``section__key``."""
    *sections, key = path.split("__")
    target = values
    for section in sections:
        target = target[section]
    del target[key]
    return values


def step_lines(*, steps: int = 40, every: int = 10, seconds: float = 2.5, shift: float = 0.0) -> list[dict[str, Any]]:
    """metrics.jsonl of a made-up run: a loss per step, a validation loss every ``every`` steps."""
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = 3.0 + 2.5 * math.exp(-4 * step / steps) + 0.3 * (step * 2654435761 % 2**32 / 2**32 - 0.5) + shift
        lines.append({"step": step, "epoch": 0, "loss": loss, "train_time_sec": seconds * step, "tokens": 256 * step})
        if step % every == 0:
            val = 3.1 + 2.4 * math.exp(-4 * step / steps) + shift
            lines.append({"step": step, "val_loss": val, "train_time_sec": seconds * step})
    return lines


def write_run(folder: Path, values: dict[str, Any], *, lines: list[dict[str, Any]] | None = None) -> Path:
    """Write a run folder; returns the path of its training_metrics.json."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "training_metrics.json"
    path.write_text(json.dumps(values))
    if lines is not None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
