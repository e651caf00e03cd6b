"""``training_metrics.json``, the record of one run, and ``metrics.jsonl``, its steps. Imports no torch.

Unknown values are null, never 0. Numbers that are not finite are not JSON and are written as null.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsgpt.files import write_json_atomic

SCHEMA_VERSION = "2.1"
RECORD_FILE = "training_metrics.json"
STEPS_FILE = "metrics.jsonl"
COMPLETE_FILE = "RUN_COMPLETE.txt"
GENERATED_TOKENS = 100
"""``inference_latency`` is the time to generate this many tokens, and null where the context cannot hold them."""


def read_steps(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``; a last line that was torn by a kill is left out."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                return
            yield json.loads(line)


def drop_steps_after(path: Path, step: int) -> None:
    """Cut ``metrics.jsonl`` back to its lines up to ``step``: what a resumed run will write again."""
    kept = [line for line in read_steps(path) if line["step"] <= step] if path.exists() else []
    beside = path.with_name(f".{path.name}.tmp")
    with beside.open("w", encoding="utf-8") as file:
        file.writelines(_line(entry) for entry in kept)
    beside.replace(path)


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(finite(entry), allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """``value`` with every NaN and infinity in it replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def mean(values: list[float]) -> float | None:
    """The mean, None of nothing."""
    return sum(values) / len(values) if values else None


def percentile(values: list[float], fraction: float) -> float | None:
    """The smallest value that at least ``fraction`` of ``values`` do not exceed (nearest rank); None of nothing."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(fraction * len(values)) - 1)]


class StepLog:
    """Appends to ``metrics.jsonl``; the main rank only."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, entries: list[dict[str, Any]]) -> None:
        """Append ``entries``, a line each, and hand them to the operating system."""
        self._file.writelines(_line(entry) for entry in entries)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RunRecord:
    """The record of one run as it grows; ``write`` replaces the file as a whole."""

    def __init__(self, path: Path, facts: dict[str, Any], *, epochs: list[dict[str, Any]]) -> None:
        self._path = path
        self._facts = facts
        self.epochs = epochs
        self.summary: dict[str, Any] = {}
        self.inference: dict[str, Any] | None = None
        self.status = "running"

    def write(self) -> None:
        """Write the record as it stands."""
        record = {
            "schema_version": SCHEMA_VERSION,
            **self._facts,
            "status": self.status,
            "epochs": self.epochs,
            "summary": self.summary,
            "inference": self.inference,
            **self._flat_keys(),
        }
        write_json_atomic(self._path, finite(record))

    def _flat_keys(self) -> dict[str, Any]:
        """The keys of the first generation, which older tools read."""
        full = self.inference is not None and self.inference["new_tokens"] == GENERATED_TOKENS
        latency = self.inference["latency_sec"] if full else None
        return {
            "train_time_per_epoch": [epoch["train_time_sec"] for epoch in self.epochs],
            "train_loss_per_epoch": [epoch["train_loss_avg_global"] for epoch in self.epochs],
            "val_loss_per_epoch": [epoch["val_loss_avg_global"] for epoch in self.epochs],
            "train_throughput": self.summary.get("mean_tokens_per_sec_global"),
            "inference_latency": latency,
            "inference_throughput": GENERATED_TOKENS / latency if latency else None,
        }
