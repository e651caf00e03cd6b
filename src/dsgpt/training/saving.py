"""When a run saves, what a failure to save does to it, and how it is told."""

import time
from typing import Any

import torch

from dsgpt.checkpointing.training_state import KeptState
from dsgpt.common.errors import SaveError
from dsgpt.config.run_config import RunConfig
from dsgpt.runtime.process_group import HostGroup
from dsgpt.strategies.base import Strategy
from dsgpt.telemetry.console import Console
from dsgpt.training.background import Background
from dsgpt.training.checkpoint import Contents, keep_state, open_checkpoint, write_checkpoint, write_kept
from dsgpt.training.journal import Journal


class Saver:
    """Writes the checkpoints of a run: while it waits, or with ``--save_mode async`` while it goes on.

    Args:
        config: the run.
        console: is told.
        device: of this rank.
        strategy: has the state.
        journal: knows where the run stands, and takes what a save cost.
        fixed: what must agree when the run is resumed.
        run_id: of the record.
        ranks: all of them.
    """

    def __init__(
        self,
        config: RunConfig,
        console: Console,
        device: torch.device,
        strategy: Strategy,
        journal: Journal,
        *,
        fixed: dict[str, Any],
        run_id: str | None,
        ranks: HostGroup,
    ) -> None:
        self._config, self._console, self._device = config, console, device
        self._strategy, self._journal = strategy, journal
        self._about = {"fixed": fixed, "run_id": run_id}
        self._background = Background(ranks, is_main=config.topology.is_main)
        self._kept = KeptState()
        self._begun: dict[str, Any] = {}

    def save(self, step: int, *, needed: bool) -> None:
        """Write a checkpoint of ``step``, or begin to; collective.

        Args:
            step: the last one taken.
            needed: the run cannot do without, or ends with it: it is written before this returns.

        Raises:
            SaveError: on every rank, where the checkpoint could not be written and the run cannot do without, or was
                told to stop then; the one before may be meant.
            NonFiniteError: a weight is NaN or infinite.
        """
        started = time.perf_counter()
        if self._background.busy:
            self._hear(superseded=needed)
        mode = "sync" if needed else self._config.options.save_mode
        try:
            contents = open_checkpoint(
                self._config,
                self._strategy,
                self._device,
                state=self._journal.state(step),
                prepare=self._journal.before_save,
                warn=self._console.say,
                **self._about,
            )
            if mode == "async":
                keep_state(contents, self._strategy, self._kept)
                self._begun = {"step": step, "started": started, "ended": time.perf_counter()}
                self._background.begin(lambda: self._write_kept(contents))
                self._begun["stall"] = time.perf_counter() - started
            else:
                size = write_checkpoint(contents, self._strategy)
                seconds = time.perf_counter() - started
                self._tell(step, mode=mode, stall=seconds, total=seconds, size=size)
        except SaveError as error:
            self._failed(step, error, stops=needed or self._stops, then="going on (--on_save_failure continue)")
        self._journal.after_save()
        self._journal.write_saves()

    def _write_kept(self, contents: Contents) -> int:
        size = write_kept(contents, self._kept)
        self._begun["ended"] = time.perf_counter()
        return size

    def look(self) -> None:
        """Hear of a checkpoint that was completed meanwhile, or could not be; after every step, collective.

        Raises:
            SaveError: as ``save``.
            NonFiniteError: as ``save``.
        """
        if self._background.is_done():
            self._hear()

    @property
    def _stops(self) -> bool:
        return self._config.options.on_save_failure == "stop"

    def _hear(self, *, superseded: bool = False) -> None:
        """Take the end of the save in the background; a failure matters less if a needed one follows."""
        begun = self._begun
        try:
            size = self._background.wait()
        except SaveError as error:
            then = "the present step is saved now" if superseded else "going on (--on_save_failure continue)"
            self._failed(begun["step"], error, stops=self._stops and not superseded, then=then)
        else:
            total = begun["ended"] - begun["started"]
            self._tell(begun["step"], mode="async", stall=begun["stall"], total=total, size=size)
            self._journal.write_saves()

    def _tell(self, step: int, *, mode: str, stall: float, total: float, size: int) -> None:
        self._journal.saved(step=step, mode=mode, stall_sec=stall, total_sec=total, size=size)
        waited = f"; training waited {stall:.2f} s for it" if mode == "async" else ""
        self._say(step, f"saved in {total:.1f} s{waited}")

    def _failed(self, step: int, error: SaveError, *, stops: bool, then: str) -> None:
        self._journal.save_failed()
        line = f"not saved: {error}; earlier checkpoints are untouched"
        if stops:
            way_out = "make room or mend the folder, then continue with --resume"
            raise SaveError(f"{self._place(step)}  {line}: {way_out}") from error
        self._say(step, f"{line}; {then}")

    def _say(self, step: int, what: str) -> None:
        self._console.say(f"{self._place(step)}  {what}")

    def _place(self, step: int) -> str:
        return f"step {step:>6}/{self._config.total_steps}"

    def close(self) -> None:
        """Let a checkpoint that is being written be completed, because it is a good one; not collective.

        The run ends by an error, so that a failure of this one is told and no more.
        """
        busy, error, size = self._background.end()
        if not busy:
            return
        if error is None:
            total = self._begun["ended"] - self._begun["started"]
            self._tell(self._begun["step"], mode="async", stall=self._begun["stall"], total=total, size=size)
        else:
            self._journal.save_failed()
            self._say(self._begun["step"], f"not saved: {error}; earlier checkpoints are untouched")
