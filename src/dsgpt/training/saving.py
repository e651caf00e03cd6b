"""Saves a run's checkpoints, while training waits or beside it.

A checkpoint has the state of training, the random states and the tokenizer. After each part the ranks exchange whether
they succeeded. If one fails, all fail with its reason, and no rank waits for a failed one.
"""

import contextlib
import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from dsgpt.checkpoints import store
from dsgpt.checkpoints.manifest import RunState, parse_manifest
from dsgpt.checkpoints.training_state import (
    Counters,
    GatheringError,
    KeptState,
    reason_of,
    require_room,
    save_random_state,
    try_to_write,
    write_training_state,
)
from dsgpt.common.errors import NonFiniteError, SaveError, UserError
from dsgpt.common.files import print_traceback, remove, write_json_atomic
from dsgpt.config.run_config import RunConfig
from dsgpt.formats.tokenizer_files import copy_tokenizer
from dsgpt.machine.device import HostGroup, from_main, gather_objects
from dsgpt.model.gpt2 import parameter_shapes
from dsgpt.strategies.base import Strategy
from dsgpt.training.journal import Journal, place
from dsgpt.training.run_description import data_tokenizer

logger = logging.getLogger(__name__)
T = TypeVar("T")

_CONTINUES = "the run continues (--on_save_failure continue)"


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

    def remove(self) -> None:
        """Remove the attempt; main rank only."""
        # What prevented the save may prevent this too; then the next start removes the folder.
        with contextlib.suppress(OSError):
            remove(self.folder)

    def refuse_non_finite(self, names: list[str]) -> None:
        """Refuse weights that the last update made NaN or infinite: no loss was computed with them yet."""
        if names:
            raise NonFiniteError(
                f"step {self.state.step}: {', '.join(names[:3])} became NaN or infinite: training stopped, and this "
                "state is not saved; lower the learning rate or lengthen the warm-up"
            )

    def complete(self) -> int:
        """Add the remaining files, and publish; main rank only.

        Returns:
            The bytes of the checkpoint.

        Raises:
            OSError: the file system refuses.
        """
        config = self.config
        write_json_atomic(self.folder / store.MODEL, config.model.as_dict())
        tokenizer, _ = data_tokenizer(config.train)
        if tokenizer is not None:  # training itself needs none
            copy_tokenizer(tokenizer, self.folder / store.TOKENIZER)
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
    except Exception as error:  # noqa: BLE001 - otherwise the other ranks would wait for this one
        reason = _reason(error)
    failures = [f"rank {rank}: {reason}" for rank, reason in enumerate(gather_objects(reason)) if reason is not None]
    if failures:
        raise SaveError("; ".join(failures))
    return result


def _reason(error: BaseException) -> str:
    """Why a save failed, in one line; the traceback is printed if it was not the file system."""
    if isinstance(error, OSError):
        return reason_of(error)
    print_traceback()
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _removed_after_failure(contents: Contents) -> Iterator[None]:
    try:
        yield
    except (SaveError, NonFiniteError):
        if contents.config.topology.is_main:
            contents.remove()
        raise


@dataclass(kw_only=True)
class _InBackground:
    """A save that a thread of the main rank writes while training continues. Times are those of ``perf_counter``."""

    step: int
    started: float
    ended: float
    stall_sec: float = 0.0
    """Seconds that training waited for it."""
    size: int = 0
    error: SaveError | NonFiniteError | None = None
    thread: threading.Thread | None = None
    """None on all ranks but the main one."""


class Saver:
    """Writes the checkpoints of a run: while training waits, or with ``--save_mode async`` while it continues.

    Args:
        config: the run.
        device: of this rank.
        strategy: has the state of training.
        journal: has the state of the run, and records each save.
        about: what the manifests say about the run; read only on the main rank.
        ranks: all ranks.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        device: torch.device,
        strategy: Strategy,
        journal: Journal,
        about: dict[str, Any],
        ranks: HostGroup,
    ) -> None:
        self._config, self._device = config, device
        self._strategy, self._journal = strategy, journal
        self._about, self._ranks = about, ranks
        self._is_main = config.topology.is_main
        self._shapes = parameter_shapes(config.model)
        self._stops = config.options.on_save_failure == "stop"
        self._kept = KeptState()
        self._begun: _InBackground | None = None
        """Set from the begin of a background save until it was waited for, on every rank."""

    def save(self, step: int, *, needed: bool) -> None:
        """Write a checkpoint of ``step``, or begin to; collective.

        Args:
            step: the last one taken.
            needed: the run ends with this checkpoint, so it is written before this returns.

        Raises:
            SaveError: on every rank, if this checkpoint or the one in the background could not be written, and the run
                needs it or ``--on_save_failure`` is ``stop``.
            NonFiniteError: a weight is NaN or infinite.
        """
        started = time.perf_counter()
        if self._begun is not None:
            self._collect(self._begun, superseded=needed)
        try:
            contents = self._open(self._journal.state(step))
            with _removed_after_failure(contents):
                if self._config.options.save_mode == "async" and not needed:
                    self._begin(contents, started=started)
                else:
                    size = self._write(contents)
                    seconds = time.perf_counter() - started
                    self._note(step, mode="sync", stall_sec=seconds, total_sec=seconds, size=size)
        except SaveError as error:
            self._failed(step, error, stops=needed or self._stops, then=_CONTINUES)
        self._journal.peaks.reset()  # what a save allocates is not for training
        self._journal.write_saves()

    def _open(self, state: RunState) -> Contents:
        """Make the folder and write every rank's random state into it; collective."""
        run_dir, rank = self._config.run_dir, self._config.topology.rank
        folder = store.partial_folder(run_dir, state.step)

        def make_folder() -> None:
            self._journal.before_save()
            if self._is_main:
                store.begin(run_dir, state.step)
                # Before the first byte: the checkpoint will be about as large as the last one.
                earlier = store.checkpoints(run_dir)
                with contextlib.suppress(UserError):  # the size of the last one is unknown
                    require_room(run_dir, parse_manifest(earlier[0]).size if earlier else 0)

        contents = Contents(
            config=self._config,
            folder=folder,
            state=copy.deepcopy(state),  # the run appends to its lists while a thread writes
            about=self._about,
            counters=self._strategy.counters(),
        )
        with _removed_after_failure(contents):
            _together(make_folder)
            _together(lambda: try_to_write(folder, rank=rank))
            _together(lambda: save_random_state(folder, rank=rank, device=self._device))
        return contents

    def _write(self, contents: Contents) -> int:
        """Write the state of training tensor by tensor, and publish; collective. Returns the main rank's bytes."""

        def write() -> list[str]:
            states = self._strategy.iter_state()
            return write_training_state(
                contents.folder, states, contents.counters, shapes=self._shapes, writes=self._is_main
            )

        contents.refuse_non_finite(from_main(_together(write)))
        return _together(lambda: contents.complete() if self._is_main else 0)

    def _begin(self, contents: Contents, *, started: float) -> None:
        """Copy the state of training into the main rank's memory, and let a thread write it; collective."""
        _together(lambda: self._kept.keep(self._strategy.iter_state(), keeps=self._is_main))
        begun = _InBackground(step=contents.state.step, started=started, ended=time.perf_counter())

        def write() -> None:
            states = self._kept.states()
            try:
                contents.refuse_non_finite(
                    write_training_state(contents.folder, states, contents.counters, shapes=self._shapes, writes=True)
                )
                begun.size = contents.complete()
            except NonFiniteError as error:
                begun.error = error
            except BaseException as error:  # noqa: BLE001 - ``_collect`` raises it on every rank
                begun.error = SaveError(_reason(error))
            if begun.error is not None:
                contents.remove()
            begun.ended = time.perf_counter()

        self._begun = begun
        if self._is_main:
            begun.thread = threading.Thread(target=write, name="background")
            begun.thread.start()
        begun.stall_sec = time.perf_counter() - started

    def poll(self) -> None:
        """Record the save in the background if it has ended; called after every step, collective.

        Raises:
            SaveError: as ``save``.
            NonFiniteError: as ``save``.
        """
        begun = self._begun
        if begun is not None and self._ranks.largest(int(begun.thread is not None and not begun.thread.is_alive())):
            self._collect(begun)

    def _collect(self, begun: _InBackground, *, superseded: bool = False) -> None:
        """Wait for the save in the background; a failure does not stop the run if a needed save follows."""
        if begun.thread is not None:
            begun.thread.join()
        self._begun = None
        begun.error, begun.size = from_main((begun.error, begun.size))
        if isinstance(begun.error, NonFiniteError):
            raise begun.error
        if begun.error is not None:
            then = "the current step is saved now" if superseded else _CONTINUES
            self._failed(begun.step, begun.error, stops=self._stops and not superseded, then=then)
        else:
            self._note_begun(begun)
            self._journal.write_saves()

    def _note_begun(self, begun: _InBackground) -> None:
        total = begun.ended - begun.started
        self._note(begun.step, mode="async", stall_sec=begun.stall_sec, total_sec=total, size=begun.size)

    def _note(self, step: int, *, mode: str, stall_sec: float, total_sec: float, size: int) -> None:
        self._journal.saved(step=step, mode=mode, stall_sec=stall_sec, total_sec=total_sec, size=size)
        waited = f"; training waited {stall_sec:.2f} s for it" if mode == "async" else ""
        logger.info(f"{place(step, self._config.total_steps)}  saved in {total_sec:.1f} s{waited}")

    def _failed(self, step: int, error: SaveError, *, stops: bool, then: str) -> None:
        line = self._not_saved(step, error)
        if stops:
            raise SaveError(f"{line}: free space or repair the folder, then continue with --resume") from error
        logger.warning(f"{line}; {then}")

    def _not_saved(self, step: int, error: BaseException) -> str:
        self._journal.failed_saves += 1
        return f"{place(step, self._config.total_steps)}  not saved: {error}; earlier checkpoints are untouched"

    def close(self) -> None:
        """Wait for a save in the background when an error ends the run; not collective.

        Its checkpoint is from before the error. A failure of the save is logged, and does not hide the error.
        """
        begun = self._begun
        if begun is None or begun.thread is None:
            return
        begun.thread.join()
        if begun.error is None:
            self._note_begun(begun)
        else:
            logger.warning(self._not_saved(begun.step, begun.error))
