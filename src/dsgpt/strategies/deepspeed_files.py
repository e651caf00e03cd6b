"""Saving and loading a DeepSpeed engine, so that a full disk on one rank leaves no other waiting, and the recipe rules.

Written for DeepSpeed 0.19.8, whose ``save_checkpoint`` writes files between collectives: a rank that fails to write
raises, and the others wait in the next collective until they are killed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsgpt.checkpointing.writing import reason_of, save_object
from dsgpt.errors import SaveError
from dsgpt.optimization.optimizer import keep_settings
from dsgpt.strategies.restricted_loading import only_known_classes


class _LateFailure:
    """Takes part in a save to its end, and remembers the first file that could not be written.

    Stands in for the engine's ``checkpoint_engine``, which writes all of its files but the copies of its scripts.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self.failure: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def save(self, state_dict: Any, path: str) -> None:
        """What ``TorchCheckpointEngine.save`` does; its format is the JSON's to choose."""
        self.attempt(lambda: save_object(state_dict, Path(path), zipped=self._writer.zipfile_serialization))

    def attempt(self, action: Callable[[], None]) -> None:
        """Do ``action`` unless an earlier one failed."""
        if self.failure is None:
            try:
                action()
            except OSError as error:
                self.failure = error


def save_engine(engine: Any, folder: Path, *, ours: dict[str, Any]) -> None:
    """Write DeepSpeed's files, which its ``zero_to_fp32.py`` reads too, and ``ours`` into ``folder``; collective.

    Raises:
        OSError: this rank could not write; the others are through with the save too.
        SaveError: this rank could not write, and others may wait for it: what was swapped to nvme, DeepSpeed copies by
            itself.
    """
    writer, copy_scripts = engine.checkpoint_engine, engine._copy_recovery_script
    late = engine.checkpoint_engine = _LateFailure(writer)
    engine._copy_recovery_script = lambda run_dir: late.attempt(lambda: copy_scripts(run_dir))
    try:
        engine.save_checkpoint(str(folder.parent), tag=folder.name, client_state=ours, save_latest=False)
    except OSError as error:
        raise SaveError(reason_of(error), alone=True) from error
    finally:
        engine.checkpoint_engine = writer
        del engine._copy_recovery_script
    if late.failure is not None:
        raise late.failure


def load_engine(engine: Any, folder: Path) -> dict[str, Any]:
    """Take up what ``save_engine`` wrote; what was ``ours`` comes back. Collective.

    The state is the checkpoint's, the settings are the recipe's: DeepSpeed would take over the betas, the weight decay
    and the clipping that were saved.

    Raises:
        FileNotFoundError: DeepSpeed found no checkpoint of this layout.
    """
    with keep_settings(engine.optimizer), only_known_classes(folder):
        loaded, ours = engine.load_checkpoint(str(folder.parent), tag=folder.name, load_lr_scheduler_states=False)
    if loaded is None:
        raise FileNotFoundError(f"{folder} holds no DeepSpeed checkpoint of this layout")
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = engine.gradient_clipping()
    return ours
