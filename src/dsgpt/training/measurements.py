"""Which steps of a run are measured, with what, and which rank samples which GPUs.

First memory and traffic of one step, then what the flags ask for. A measurement slows its steps down, so throughput
and step times leave them out.
"""

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from dsgpt.config.run_config import RunConfig
from dsgpt.machine.process_group import gather_objects
from dsgpt.strategies.base import Strategy
from dsgpt.telemetry.communication_profile import CommunicationProfile
from dsgpt.telemetry.memory import TrafficMeter
from dsgpt.telemetry.meter import TimedBatches
from dsgpt.telemetry.monitor import Monitor, hardware_file, open_gpus
from dsgpt.telemetry.trace import PROFILE_FOLDER, Trace, trace_file
from dsgpt.training.journal import Journal

logger = logging.getLogger(__name__)


class Measurement(Protocol):
    """Measures steps that follow each other, from its creation until it is complete."""

    @property
    def complete(self) -> bool:
        """Whether it has all its steps."""

    def watch(self, step: int) -> contextlib.AbstractContextManager[None]:
        """A context for an optimizer step."""

    def finish(self) -> None:
        """Report what was measured; collective."""


class Measurements:
    """Measures the steps of this process on every rank; one at a time, and most steps run unchanged.

    Args:
        config: the run.
        device: of this rank.
        strategy: holds the model state.
        journal: receives what was measured.
        batches: wait for data.
    """

    def __init__(
        self, config: RunConfig, *, device: torch.device, strategy: Strategy, journal: Journal, batches: TimedBatches
    ) -> None:
        self._config, self._device, self._journal, self._batches = config, device, journal, batches
        self._traffic = TrafficMeter(
            lambda: strategy.state_tensors()._asdict(),
            last_step=config.total_steps,
            report=journal.traffic_measured,
        )
        options = config.options
        asked: dict[str, tuple[int, Callable[[], Measurement]]] = {
            "--profile_comm": (options.profile_comm, self._communication),
            "--profile": (options.profile, self._trace),
        }
        self._waiting = {flag: begin for flag, (steps, begin) in asked.items() if steps}
        self._current: Measurement | None = None
        self.watched = False
        """Whether the latest step was measured."""

    def _communication(self) -> Measurement:
        sleeps = self._config.options.num_workers > 0  # else this thread reads the data itself
        return CommunicationProfile(
            self._device,
            steps=self._config.options.profile_comm,
            data_wait=lambda: self._batches.seconds if sleeps else 0.0,
            traffic=self._traffic.own,
            report=self._journal.communication_profiled,
        )

    def _trace(self) -> Measurement:
        return Trace(
            self._device,
            steps=self._config.options.profile,
            path=self._config.run_dir / PROFILE_FOLDER / trace_file(self._config.topology.rank),
            report=self._traced,
        )

    def _traced(self, table: list[str], failures: list[str]) -> None:
        opened = f"traces: {self._config.run_dir / PROFILE_FOLDER}; https://ui.perfetto.dev opens them"
        for line in (*table, opened) if table else ():
            logger.info(line)
        for line in failures:
            logger.warning(f"--profile: {line}")

    @contextlib.contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """A context for optimizer step ``step``; collective."""
        current = contextlib.nullcontext() if self._current is None else self._current.watch(step)
        with self._traffic.watch(step), current:
            yield
        self.watched = self._traffic.watched or self._current is not None

    def after(self, step: int) -> None:
        """Report what ``step`` completed, and begin the next measurement; collective."""
        last = step == self._config.total_steps
        if self._current is not None and (self._current.complete or last):
            self._current.finish()
            self._current = None
        if self._waiting and last:
            logger.warning(f"{', '.join(self._waiting)}: the run ended before the steps that would have been measured")
        elif self._waiting and self._current is None and self._traffic.done:
            self._current = self._waiting.pop(next(iter(self._waiting)))()


# Which rank samples which GPUs: one rank of each machine samples those of all its ranks.


def open_monitor(config: RunConfig, device: torch.device) -> Monitor:
    """The monitor of this rank, which samples nothing on all ranks but the first of each machine; collective.

    It samples nothing on a CPU either, with ``--monitor_every 0``, and where there is no driver to ask.
    """
    every, topology = config.options.monitor_every, config.topology
    if device.type != "cuda" or not every:
        return Monitor()
    own = (socket.gethostname(), topology.local_rank, f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    ranks: list[tuple[str, int, str]] = gather_objects(own)
    uuids, node = gpus_to_sample(ranks, rank=topology.rank)
    return Monitor(open_gpus(uuids), path=config.run_dir / hardware_file(node), every=every) if uuids else Monitor()


def gpus_to_sample(ranks: list[tuple[str, int, str]], *, rank: int) -> tuple[list[str], int]:
    """The GPUs that ``rank`` samples, none for most ranks, and the number of its machine.

    Two machines may have the same name. Then each is given the GPUs of both, and finds only its own.

    Args:
        ranks: host, local rank and GPU of each rank.
        rank: the rank.
    """
    host, local_rank, _ = ranks[rank]
    if local_rank != 0:
        return [], 0
    node = sum(other == 0 for _, other, _ in ranks[:rank])
    return [uuid for other, _, uuid in ranks if other == host], node
