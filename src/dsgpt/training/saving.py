"""Saves a run's checkpoints, in the loop or beside it.

Writes one checkpoint of a run: the state of training, the random states and the tokenizer. After each part the ranks
exchange whether they succeeded. If one fails, all fail with its reason, and no rank waits for a failed one.
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
from dsgpt.machine.process_group import HostGroup, from_main, gather_objects
from dsgpt.model.gpt2 import parameter_shapes
from dsgpt.strategies.base import Strategy
from dsgpt.training.data_check import data_tokenizer
from dsgpt.training.journal import Journal
from dsgpt.training.sinks import place

# Work that a thread of the main rank does while training continues; all ranks learn together when it ends.


class Background:
    """One piece of work at a time, in a thread of the main rank. Every rank has one and makes the same calls.

    Args:
        ranks: all ranks.
        is_main: whether this is the main rank.
    """

    def __init__(self, ranks: HostGroup, *, is_main: bool) -> None:
        self._ranks, self._is_main = ranks, is_main
        self._thread: threading.Thread | None = None
        self._result = 0
        self._error: BaseException | None = None
        self.busy = False
        """Whether work was begun and not waited for; the same on every rank."""

    def begin(self, work: Callable[[], int]) -> None:
        """Start ``work`` on the main rank; no other work may be running."""
        self.busy, self._error = True, None
        if self._is_main:
            self._thread = threading.Thread(target=self._do, args=(work,), name="background")
            self._thread.start()

    def _do(self, work: Callable[[], int]) -> None:
        try:
            self._result = work()
        except BaseException as error:  # noqa: BLE001 - ``wait`` raises it on every rank
            self._error = error
            if not isinstance(error, SaveError | NonFiniteError):
                print_traceback()

    def is_done(self) -> bool:
        """Whether there is work that has ended; collective, with the same answer on every rank."""
        if not self.busy:
            return False
        ended = self._thread is not None and not self._thread.is_alive()
        return bool(self._ranks.largest(int(ended)))

    def wait(self) -> int:
        """Wait for the end of the work; returns its result on every rank; collective.

        Raises:
            NonFiniteError: the work raised it; on every rank.
            SaveError: the work failed in another way; on every rank.
        """
        _, error, own = self.end()
        kind: str
        message: str
        result: int
        kind, message, result = from_main((type(error).__name__, str(error), own))
        if kind == NonFiniteError.__name__:
            raise NonFiniteError(message)
        if kind == SaveError.__name__:
            raise SaveError(message)
        if kind != type(None).__name__:
            raise SaveError(f"{kind}: {message}") from error
        return result

    def end(self) -> tuple[bool, BaseException | None, int]:
        """Wait for the end of the work on this rank; not collective.

        Returns:
            Whether this rank had work that was not waited for, its error, and its result.
        """
        had = self._thread is not None
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.busy = False
        return had, self._error, self._result


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
            # Before the first byte: the checkpoint will be about as large as the last one.
            found = store.checkpoints(config.run_dir)
            with contextlib.suppress(UserError):  # the size of the last one is unknown
                require_room(config.run_dir, parse_manifest(found[0]).size if found else 0)

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


def _refuse_non_finite(non_finite: list[str], *, step: int) -> None:
    """Refuse weights that the last update made NaN or infinite: no loss was computed with them yet."""
    if non_finite:
        raise NonFiniteError(
            f"step {step}: {', '.join(non_finite[:3])} became NaN or infinite: training stopped, and this state is not "
            "saved; lower the learning rate or lengthen the warm-up"
        )


# Saves a run's checkpoints, handles failed saves, and logs both.

_CONTINUES = "the run continues (--on_save_failure continue)"


@dataclass(kw_only=True)
class _Begun:
    """A save in the background. Times are those of ``perf_counter``."""

    step: int
    started: float
    ended: float
    stall_sec: float = 0.0
    """Seconds that training waited for it."""


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
        self._about = about
        self._background = Background(ranks, is_main=config.topology.is_main)
        self._kept = KeptState()
        self._begun: _Begun | None = None

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
        if self._background.busy:
            self._collect(superseded=needed)
        in_background = self._config.options.save_mode == "async" and not needed
        try:
            contents = open_checkpoint(
                self._config,
                self._strategy,
                device=self._device,
                state=self._journal.state(step),
                about=self._about,
                prepare=self._journal.before_save,
            )
            if in_background:
                self._begin(contents, started=started)
            else:
                size = write_checkpoint(contents, self._strategy)
                seconds = time.perf_counter() - started
                self._note(step, mode="sync", stall_sec=seconds, total_sec=seconds, size=size)
        except SaveError as error:
            self._failed(step, error, stops=needed or self._stops, then=_CONTINUES)
        self._journal.after_save()
        self._journal.write_saves()

    def _begin(self, contents: Contents, *, started: float) -> None:
        keep_state(contents, self._strategy, self._kept)
        begun = _Begun(step=contents.state.step, started=started, ended=time.perf_counter())

        def write() -> int:
            size = write_kept(contents, self._kept)
            begun.ended = time.perf_counter()
            return size

        self._begun = begun
        self._background.begin(write)
        begun.stall_sec = time.perf_counter() - started

    def poll(self) -> None:
        """Record the save in the background if it has ended; called after every step, collective.

        Raises:
            SaveError: as ``save``.
            NonFiniteError: as ``save``.
        """
        if self._background.is_done():
            self._collect()

    @property
    def _stops(self) -> bool:
        return self._config.options.on_save_failure == "stop"

    def _collect(self, *, superseded: bool = False) -> None:
        """Wait for the save in the background; a failure does not stop the run if a needed save follows."""
        assert self._begun is not None  # the background is busy
        begun = self._begun
        try:
            size = self._background.wait()
        except SaveError as error:
            then = "the current step is saved now" if superseded else _CONTINUES
            self._failed(begun.step, error, stops=self._stops and not superseded, then=then)
        else:
            self._note_begun(begun, size=size)
            self._journal.write_saves()

    def _note_begun(self, begun: _Begun, *, size: int) -> None:
        total = begun.ended - begun.started
        self._note(begun.step, mode="async", stall_sec=begun.stall_sec, total_sec=total, size=size)

    def _note(self, step: int, *, mode: str, stall_sec: float, total_sec: float, size: int) -> None:
        self._journal.saved(step=step, mode=mode, stall_sec=stall_sec, total_sec=total_sec, size=size)
        waited = f"; training waited {stall_sec:.2f} s for it" if mode == "async" else ""
        logger.info(f"{self._place(step)}  saved in {total_sec:.1f} s{waited}")

    def _failed(self, step: int, error: SaveError, *, stops: bool, then: str) -> None:
        self._journal.save_failed()
        line = self._not_saved(step, error)
        if stops:
            raise SaveError(f"{line}: free space or repair the folder, then continue with --resume") from error
        logger.warning(f"{line}; {then}")

    def _not_saved(self, step: int, error: BaseException) -> str:
        return f"{self._place(step)}  not saved: {error}; earlier checkpoints are untouched"

    def _place(self, step: int) -> str:
        return place(step, self._config.total_steps)

    def close(self) -> None:
        """Wait for a save in the background when an error ends the run; not collective.

        Its checkpoint is from before the error. A failure of the save is logged, and does not hide the error.
        """
        busy, error, size = self._background.end()
        if not busy or self._begun is None:
            return
        if error is None:
            self._note_begun(self._begun, size=size)
        else:
            self._journal.save_failed()
            logger.warning(self._not_saved(self._begun.step, error))
