"""Writes one checkpoint of a run: the state of training, the random states and the tokenizer.

After each part the ranks exchange whether they succeeded. If one fails, all fail with its reason, and no rank waits
for a failed one.
"""

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from dsgpt.checkpointing import store
from dsgpt.checkpointing.manifest import parse_manifest
from dsgpt.checkpointing.random_state import save_random_state
from dsgpt.checkpointing.run_state import RunState
from dsgpt.checkpointing.training_state import Counters, GatheringError, KeptState, write_training_state
from dsgpt.checkpointing.writing import reason_of, require_room, try_to_write
from dsgpt.common.errors import NonFiniteError, SaveError, UserError
from dsgpt.common.files import print_traceback, remove, write_json_atomic
from dsgpt.config.run_config import RunConfig
from dsgpt.formats.tokenizer_files import copy_tokenizer
from dsgpt.model.gpt2 import parameter_shapes
from dsgpt.runtime.process_group import from_main, gather_objects
from dsgpt.strategies.base import Strategy
from dsgpt.training.data_check import data_tokenizer

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a checkpoint holds besides tensors, as it was when the save began."""

    config: RunConfig
    folder: Path
    """The folder it is written in before it is published."""
    state: RunState
    about: dict[str, Any]
    """The manifest's fields about the run; see ``about_run``."""
    counters: Counters

    def complete(self) -> int:
        """Add the remaining files, and publish; main rank only.

        Returns:
            The bytes of the checkpoint.

        Raises:
            OSError: the file system refuses.
        """
        config = self.config
        write_json_atomic(self.folder / store.MODEL, config.model.as_dict())
        _copy_tokenizer(config, self.folder)
        final = store.publish(config.run_dir, self.folder, state=self.state, about=self.about)
        try:
            store.keep_newest(config.run_dir, count=config.options.keep_checkpoints)
        except OSError as error:
            logger.warning(f"{final.name} is saved, but the older ones could not be tidied up: {reason_of(error)}")
        return parse_manifest(final).size


def about_run(config: RunConfig, *, settings: dict[str, Any], description: dict[str, Any]) -> dict[str, Any]:
    """The fields of every checkpoint's manifest about the run.

    Args:
        config: the run.
        settings: those that a resumed run must match.
        description: of the run, as its record has it.
    """
    return {
        "strategy": config.strategy_name,
        "topology": asdict(config.topology),
        "device": config.device,
        "versions": description["env"],
        "precision": config.precision,
        "run_id": description["run_id"],
        "fixed": settings,
    }


def open_checkpoint(
    config: RunConfig,
    strategy: Strategy,
    *,
    device: torch.device,
    state: RunState,
    about: dict[str, Any],
    prepare: Callable[[], None],
) -> Contents:
    """Make the folder and write every rank's random state into it; collective.

    Args:
        config: the run.
        strategy: has the counters.
        device: of this rank.
        state: of the run.
        about: from ``about_run``; read on the main rank alone.
        prepare: makes durable what a resume needs besides the checkpoint; called on every rank.

    Raises:
        SaveError: on every rank, where one could not write; the attempt is removed.
    """
    folder, rank = store.partial_folder(config.run_dir, state.step), config.topology.rank

    def make_folder() -> None:
        prepare()
        if config.topology.is_main:
            store.begin(config.run_dir, state.step)
            _require_room_for_another(config.run_dir)

    contents = Contents(
        config=config,
        folder=folder,
        state=copy.deepcopy(state),  # the run appends to its lists while a thread writes
        about=about,
        counters=strategy.counters(),
    )
    with _removed_after_failure(contents):
        _together(make_folder)
        _together(lambda: try_to_write(folder, rank=rank))
        _together(lambda: save_random_state(folder, rank=rank, device=device))
    return contents


def write_checkpoint(contents: Contents, strategy: Strategy) -> int:
    """Write the state of training tensor by tensor, and publish; collective.

    Returns:
        The bytes of the checkpoint; 0 on all ranks but the main one.

    Raises:
        SaveError: on every rank, where the main rank could not write; the attempt is removed.
        NonFiniteError: a weight is NaN or infinite; the attempt is removed.
    """
    writes, shapes = contents.config.topology.is_main, parameter_shapes(contents.config.model)

    def write() -> list[str]:
        states = strategy.iter_state()
        return write_training_state(contents.folder, states, contents.counters, shapes=shapes, writes=writes)

    with _removed_after_failure(contents):
        non_finite: list[str] = from_main(_together(write))
        _refuse_non_finite(non_finite, step=contents.state.step)
        return _together(lambda: contents.complete() if writes else 0)


def keep_state(contents: Contents, strategy: Strategy, kept: KeptState) -> None:
    """Copy the state of training into the main rank's memory; collective.

    Raises:
        SaveError: on every rank, where the memory could not be allocated; the attempt is removed.
    """
    with _removed_after_failure(contents):
        _together(lambda: kept.keep(strategy.iter_state(), keeps=contents.config.topology.is_main))


def write_kept(contents: Contents, kept: KeptState) -> int:
    """Write a state of training that was kept in memory, and publish; main rank only, not collective.

    Returns:
        The bytes of the checkpoint.

    Raises:
        SaveError: it could not be written; the attempt is removed.
        NonFiniteError: a weight is NaN or infinite; the attempt is removed.
    """
    shapes = parameter_shapes(contents.config.model)
    with _removed_after_failure(contents):
        try:
            non_finite = write_training_state(
                contents.folder, kept.states(), contents.counters, shapes=shapes, writes=True
            )
            _refuse_non_finite(non_finite, step=contents.state.step)
            return contents.complete()
        except NonFiniteError:
            raise
        except OSError as error:
            raise SaveError(reason_of(error)) from error
        except Exception as error:
            print_traceback()
            raise SaveError(f"{type(error).__name__}: {error}") from error


def _together(action: Callable[[], T]) -> T:
    """Do ``action`` on this rank, and check that it succeeded on the others; collective.

    Raises:
        SaveError: on every rank, with the reason of each that failed.
        GatheringError: on this rank alone; the others may be waiting in another collective.
    """
    reason = None
    try:
        result = action()
    except GatheringError:
        raise
    except OSError as error:
        reason = reason_of(error)
    except Exception as error:  # noqa: BLE001 - otherwise the other ranks would wait for this one
        print_traceback()
        reason = f"{type(error).__name__}: {error}"
    failures = [f"rank {rank}: {reason}" for rank, reason in enumerate(gather_objects(reason)) if reason is not None]
    if failures:
        raise SaveError("; ".join(failures))
    return result


@contextlib.contextmanager
def _removed_after_failure(contents: Contents) -> Iterator[None]:
    try:
        yield
    except (SaveError, NonFiniteError):
        if contents.config.topology.is_main:
            # What prevented the save may prevent this too; then the next start removes the folder.
            with contextlib.suppress(OSError):
                remove(contents.folder)
        raise


def _require_room_for_another(run_dir: Path) -> None:
    """Check the free space before the first byte: the checkpoint will be about as large as the last one."""
    found = store.checkpoints(run_dir)
    with contextlib.suppress(UserError):  # the size of the last one is unknown
        require_room(run_dir, parse_manifest(found[0]).size if found else 0)


def _refuse_non_finite(non_finite: list[str], *, step: int) -> None:
    """Refuse weights that the last update made NaN or infinite: no loss was computed with them yet."""
    if non_finite:
        raise NonFiniteError(
            f"step {step}: {', '.join(non_finite[:3])} became NaN or infinite: training stopped, and this state is not "
            "saved; lower the learning rate or lengthen the warm-up"
        )


def _copy_tokenizer(config: RunConfig, folder: Path) -> None:
    """Copy the data's tokenizer, if it has one; training itself needs none."""
    source, _ = data_tokenizer(config.train)
    if source is not None:
        copy_tokenizer(source, folder / store.TOKENIZER)
