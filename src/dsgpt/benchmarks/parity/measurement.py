"""What one rank measured in one training: numbers per step, the samples it read, and on rank 0 gradient and weights.

The reference and every strategy write the same files, so that one comparison serves all.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsgpt.benchmarks.harness.rank_files import rank_file
from dsgpt.common.files import write_json_atomic
from dsgpt.data.loader import Batch
from dsgpt.telemetry.record import finite

STATE_FILE = "state.safetensors"
GRADIENT, CHANGED, WEIGHT = "gradient/", "changed/", "weight/"
FIRST_CHANGE = 3
"""The first step with a learning rate above 0 under the suite's schedule: the weights after it show one update."""


def validated_after(total_steps: int) -> tuple[int, int]:
    """The steps after which to validate: the middle one and the last.

    The middle one shows that a validation does not change training. None comes before the first step: DeepSpeed's
    ZeRO-3 learns from its first forward pass what to gather when, and sends an eighth more in every training step if
    that pass was a validation.
    """
    return total_steps // 2, total_steps


class Measurement:
    """Collects measurements step by step; ``write`` writes them at the end."""

    def __init__(self, *, data_rank: int, strategy: str) -> None:
        self._facts: dict[str, Any] = {"data_rank": data_rank, "strategy": strategy}
        self._steps: list[dict[str, Any]] = []
        self._validations: list[dict[str, Any]] = []
        self._tensors: dict[str, Tensor] = {}
        self._replicas: dict[str, tuple[str, float]] = {}

    def step(
        self, *, loss: float, grad_norm: float, lr: float, used: list[float], skipped: bool, samples: list[str]
    ) -> None:
        """Note one optimizer step.

        Args:
            loss: mean over the global batch.
            grad_norm: before clipping.
            lr: the learning rate that was reported.
            used: every learning rate that an optimizer of this rank stepped with.
            skipped: whether the optimizer step was skipped.
            samples: hashes of the samples that this rank read for it.
        """
        numbers = {"loss": loss, "grad_norm": grad_norm, "lr": lr, "used": used, "skipped": skipped}
        self._steps.append({**numbers, "samples": sorted(samples)})

    def validation(self, *, after_step: int, loss: float, targets: int) -> None:
        """Note the mean loss over all targets of the validation file, nats per token, and their number."""
        self._validations.append({"after_step": after_step, "loss": loss, "targets": targets})

    def gradient(self, name: str, value: Tensor) -> None:
        """Note one parameter's gradient in the first step, before clipping."""
        self._tensors[GRADIENT + name] = value.detach().to("cpu", torch.float32, copy=True)

    def weight(self, name: str, value: Tensor, *, after: str = WEIGHT) -> None:
        """Note one parameter after the last step, or after step ``FIRST_CHANGE`` if ``after`` is ``CHANGED``."""
        self._tensors[after + name] = value.detach().to("cpu", torch.float32, copy=True)

    def replica(self, name: str, value: Tensor) -> None:
        """Note a weight that this rank holds whole: a hash to compare with other ranks', and a norm to show."""
        value = value.detach().cpu().contiguous()
        self._replicas[name] = (digest(value), float(torch.linalg.vector_norm(value.double())))

    def bytes_per_rank(self, found: dict[str, Any]) -> None:
        """Note the bytes of a step: see ``rank.compared_bytes``."""
        self._facts["bytes_per_rank"] = found

    def write(self, folder: Path, *, rank: int) -> None:
        """Write the rank's file, and beside it the tensors, if any were noted."""
        if self._tensors:
            save_file({name: value.contiguous() for name, value in self._tensors.items()}, folder / STATE_FILE)
        seen = {"steps": self._steps, "validations": self._validations, "replicas": self._replicas}
        end = {"status": "done", **self._facts, **seen}
        write_json_atomic(rank_file(folder, rank), finite(end))


def digest(value: Tensor) -> str:
    """A hash of a tensor's bytes."""
    return hashlib.blake2b(value.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


def sample_hash(inputs: Tensor, targets: Tensor) -> str:
    """A hash of one sample: its ids, (T,), and the ids to predict, (T,)."""
    return digest(torch.cat([inputs, targets]).cpu())


class WatchedBatches:
    """Passes micro batches on, and remembers the hashes of their samples."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = iter(batches)
        self._samples: list[str] = []

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self._samples += [sample_hash(*sample) for sample in zip(batch.inputs, batch.targets, strict=True)]
        return batch

    def take(self) -> list[str]:
        """The hashes since the last call."""
        samples, self._samples = self._samples, []
        return samples


def read_tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Gradients or weights by canonical name; empty if none were noted."""
    path = folder / STATE_FILE
    tensors = load_file(path) if path.exists() else {}
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
