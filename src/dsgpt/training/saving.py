"""Saves a run's checkpoints, while training waits or beside it.

A checkpoint has the state of training, the random states and the tokenizer. Every rank writes its part of the state,
and hashes it; the main rank adds the rest and publishes. After each part the ranks exchange whether they succeeded. If
one fails, all fail with its reason, and no rank waits for a failed one.
"""

import contextlib
import copy
import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from dsgpt.checkpoints import store
from dsgpt.checkpoints import training_state as states
from dsgpt.checkpoints.manifest import RunState, parse_manifest
from dsgpt.checkpoints.second_copy import SecondCopy
from dsgpt.common.errors import NonFiniteError, SaveError, UserError
from dsgpt.common.files import print_traceback, remove, write_json_atomic
from dsgpt.config.run_config import RunConfig
from dsgpt.formats.tokenizer_files import copy_tokenizer
from dsgpt.machine.device import HostGroup, from_main
from dsgpt.model.gpt2 import parameter_shapes
from dsgpt.strategies.base import Strategy
from dsgpt.training.journal import Journal, place
from dsgpt.training.run_description import data_tokenizer
from dsgpt.training.run_folder import Save

logger = logging.getLogger(__name__)
T = TypeVar("T")

_CONTINUES = "the run continues (--on_save_failure continue)"


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Contents of a checkpoint besides tensors, as they were when the save began."""

    folder: Path
    """The folder it is written in before it is published."""
    state: RunState
    counters: states.Counters


def _together(ranks: HostGroup, action: Callable[[], T]) -> list[T]:
    """Do ``action`` on this rank, and check that it succeeded on the others; collective among ``ranks``.

    Returns:
        What it returned on each rank, for the main rank; on another what it returned there.

    Raises:
        SaveError: on every rank, with the reason of each that failed.
    """
    result, reason = None, None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - otherwise the other ranks would wait for this one
        reason = _reason(error)
    failures = [f"rank {rank}: {reason}" for rank, reason in enumerate(ranks.objects(reason)) if reason is not None]
    if failures:
        raise SaveError("; ".join(failures))
    return ranks.to_main(result)


def _reason(error: BaseException) -> str:
    """Why a save failed, in one line; the traceback is printed if it was not the file system."""
    if isinstance(error, OSError):
        return states.reason_of(error)
    print_traceback()
    return f"{type(error).__name__}: {error}"


@dataclass(kw_only=True)
class _InBackground:
    """A save that a thread of every rank writes while training continues. Times are those of ``perf_counter``."""

    step: int
    started: float
    ended: float
    stall_sec: float = 0.0
    """Seconds that training waited for it."""
    size: int = 0
    error: SaveError | NonFiniteError | None = None
    thread: threading.Thread | None = None


@dataclass(kw_only=True)
class Saver:
    """Writes the checkpoints of a run: while training waits, or with ``--save_mode async`` while it continues."""

    config: RunConfig
    device: torch.device
    """Of this rank."""
    strategy: Strategy
    """Has the state of training."""
    journal: Journal
    """Has the state of the run, and records each save."""
    about: dict[str, Any]
    """The manifests' fields about the run; read only on the main rank."""
    ranks: HostGroup
    """All ranks."""

    def __post_init__(self) -> None:
        config, options = self.config, self.config.options
        self._is_main, self._stops = config.topology.is_main, options.on_save_failure == "stop"
        self._beside = HostGroup() if options.save_mode == "async" else self.ranks
        """Group for threads, beside which the ranks communicate in ``ranks``."""
        self._kept = states.KeptState()
        self._second: SecondCopy | None = None
        if self._is_main and options.save_to:
            done = self.journal.meter.run.steps
            resumed = config.run_dir / store.folder_name(done) if done else None
            keep = options.keep_checkpoints
            self._second = SecondCopy(options.save_to, run_dir=config.run_dir, keep=keep, resumed=resumed)
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
        state = copy.deepcopy(self.journal.state(step))  # the run appends to its lists while a thread writes
        folder = store.partial_folder(self.config.run_dir, step)
        contents = Contents(folder=folder, state=state, counters=self.strategy.counters())
        try:
            self._open(contents)
            if self.config.options.save_mode == "async" and not needed:
                self._begin(contents, started=started)
            else:  # tensor by tensor
                parts = self._write(contents, self.strategy.shards, self.ranks)
                size = _together(self.ranks, lambda: self._complete(contents, parts) if self._is_main else 0)[0]
                seconds = time.perf_counter() - started
                self._note(Save(step=step, mode="sync", save_stall_sec=seconds, save_total_sec=seconds, bytes=size))
        except (SaveError, NonFiniteError) as error:
            if self._is_main:
                self._remove(contents)
            if isinstance(error, NonFiniteError):
                raise
            self._failed(step, error, stops=needed or self._stops, then=_CONTINUES)
        self.journal.peaks.reset()  # what a save allocates is not for training
        self._write_saves()

    def _open(self, contents: Contents) -> None:
        """Make the folder and write every rank's random state into it; collective."""
        run_dir, rank = self.config.run_dir, self.config.topology.rank

        def make_folder() -> None:
            self.journal.before_save()
            if self._is_main:
                store.begin(run_dir, contents.state.step)
                # Before the first byte: the checkpoint will be about as large as the last one.
                earlier = store.checkpoints(run_dir)
                with contextlib.suppress(UserError):  # the size of the last one is unknown
                    states.require_room(run_dir, parse_manifest(earlier[0]).size if earlier else 0)

        _together(self.ranks, make_folder)
        _together(self.ranks, lambda: states.save_random_state(contents.folder, rank=rank, device=self.device))

    def _remove(self, contents: Contents) -> None:
        """Remove the attempt; main rank only."""
        # What prevented the save may prevent this too; then the next start removes the folder.
        with contextlib.suppress(OSError):
            remove(contents.folder)

    def _write(self, contents: Contents, shards: Callable[[], states.Shards], ranks: HostGroup) -> list[states.Written]:
        """Add every rank's part of the state of training; collective among ``ranks``.

        Returns:
            All parts on the main rank; on another its own.

        Raises:
            SaveError: on every rank, if one of them failed.
            NonFiniteError: on every rank: the last update made weights NaN or infinite, and no loss shows it yet.
        """
        rank, world, folder = self.config.topology.rank, self.config.topology.world_size, contents.folder
        parts = _together(ranks, lambda: states.write_shards(folder, shards(), rank=rank, ranks=world))
        if names := list(dict.fromkeys(itertools.chain(*ranks.objects(parts[0].non_finite)))):
            cure = "training stopped, and this state is not saved; lower the learning rate or lengthen the warm-up"
            raise NonFiniteError(f"step {contents.state.step}: {', '.join(names[:3])} became NaN or infinite: {cure}")
        return parts

    def _complete(self, contents: Contents, parts: list[states.Written]) -> int:
        """Add the remaining files to the ``parts`` of all ranks, and publish; main rank only.

        Returns:
            The bytes of the checkpoint.

        Raises:
            OSError: the file system refuses.
            ValueError: the parts are not the whole state.
        """
        config, folder, shapes = self.config, contents.folder, parameter_shapes(self.config.model)
        written = states.complete_state(folder, parts, contents.counters, shapes=shapes)
        write_json_atomic(folder / store.MODEL, config.model.as_dict())
        tokenizer, _ = data_tokenizer(config.train.files[0])
        if tokenizer is not None:  # training itself needs none
            copy_tokenizer(tokenizer, folder / store.TOKENIZER)
        final = store.publish(config.run_dir, folder, state=contents.state, about=self.about, written=written)
        try:
            needed = self._second.needed() if self._second else ()
            store.keep_newest(config.run_dir, count=config.options.keep_checkpoints, needed=needed)
        except OSError as error:
            reason = states.reason_of(error)
            logger.warning(f"{final.name} is saved, but the older ones could not be tidied up: {reason}")
        return parse_manifest(final).size

    def _begin(self, contents: Contents, *, started: float) -> None:
        """Copy what every rank writes into its host's memory, and let a thread write it; collective."""
        _together(self.ranks, lambda: self._kept.keep(self.strategy.shards()))
        begun = _InBackground(step=contents.state.step, started=started, ended=time.perf_counter())

        def write() -> None:
            try:
                parts = self._write(contents, self._kept.shards, self._beside)
                if self._is_main:
                    begun.size = self._complete(contents, parts)
            except (SaveError, NonFiniteError) as error:
                begun.error = error
            except BaseException as error:  # noqa: BLE001 - ``_collect`` raises it on every rank
                begun.error = SaveError(_reason(error))
            if begun.error is not None and self._is_main:
                self._remove(contents)
            begun.ended = time.perf_counter()

        self._begun = begun
        begun.thread = threading.Thread(target=write, name="background")
        begun.thread.start()
        begun.stall_sec = time.perf_counter() - started

    def poll(self) -> None:
        """Record the save in the background, and the second copy, if they have ended; after every step, collective.

        Raises:
            SaveError: as ``save``.
            NonFiniteError: as ``save``.
        """
        if self._second and self._second.facts() != self.journal.record.second_copy:  # a copy has ended
            self._write_saves()
        begun = self._begun
        ended = self._is_main and begun is not None and begun.thread is not None and not begun.thread.is_alive()
        if begun is not None and self.ranks.largest(int(ended)):
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
            self._write_saves()

    def _note_begun(self, begun: _InBackground) -> None:
        stall, total = begun.stall_sec, begun.ended - begun.started
        self._note(Save(step=begun.step, mode="async", save_stall_sec=stall, save_total_sec=total, bytes=begun.size))

    def _note(self, save: Save) -> None:
        self.journal.saved(save)
        waited = f"; training waited {save.save_stall_sec:.2f} s for it" if save.mode == "async" else ""
        logger.info(f"{place(save.step, self.config.total_steps)}  saved in {save.save_total_sec:.1f} s{waited}")
        if self._second:
            self._second.push(self.config.run_dir / store.folder_name(save.step))

    def _write_saves(self) -> None:
        if self._second:
            self.journal.record.second_copy = self._second.facts()
        self.journal.write(peaks=False)  # so that after a kill it lists every save

    def _failed(self, step: int, error: SaveError, *, stops: bool, then: str) -> None:
        line = self._not_saved(step, error)
        if stops:
            raise SaveError(f"{line}: free space or repair the folder, then continue with --resume") from error
        logger.warning(f"{line}; {then}")

    def _not_saved(self, step: int, error: BaseException) -> str:
        self.journal.failed_saves += 1
        return f"{place(step, self.config.total_steps)}  not saved: {error}; earlier checkpoints are untouched"

    def close(self, *, copy_sec: float) -> None:
        """Wait for a save in the background when an error ends the run, and ``copy_sec`` for its copy; not collective.

        Its checkpoint is from before the error. The other ranks write their parts to the end, too, unless they were
        killed. A failure of the save is logged, and does not hide the error.
        """
        if (begun := self._begun) is not None and begun.thread is not None:
            begun.thread.join()
            if begun.error is None:
                self._note_begun(begun)
            elif self._is_main:
                logger.warning(self._not_saved(begun.step, begun.error))
        if self._second:
            self._second.wait(copy_sec)
            self.journal.record.second_copy = self._second.facts()

    def finish_copy(self) -> None:
        """Wait until ``--save_to`` has the last checkpoint and the files of the complete run; not collective."""
        if self._second:
            logger.info(f"--save_to: copying the last checkpoint to {self.config.options.save_to}")
            self._second.wait()
            self.journal.record.second_copy = self._second.facts()
            self.journal.write("completed")
            self._second.copy_run_files()
