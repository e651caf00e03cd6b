"""Where a run stands: what a resume needs besides its configuration and the state of training."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator

from dsgpt.checkpointing.segment import Segment
from dsgpt.errors import UserError
from dsgpt.files import write_json_atomic
from dsgpt.json_files import Count, Finite, JsonError, Seconds, clipped, read_as
from dsgpt.problems import is_number

STATE_FILE = "run_state.json"


def _counted_epoch(epoch: dict[str, Any]) -> dict[str, Any]:
    """An epoch's record as it is; a resumed run goes on counting from these two of its figures."""
    for key in ("steps", "epoch_wall_time_sec"):
        if not is_number(epoch.get(key)) or epoch[key] < 0:
            raise ValueError(f"{key} must be a number of at least 0, not {clipped(epoch.get(key))}")
    return epoch


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run stands; everything else follows from its configuration.

    The random state of every rank lies in a file of its own beside this one.
    """

    step: Count
    """Optimizer steps done."""
    samples_seen: Count
    """Sequences consumed: ``step`` times the global batch."""
    best_val_loss: Finite | None
    """The lowest of all validations so far, since the validation set last changed."""
    epochs: list[Annotated[dict[str, Any], AfterValidator(_counted_epoch)]]
    """Records of the finished epochs."""
    wall_time_sec: Seconds | None = None
    """Since the run started, stops between processes not counted."""
    last_train_loss: Finite | None = None
    last_val_loss: Finite | None = None
    last_val_step: Count | None = None
    """The step that ``last_val_loss`` was measured at."""
    failed_saves: Count = 0
    """Checkpoints that could not be written so far."""
    changes: list[dict[str, Any]] = field(default_factory=list)
    """What changed at resumes, by ``--allow_changed`` or in who executes: ``step``, ``name``, ``before``, ``after``."""
    segments: list[Segment] = field(default_factory=list)
    """The processes that led here; none in checkpoints of before they were kept."""

    @property
    def val_loss(self) -> float | None:
        """The validation loss of exactly these weights; None where no validation ran at this step."""
        return self.last_val_loss if self.last_val_step == self.step else None

    def without_validations(self) -> Self:
        """The same for a run that validates on something else from here on."""
        return replace(self, best_val_loss=None, last_val_loss=None, last_val_step=None)


def write_run_state(checkpoint: Path, state: RunState) -> None:
    """Add ``state`` to a checkpoint."""
    write_json_atomic(checkpoint / STATE_FILE, asdict(state))


def read_run_state(checkpoint: Path) -> RunState:
    """Where the run stood.

    Raises:
        UserError: the file holds something else, as one of another version of this program may.
    """
    path = checkpoint / STATE_FILE
    try:
        return read_as(path, RunState)
    except JsonError as error:
        raise UserError(f"{path}: is no run state of this version ({error})") from error
