"""The part of a run that one process executed: its steps, machine, software, speed and memory."""

from dataclasses import dataclass
from typing import Any

from dsgpt.common.json_files import Count, Positive, Seconds

PEAKS = ("max_cuda_mem_allocated_bytes_rank0", "max_cuda_mem_reserved_bytes_rank0", "peak_rss_bytes_rank0")
"""Fields of a segment, of an epoch's record and of the summary: bytes."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The part of a run that one process executed, or the processes that one launcher started.

    Fields are named as in the record. A run that was never resumed has one segment. Steps are counted as in
    ``metrics.jsonl``: the first of a run is 1.
    """

    first_step: Positive
    last_step: Count
    """``first_step - 1`` if it took no steps."""
    timestamp_utc: str
    """When it began."""
    resumed_from: str | None
    """The name of the checkpoint; None at the start of a run."""
    command_line: str
    git_commit: str | None
    env: dict[str, str | None]
    """Versions of the software."""
    host: str
    """Of rank 0."""
    hardware: dict[str, str | int | float | None]
    """The machine, ranks, threads and launcher."""
    run_type: str
    strategy: str
    deepspeed_enabled: bool
    zero_stage: Count | None
    offload_optimizer: str | None
    offload_param: str | None
    quantized_weights: bool
    quantized_gradients: bool
    data_parallel_size: Positive
    tensor_parallel_size: Positive
    pipeline_parallel_size: Positive
    sequence_parallel_size: Positive
    micro_batch_size_per_gpu: Positive
    grad_accum_steps: Positive
    precision: str
    compile: bool
    activation_checkpointing: bool
    train_time_sec: Seconds
    """Seconds of its training steps."""
    wall_time_sec: Seconds
    """Since it began, up to the checkpoint from which a later segment resumed, if one did."""
    mean_tokens_per_sec_global: Seconds | None
    max_cuda_mem_allocated_bytes_rank0: Count | None
    max_cuda_mem_reserved_bytes_rank0: Count | None
    peak_rss_bytes_rank0: Count | None
    load_average_before: Seconds | None = None
    """Processes of rank 0's machine that ran or waited, in the minute before it began."""
    cpu_share_of_others: Seconds | None = None
    """Of the CPUs of rank 0's machine, the share that processes outside of the run used meanwhile."""

    @property
    def on_gpu(self) -> bool:
        """Whether it trained on GPUs. On a CPU there is no peak of GPU memory, which is not the same as unknown."""
        return self.hardware.get("device") == "cuda"

    def peak(self, name: str) -> int | None:
        """One of ``PEAKS``."""
        value: int | None = getattr(self, name)
        return value


def covers(segments: list[Segment], *, first_step: int, last_step: int) -> bool:
    """Whether the segments, in their order, include every step from ``first_step`` to ``last_step``."""
    expected = first_step
    for segment in segments:
        if segment.last_step < expected:
            continue
        if segment.first_step > expected:
            return False
        expected = segment.last_step + 1
    return expected > last_step


def highest_peaks(segments: list[Segment], *, first_step: int, last_step: int) -> dict[str, Any]:
    """The highest ``PEAKS`` of the segments that executed the steps from ``first_step`` to ``last_step``, by name.

    None if a segment's figure is unknown, or if a step is in no segment: its process may have needed more.
    """
    known = covers(segments, first_step=first_step, last_step=last_step)
    taking_part = [segment for segment in segments if segment.last_step >= first_step or segment is segments[-1]]
    peaks: dict[str, int | None] = {}
    for name in PEAKS:
        values = [segment.peak(name) for segment in taking_part if segment.on_gpu or "cuda" not in name]
        numbers = [value for value in values if value is not None]
        peaks[name] = max(numbers) if known and numbers and len(numbers) == len(values) else None
    return peaks
