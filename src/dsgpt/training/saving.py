"""Saves a run's checkpoints, handles failed saves, and logs both."""

import logging
import time
from dataclasses import dataclass
from typing import Any

import torch

from dsgpt.checkpointing.training_state import KeptState
from dsgpt.common.errors import SaveError
from dsgpt.config.run_config import RunConfig
from dsgpt.runtime.process_group import HostGroup
from dsgpt.strategies.base import Strategy
from dsgpt.training.background import Background
from dsgpt.training.checkpoint import Contents, keep_state, open_checkpoint, write_checkpoint, write_kept
from dsgpt.training.journal import Journal
from dsgpt.training.sinks import place

logger = logging.getLogger(__name__)

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
