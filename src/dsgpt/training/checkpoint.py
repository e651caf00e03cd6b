"""One checkpoint of a run: the state of training, the random states and the tokenizer together.

Ranks write and then compare notes, so that a failure of one is the failure of all, with its reason, and nobody waits
for a rank that has given up.
"""

import contextlib
import copy
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
from dsgpt.common.files import print_traceback, write_json_atomic
from dsgpt.config.run_config import RunConfig
from dsgpt.formats.tokenizer_files import copy_tokenizer
from dsgpt.model.gpt2 import parameter_shapes
from dsgpt.runtime.process_group import from_main, gather_objects
from dsgpt.strategies.base import Strategy
from dsgpt.telemetry.environment import software_versions
from dsgpt.training.data_check import data_tokenizer

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What goes into a checkpoint besides tensors, as it was when the save began."""

    config: RunConfig
    folder: Path
    """Where it is written before it is published."""
    state: RunState
    about: dict[str, Any]
    counters: Counters
    warn: Callable[[str], None]
    """Tells the user what went wrong beside a checkpoint that is good."""

    def complete(self) -> int:
        """Add what is not there yet, and publish; main rank only.

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
            self.warn(f"{final.name} is saved, but the older ones could not be cleared up: {reason_of(error)}")
        return parse_manifest(final).size


def open_checkpoint(
    config: RunConfig,
    strategy: Strategy,
    device: torch.device,
    *,
    state: RunState,
    fixed: dict[str, Any],
    run_id: str | None,
    prepare: Callable[[], None],
    warn: Callable[[str], None],
) -> Contents:
    """Make the folder and write every rank's random state into it; collective.

    Args:
        config: the run.
        strategy: has the state.
        device: of this rank.
        state: where the run stands.
        fixed: what must agree when it is resumed.
        run_id: of the record.
        prepare: makes durable what the checkpoint counts on, on every rank.
        warn: as in ``Contents``.

    Raises:
        SaveError: on every rank, where one could not write; nothing is left of the attempt.
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
        state=copy.deepcopy(state),  # the run goes on with its lists while a thread writes
        about=_about(config, fixed=fixed, run_id=run_id),
        counters=strategy.counters(),
        warn=warn,
    )
    with _removed_after_failure(contents):
        _together(make_folder)
        _together(lambda: try_to_write(folder, rank=rank))
        _together(lambda: save_random_state(folder, rank=rank, device=device))
    return contents


def write_checkpoint(contents: Contents, strategy: Strategy) -> int:
    """Write the state of training tensor by tensor, and publish; collective.

    Returns:
        The bytes of the checkpoint; 0 on other ranks than the main one.

    Raises:
        SaveError: on every rank, where the main rank could not write; nothing is left of the attempt.
        NonFiniteError: a weight is NaN or infinite; nothing is left of the attempt.
    """
    writes, shapes = contents.config.topology.is_main, parameter_shapes(contents.config.model)

    def write() -> list[str]:
        states = strategy.iter_state()
        return write_training_state(contents.folder, states, contents.counters, shapes=shapes, writes=writes)

    with _removed_after_failure(contents):
        _refuse_non_finite(from_main(_together(write)), step=contents.state.step)
        return _together(lambda: contents.complete() if writes else 0)


def keep_state(contents: Contents, strategy: Strategy, kept: KeptState) -> None:
    """Copy the state of training into the main rank's memory; collective.

    Raises:
        SaveError: on every rank, where the memory could not be had; nothing is left of the attempt.
    """
    with _removed_after_failure(contents):
        _together(lambda: kept.keep(strategy.iter_state(), keeps=contents.config.topology.is_main))


def write_kept(contents: Contents, kept: KeptState) -> int:
    """Write a state of training that was kept in memory, and publish; on the main rank alone, without the others.

    Returns:
        The bytes of the checkpoint.

    Raises:
        SaveError: it could not be written; nothing is left of the attempt.
        NonFiniteError: a weight is NaN or infinite; nothing is left of the attempt.
    """
    shapes = parameter_shapes(contents.config.model)
    with _removed_after_failure(contents):
        try:
            spoiled = write_training_state(
                contents.folder, kept.states(), contents.counters, shapes=shapes, writes=True
            )
            _refuse_non_finite(spoiled, step=contents.state.step)
            return contents.complete()
        except NonFiniteError:
            raise
        except OSError as error:
            raise SaveError(reason_of(error)) from error
        except Exception as error:
            print_traceback()
            raise SaveError(f"{type(error).__name__}: {error}") from error


def _together(action: Callable[[], T]) -> T:
    """Do ``action`` on this rank, and hear how it went on the others.

    Raises:
        SaveError: on every rank, with the reason of each that failed.
        GatheringError: on this rank alone; the others are somewhere else in their collectives.
    """
    reason = None
    try:
        result = action()
    except GatheringError:
        raise
    except OSError as error:
        reason = reason_of(error)
    except Exception as error:  # noqa: BLE001 - the others must hear of it, or they would wait for this rank
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
            with contextlib.suppress(OSError):  # the reason of the failure may forbid this too; the next start does it
                store.remove(contents.folder)
        raise


def _require_room_for_another(run_dir: Path) -> None:
    """Before the first byte: the next checkpoint will be about as large as the last."""
    found = store.checkpoints(run_dir)
    with contextlib.suppress(UserError):  # nothing is known of its size
        require_room(run_dir, parse_manifest(found[0]).size if found else 0)


def _refuse_non_finite(spoiled: list[str], *, step: int) -> None:
    """The last update may have spoiled weights whose loss nobody has seen yet."""
    if spoiled:
        raise NonFiniteError(
            f"step {step}: {', '.join(spoiled[:3])} became NaN or infinite: training stopped, and this state is not "
            "saved; lower the learning rate or lengthen the warm-up"
        )


def _copy_tokenizer(config: RunConfig, folder: Path) -> None:
    """Take the tokenizer along where data preparation left one; training itself needs none."""
    source, _ = data_tokenizer(config.train)
    if source is not None:
        copy_tokenizer(source, folder / store.TOKENIZER)


def _about(config: RunConfig, *, fixed: dict[str, Any], run_id: str | None) -> dict[str, Any]:
    return {
        "strategy": config.strategy_name,
        "topology": asdict(config.topology),
        "device": config.device,
        "versions": software_versions(),
        "precision": config.precision,
        "run_id": run_id,
        "fixed": fixed,
    }
