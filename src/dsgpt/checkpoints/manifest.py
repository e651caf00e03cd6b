"""The manifest of a checkpoint: files with hashes, progress of the run, processes that trained it, their goodput.

``manifest.json``: the settings that made a checkpoint, and the size and sha256 of every file in it. A file of a
checkpoint is verified against the manifest before it is read. Files that the manifest does not name are never read.
"""

import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field

from dsgpt.common.errors import UserError
from dsgpt.common.files import Advance, link_between, sha256_of, write_json_atomic
from dsgpt.common.json_files import Count, Finite, Positive, Seconds, Sha256, clipped, read_or_refuse
from dsgpt.machine.console import Progress
from dsgpt.record.schema import CAUSES, PEAKS, read_steps

MANIFEST = "manifest.json"
_A_LINK = "is a link, and links in a checkpoint are not followed (cp -rL makes a copy without links)"

_LONGEST_NAME = 255
"""Bytes: the limit of file systems for one name; no path in a checkpoint is that long."""


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if "\0" in name or not path.parts:
        raise ValueError(f"{name!r} is not the name of a file")
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name} is outside of the checkpoint")
    if len(name.encode()) > _LONGEST_NAME:
        raise ValueError(f"{clipped(name)} is longer than any file system allows")
    return name


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """Size and hash that a file must have."""

    size: Count
    """Bytes."""
    sha256: Sha256

    @classmethod
    def synced(cls, path: Path) -> Self:
        """Those of a file, which is durable then."""
        with path.open("rb") as file:  # fsync needs no write access, and a copied file may be read-only
            os.fsync(file.fileno())
        return cls(size=path.stat().st_size, sha256=sha256_of(path))


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks that wrote the checkpoint."""

    world_size: Positive
    sizes: dict[str, Positive]
    """The fields of ``topology.ParallelSizes``."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of ``manifest.json``; a folder of weights alone lacks the fields that only a resume needs."""

    files: Annotated[dict[Annotated[str, AfterValidator(_inside)], FileFacts], Field(min_length=1)]
    """Size and hash of each file, by path inside the checkpoint, with forward slashes."""
    step: Count | None = None
    val_loss: Finite | None = None
    """The validation loss of exactly these weights; None where no validation ran at this step."""
    strategy: str | None = None
    run_id: str | None = None
    topology: Ranks | None = None
    device: str | None = None
    """``cpu`` or ``cuda``."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """The settings that a resumed run must match, by the names of ``training.run_description.settings_to_match``."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(facts.size for facts in self.files.values())

    def require(self, checkpoint: Path, names: Collection[str]) -> None:
        """Check that it names all of ``names``, files of ``checkpoint``.

        Raises:
            UserError: it lacks some, which therefore cannot be verified.
        """
        if missing := [name for name in names if name not in self.files]:
            lacks = f"does not name {' and '.join(missing)}"
            raise UserError(f"{checkpoint / MANIFEST}: {lacks}: the checkpoint is incomplete")

    def require_resumable(self, checkpoint: Path) -> None:
        """Check that it has the settings that made ``checkpoint``.

        Raises:
            UserError: it lacks some; the manifest of weights alone has none.
        """
        wanted = ("fixed", "strategy", "topology", "step")
        if missing := ", ".join(name for name in wanted if getattr(self, name) in ({}, None)):
            raise UserError(f"{checkpoint / MANIFEST}: does not say what made the checkpoint (it lacks {missing})")


def parse_manifest(checkpoint: Path) -> Manifest:
    """The manifest; no file is verified.

    Raises:
        UserError: it cannot be read, or is not a manifest.
    """
    path = checkpoint / MANIFEST
    try:
        if path.is_symlink():
            raise UserError(f"{path}: {_A_LINK}")
        if not path.is_file():
            raise UserError(f"{path}: is missing: the checkpoint is incomplete")
        return read_or_refuse(path, Manifest, "a readable manifest", unknown_keys=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def read_manifest(
    checkpoint: Path, *, only: Callable[[str], bool] = lambda _: True, progress: Advance | None = None
) -> Manifest:
    """The manifest, after the size and hash of every file that it names were verified.

    Args:
        checkpoint: the folder.
        only: whether to verify a file, by its name in the manifest.
        progress: called with the bytes read since its last call; None shows a bar.

    Raises:
        UserError: a file is missing, of another size, or damaged; the message names it.
    """
    manifest = parse_manifest(checkpoint)
    sizes = sum(facts.size for name, facts in manifest.files.items() if only(name))
    shown = None if progress is None else False
    bar = Progress(total=sizes, what=f"verifying {checkpoint.name}", unit="B", shown=shown, lines=progress is None)
    with contextlib.closing(bar):
        for name, facts in manifest.files.items():
            if only(name):
                _verify(checkpoint, name, facts, progress or bar.advance)
    return manifest


def _verify(checkpoint: Path, name: str, facts: FileFacts, progress: Advance) -> None:
    file = checkpoint / name
    try:
        if link := link_between(checkpoint, file):
            raise UserError(f"{link}: is damaged: it {_A_LINK}")
        if file.exists() and not file.is_file():  # opening a pipe would wait for its writer
            raise UserError(f"{file}: is damaged: it is not a file")
        size = file.stat().st_size
        same = size == facts.size and sha256_of(file, progress) == facts.sha256
    except FileNotFoundError as error:
        raise UserError(f"{file}: is damaged: it is missing") from error
    except OSError as error:
        raise UserError(f"{file}: is damaged: it cannot be read ({error.strerror})") from error
    if size != facts.size:
        raise UserError(f"{file}: is damaged: it has {size:,} bytes instead of {facts.size:,}")
    if not same:
        raise UserError(f"{file}: is damaged: its sha256 differs from that in {MANIFEST}")


# The part of a run that one process executed: its steps, machine, software, speed and memory.


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
    """Time at which the process began."""
    resumed_from: str | None
    """The name of the checkpoint; None at the start of a run."""
    command_line: str
    git_commit: str | None
    env: dict[str, str | None]
    """Versions of the software."""
    host: str
    """Host of rank 0."""
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
    """Share of the CPUs of rank 0's machine that processes outside of the run used meanwhile."""
    pad_logits: bool = False
    cuda_graphs: bool = False


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
    complete = covers(segments, first_step=first_step, last_step=last_step)
    taking_part = [segment for segment in segments if segment.last_step >= first_step or segment is segments[-1]]
    on_gpu = [segment for segment in taking_part if segment.hardware.get("device") == "cuda"]
    peaks: dict[str, int | None] = {}
    for name in PEAKS:  # on a CPU there is no peak of GPU memory, which is not the same as unknown
        values: list[Any] = [getattr(segment, name) for segment in (on_gpu if "cuda" in name else taking_part)]
        peaks[name] = max(values) if complete and values and None not in values else None
    return peaks


# ``goodput`` of the record: how much of a run's wall time went into steps that were kept, and where the rest went.
#
# Within a process, seconds are those of a clock that nobody sets. Between processes only the clock of the day is known,
# and it may be of another machine.

EARLY_SEC = 2.0
"""Seconds by which the start of a process may seem to be before the end of the one before: the system rounds it."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The block of the record, without ``share``; by default that of a run before its first process."""

    wall_sec: Seconds | None = 0.0
    """Since the first process of the run started; None, like every figure, where it is unknown."""
    kept_sec: Seconds | None = 0.0
    """Seconds of the steps that led to the run's present state."""
    lost_sec: dict[str, Seconds | None] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    """The other seconds, by cause."""
    repeated_steps: Count | None = 0
    """Steps that a process took and a later one took again."""
    starts: Count | None = 0
    """Processes, or the processes that one launcher started."""
    seen_at: Finite = 0.0
    """Time at which this was written, in seconds since 1970."""

    @classmethod
    def unknown(cls) -> Self:
        """The goodput of a run whose earlier processes did not record it."""
        return cls(wall_sec=None, lost_sec=dict.fromkeys(CAUSES), repeated_steps=None, starts=None)

    @property
    def share(self) -> float | None:
        """Share of the wall time that kept steps took."""
        return self.kept_sec / self.wall_sec if self.wall_sec and self.kept_sec is not None else None

    def _lost(self, more: Mapping[str, float | None]) -> dict[str, Seconds | None]:
        return self.lost_sec | {cause: _sum(self.lost_sec.get(cause), seconds) for cause, seconds in more.items()}

    def after_loss(self, steps_file: Path, *, kept_step: int, wall_sec: float | None) -> Self:
        """The same at the last sign of life of the process that wrote it; its steps after ``kept_step`` are lost.

        Args:
            steps_file: ``metrics.jsonl``, before those steps are removed from it.
            kept_step: of the checkpoint from which the run continues.
            wall_sec: ``total_wall_time_sec`` of the same record.
        """
        lines = list(read_steps(steps_file)) if steps_file.exists() else []
        lost = [line.get("step_time_sec") or 0.0 for line in lines if line["step"] > kept_step and "loss" in line]
        last = max((line.get("wall_time_sec") or 0.0 for line in lines), default=0.0)
        later = max(0.0, last - (wall_sec or 0.0))
        steps = None if self.repeated_steps is None else self.repeated_steps + len(lost)
        same = replace(self, wall_sec=_sum(self.wall_sec, later), seen_at=self.seen_at + later)
        return replace(same, lost_sec=self._lost({"repeated": sum(lost)}), repeated_steps=steps)

    def begin(self, process_sec: float) -> Self:
        """The same when the next process has run for ``process_sec``; the time between the two is a gap."""
        between = time.time() - process_sec - self.seen_at if self.starts else 0.0
        gap = max(0.0, between) if between > -EARLY_SEC else None  # None: a clock was set back
        lost = self._lost({"gaps": gap}) | dict.fromkeys(("compilation", "data"), 0.0)
        starts = None if self.starts is None else self.starts + 1
        return replace(self, wall_sec=_sum(self.wall_sec, gap), lost_sec=lost, starts=starts)

    def now(self, *, process_sec: float, kept_sec: float | None, lost_sec: Mapping[str, float]) -> Self:
        """The same now.

        Args:
            process_sec: since this process started.
            kept_sec: of all kept steps, without compilation and waits for data.
            lost_sec: of this process, by cause; ``compilation`` and ``data`` are of all kept steps.
        """
        wall, sums = _sum(self.wall_sec, process_sec), self._lost(lost_sec) | {"other": 0.0}
        rest = _sum(wall, *(None if part is None else -part for part in (kept_sec, *sums.values())))
        sums["other"] = None if rest is None else max(0.0, rest)
        return replace(self, wall_sec=wall, kept_sec=kept_sec, lost_sec=sums, seen_at=time.time())


def _sum(*parts: float | None) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


# The progress of a run: what a resume needs besides the configuration and the state of training.

STATE_FILE = "run_state.json"


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """A finished epoch, or the part of it that the run trained, as in the record's ``epochs``. None where unknown."""

    epoch_idx: Count
    epoch_wall_time_sec: Seconds
    train_time_sec: Seconds | None
    steps: Count
    micro_steps: Count
    optimizer_steps: Count
    tokens_processed_global: Count
    train_loss_avg_global: Finite | None
    val_loss_avg_global: Finite | None
    max_cuda_mem_allocated_bytes_rank0: Count | None
    max_cuda_mem_reserved_bytes_rank0: Count | None
    peak_rss_bytes_rank0: Count | None
    tokens_per_sec_global: Seconds | None
    step_time_mean_sec: Seconds | None
    step_time_p50_sec: Seconds | None
    step_time_p95_sec: Seconds | None
    dataload_time_mean_sec: Seconds | None


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change at a resume: of a setting, with ``--allow_changed``, or of strategy, ranks or device."""

    step: Count
    """Step of the checkpoint."""
    name: str
    """Name of the setting: one of ``settings_to_match``, or ``executed by``."""
    before: Any
    after: Any


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The progress of a run; everything else follows from its configuration.

    The random state of every rank is in a file of its own beside this one.
    """

    step: Count
    """Optimizer steps done."""
    samples_seen: Count
    """Sequences consumed: ``step`` times the global batch."""
    best_val_loss: Finite | None
    """The lowest validation loss since the validation set last changed."""
    epochs: list[Epoch]
    """The finished epochs."""
    wall_time_sec: Seconds | None = None
    """Since the run started, without the time between its processes."""
    last_train_loss: Finite | None = None
    last_val_loss: Finite | None = None
    last_val_step: Count | None = None
    """The step at which ``last_val_loss`` was measured."""
    failed_saves: Count = 0
    """Checkpoints that could not be written so far."""
    changes: list[Change] = field(default_factory=list)
    """Every change at a resume so far."""
    segments: list[Segment]
    """The processes of the run so far."""

    @property
    def val_loss(self) -> float | None:
        """The validation loss of exactly these weights; None where no validation ran at this step."""
        return self.last_val_loss if self.last_val_step == self.step else None

    def write(self, checkpoint: Path) -> None:
        """Add it to a checkpoint."""
        write_json_atomic(checkpoint / STATE_FILE, asdict(self))


def read_run_state(checkpoint: Path) -> RunState:
    """The progress of the run at a checkpoint.

    Raises:
        UserError: the file is not a run state of this version of the program.
    """
    return read_or_refuse(checkpoint / STATE_FILE, RunState, "a run state of this version")
