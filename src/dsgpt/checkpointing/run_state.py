"""The progress of a run: what a resume needs besides the configuration and the state of training."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from dsgpt.checkpointing.segment import Segment
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.common.json_files import Count, Finite, JsonError, Seconds, read_as

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
    """Of the checkpoint."""
    name: str
    """One of ``settings_to_match``, or ``executed by``."""
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
    """All changes at resumes so far."""
    segments: list[Segment] = field(default_factory=list)
    """The processes of the run so far; empty in checkpoints from before segments were recorded."""

    @property
    def val_loss(self) -> float | None:
        """The validation loss of exactly these weights; None where no validation ran at this step."""
        return self.last_val_loss if self.last_val_step == self.step else None

    def without_validations(self) -> Self:
        """The same without validation losses, for a run whose validation set changes here."""
        return replace(self, best_val_loss=None, last_val_loss=None, last_val_step=None)


def write_run_state(checkpoint: Path, state: RunState) -> None:
    """Add ``state`` to a checkpoint."""
    write_json_atomic(checkpoint / STATE_FILE, asdict(state))


def read_run_state(checkpoint: Path) -> RunState:
    """The progress of the run at a checkpoint.

    Raises:
        UserError: the file is not a run state of this version of the program.
    """
    path = checkpoint / STATE_FILE
    try:
        return read_as(path, RunState)
    except JsonError as error:
        raise UserError(f"{path}: is not a run state of this version ({error})") from error
