"""The training loop, and what it needs."""

import contextlib
import functools
import hashlib
import logging
import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from dsgpt.checkpoints.store import folder_name
from dsgpt.checkpoints.training_state import StateReader
from dsgpt.common.errors import Interrupted, InvariantError, NonFiniteError, SaveError, UserError
from dsgpt.common.files import write_atomic
from dsgpt.common.text import UNKNOWN, duration, next_line, script_words
from dsgpt.config.run_config import RunConfig
from dsgpt.data.loader import Batch, CopiedAhead, WindowDataset, micro_batches, training_windows, validation_windows
from dsgpt.data.order import RankShare
from dsgpt.formats.tensor_files import DTYPES
from dsgpt.inference.generation import measure_latency
from dsgpt.inference.model_files import build_model
from dsgpt.machine.console import Progress
from dsgpt.machine.device import HostGroup, barrier, gather_objects
from dsgpt.machine.launcher import Interruption, own_command, stop_signals_blocked
from dsgpt.machine.peers import Peers
from dsgpt.machine.spot import NOTICE_SEC, POLL_SEC
from dsgpt.record.schema import COMPLETE_FILE, RECORD_FILE
from dsgpt.strategies.base import Strategy
from dsgpt.telemetry.cost import TrafficMeter
from dsgpt.telemetry.meter import TimedBatches
from dsgpt.telemetry.monitor import Monitor, gpu_use, hardware_file, open_gpus
from dsgpt.telemetry.profiles import PROFILE_FOLDER, CommunicationProfile, StepsProfile, Trace, trace_file
from dsgpt.training.budget import Budget, stalls_reported
from dsgpt.training.invariants import Invariants
from dsgpt.training.journal import Journal, Validation
from dsgpt.training.saving import Saver

logger = logging.getLogger(__name__)

COPY_SEC = 60.0
"""Seconds that a run which stops early waits for ``--save_to``; fewer if its machine is taken back before."""

# The micro batches of a run, for training and for validation.


class Batches:
    """The micro batches of a loader or an iterator, and its worker processes from the start until ``close``.

    Workers must end before Python exits: they ignore SIGTERM (``ignore_stop_signals``), and Python's exit handler,
    which sends it to every child, would wait forever. After an error they live until ``close``, because the traceback
    refers to them.
    """

    def __init__(self, batches: Iterable[Batch]) -> None:
        with stop_signals_blocked():
            self._batches = iter(batches)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        """End the worker processes; no more batches can be read."""
        if isinstance(self._batches, _MultiProcessingDataLoaderIter):
            self._batches._shutdown_workers()
            for worker in self._batches._workers:
                if worker.is_alive():  # it is stuck, and ignores the SIGTERM that it was sent
                    worker.kill()
                    worker.join()


def training_batches(config: RunConfig, *, first_step: int) -> Batches:
    """This rank's micro batches from optimizer step ``first_step`` (the first is 0) to the end of the run."""
    dataset = WindowDataset(config.train, seq_length=config.seq_length, vocab_size=config.model.vocab_size)
    windows = training_windows(config.order, _share(config), range(first_step, config.total_steps))
    pin_memory = config.device == "cuda"
    return Batches(micro_batches(dataset, windows, workers=config.options.num_workers, pin_memory=pin_memory))


def _share(config: RunConfig) -> RankShare:
    return RankShare(
        micro_batch_size=config.batch.micro_batch_size,
        gradient_accumulation_steps=config.batch.gradient_accumulation_steps,
        data_rank=config.topology.data_rank,
        data_parallel_size=config.batch.data_parallel_size,
    )


# All ranks stop after the same step, although a request to stop may have reached only some of them.


class Stopping:
    """The ranks' common decision whether to stop.

    Args:
        interruption: the requests to this rank.
        budget: its limits are requests, too.
        ranks: all ranks; each call of ``agreed`` exchanges one integer between them.
        peers: hear of progress.
    """

    def __init__(self, interruption: Interruption, budget: Budget, ranks: HostGroup, peers: Peers) -> None:
        self._interruption, self._budget = interruption, budget
        self._ranks, self._peers = ranks, peers
        self._limit: str | None = None

    def agreed(self, *, steps_left: bool = True) -> bool:
        """Whether any rank was asked to stop; collective, with the same answer on every rank.

        The loop calls it after every step and every batch of a validation.

        Args:
            steps_left: if not, no limit stops the run: it would only have to be started again to end.
        """
        self._budget.progress()
        self._peers.note_progress()
        if steps_left:
            self._limit = self._limit or self._budget.reached()
        return bool(self._ranks.largest(int((self._interruption.reason or self._limit) is not None)))

    def stop(self, where: str, *, idle: bool = False) -> Interrupted:
        """The exception that every rank must raise; collective.

        Args:
            where: says in the message where the run stopped.
            idle: this process took no step. A repeated call would not take one either.

        Raises:
            UserError: ``idle``, because of a limit.
        """
        own = self._interruption.reason, self._limit
        reasons: list[tuple[tuple[str | None, str | None], float]] = gather_objects((own, self._interruption.asked_sec))
        signal, limit = (next(filter(None, each), None) for each in zip(*(one for one, _ in reasons), strict=True))
        if idle and limit and not signal:
            raise UserError(f"{limit} leaves no time for a step and its save: raise it")
        reason = signal or limit or "a request"
        asked_sec = max(seconds for _, seconds in reasons)
        return Interrupted(f"stopped by {reason} {where}", together=True, limit=reason == limit, asked_sec=asked_sec)


# What is measured of the steps, and which rank samples which GPUs.


class Measurements:
    """Measures the steps of this process on every rank; one at a time, and most steps run unchanged.

    First memory and traffic of one step, then what the flags ask for. A measurement slows its steps down, so throughput
    and step times leave them out.

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
            lambda: strategy.state_tensors()._asdict(), last_step=config.total_steps, report=journal.traffic_measured
        )
        asked = {"--profile_comm": config.options.profile_comm, "--profile": config.options.profile}
        self._waiting = [flag for flag, steps in asked.items() if steps]
        self._current: StepsProfile | None = None
        self.watched = False
        """Whether the latest step was measured."""

    def _begun(self, flag: str) -> StepsProfile:
        options = self._config.options
        if flag == "--profile_comm":
            sleeps = options.num_workers > 0  # else this thread reads the data itself
            return CommunicationProfile(
                self._device,
                steps=options.profile_comm,
                waited=lambda: self._batches.seconds if sleeps else 0.0,
                traffic=self._traffic.own,
                report=self._journal.communication_profiled,
            )
        path = self._config.run_dir / PROFILE_FOLDER / trace_file(self._config.topology.rank)
        return Trace(self._device, steps=options.profile, path=path)

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
            self._current = self._begun(self._waiting.pop(0))


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


# The end of a run: the inference speed of the trained model, and the file that says that the run is complete.


def measure_inference(config: RunConfig, *, device: torch.device, interruption: Interruption) -> dict[str, Any] | None:
    """Time generation with the weights of the last checkpoint, on the main rank while the others continue.

    Every strategy is measured with the same plain model. A request to stop ends the measurement at once, because an
    incomplete measurement is not saved.

    Returns:
        The ``inference`` block of the record; None on other ranks, and where it was not measured. Then a line says
        why: the run was asked to stop, the model has a single position, or this machine cannot generate with it.
    """
    checkpoint = config.run_dir / folder_name(config.total_steps)
    if not config.topology.is_main or interruption.reason:
        return None
    if not checkpoint.exists():
        logger.info("inference   not measured: the last checkpoint was not saved")
        return None
    measured = None
    try:
        reader = StateReader(checkpoint)
        weights = {name: reader.read(name) for name in reader.shapes}
        with interruption.patience(False):
            model = build_model(config.model, weights, device=device, dtype=DTYPES[config.precision])
            ids = torch.from_numpy(config.val.files[0].memmap()[: config.model.block_size].astype("int64")).to(device)
            measured = measure_latency(model, ids)
    except Interrupted:
        return None
    except torch.OutOfMemoryError:
        logger.info("inference   not measured: the GPU has no memory left for a second copy of the model")
    # PyTorch raises no narrower type for what a CPU or a GPU lacks, mmap raises OSError without memory. The training is
    # done and saved, and no other rank takes part in the measurement: only its figure is lost.
    # UserError: the trained model's logits are not finite.
    except (RuntimeError, MemoryError, OSError, UserError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        logger.warning(f"inference   not measured: {reason}; the trained model is saved")
    if measured is not None:
        speed = f"{measured['tokens_per_sec']:.0f} tokens/s (batch 1, greedy, key-value cache)"
        logger.info(f"inference   {measured['new_tokens']} tokens in {measured['latency_sec']:.2f} s, {speed}")
    return measured


def weights_hash(checkpoint: Path) -> str:
    """The sha256 of all weights of ``checkpoint``, by name: the same however many ranks wrote it."""
    reader, digest = StateReader(checkpoint), hashlib.sha256()
    for name in sorted(reader.shapes):
        digest.update(name.encode() + reader.read(name).float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def mark_complete(config: RunConfig, summary: dict[str, Any], *, weights: str | None = None) -> None:
    """Write ``RUN_COMPLETE.txt`` and print the result; main rank only.

    Args:
        config: the run.
        summary: that of its record.
        weights: the hash of its weights, with ``--exact``.
    """
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    losses = (summary["final_train_loss"], summary["final_val_loss"])
    train, validation = (UNKNOWN if loss is None else f"{loss:.4f}" for loss in losses)
    line = f"finished {config.total_steps} steps at {finished}: train loss {train}, validation loss {validation}"
    write_atomic(config.run_dir / COMPLETE_FILE, f"{line}\n".encode())
    tokens_per_sec = summary["mean_tokens_per_sec_global"]
    speed = f", {tokens_per_sec:,.0f} tokens/s" if tokens_per_sec else ""
    logger.info(f"{line}, training time {duration(summary['train_time_sec'])}{speed}")
    if weights:
        logger.info(f"weights     sha256 {weights}")
    logger.info(f"the record is {config.run_dir / RECORD_FILE}")
    if config.train.files[0].sidecar.tokenizer:
        then = script_words("src/generate.py", "--checkpoint", config.run_dir, "--prompt", "The")
    else:
        then = script_words("src/evaluate.py", "--checkpoint", config.run_dir, "--data", config.val.files[0].path)
    logger.info(next_line(then))


# The training loop, and what it needs. It does not depend on the strategy, device or launcher.


@dataclass(kw_only=True)
class Trainer:
    """Trains a run, from its first step or the one after its checkpoint, until its record is complete; one per rank."""

    config: RunConfig
    device: torch.device
    """Of this rank."""
    strategy: Strategy
    """Executes steps; the state of the checkpoint is already loaded into it."""
    journal: Journal
    """Receives what happens; it has the figures of earlier processes."""
    saver: Saver
    interruption: Interruption
    """Requests to stop this rank."""
    ranks: HostGroup
    """All ranks."""
    peers: Peers
    """Hear of progress, and name a rank that stands still."""
    done: int
    """Optimizer steps of earlier processes."""

    def __post_init__(self) -> None:
        self._monitor = open_monitor(self.config, self.device)
        self._stopping = Stopping(self.interruption, self.journal.budget, self.ranks, self.peers)
        self._invariants = Invariants(self.config, self.strategy, self.ranks, done=self.done)
        self.journal.meter.on_step_read = self.peers.note_step
        # A tracker's server may keep rank 0 waiting, and must not end the run.
        self.journal.on_flush = functools.partial(self.peers.begin, "record")

    def run(self) -> None:
        """Train, measure inference and complete the record; collective. After an error the record's ``status`` says so.

        Raises:
            InvariantError: a check of ``--check_invariants`` failed; that state was not saved.
            NonFiniteError: a loss, gradient norm or weight was NaN or infinite; that state was not saved.
            SaveError: a checkpoint could not be written.
            Interrupted: on every rank, if the run was asked to stop; every step that it took is saved.
        """
        source = self.config.options.spot_notice or ""
        notice_sec, save_sec = NOTICE_SEC.get(source, math.inf) - POLL_SEC, self.journal.budget.save_sec
        if source in NOTICE_SEC:
            say = logger.info if save_sec < notice_sec else logger.warning
            say(f"--spot_notice {source}: a notice leaves {notice_sec:.0f} s, and a save takes about {save_sec:.3g} s")
        with self.interruption.patience():
            try:
                self.journal.write()
                with self._monitor, stalls_reported(self.config, self.journal.budget):
                    self.fit()
                self._complete()
            except BaseException as error:
                if isinstance(error, Interrupted | InvariantError | NonFiniteError | SaveError):  # of all ranks
                    self.peers.end()
                asked_sec = error.asked_sec if isinstance(error, Interrupted) else 0.0
                self.saver.close(copy_sec=max(0.0, min(COPY_SEC, notice_sec - asked_sec)))
                self.journal.end_early("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
                if isinstance(error, Interrupted) and error.together:
                    logger.info(f"{error}; continue with --resume")
                    command = [word for word in own_command() if word not in {"--resume", "--overwrite"}]
                    logger.info(next_line([*command, "--resume"]))
                    barrier()  # the launcher ends all ranks when one exits; the main rank may still be writing files
                raise
            finally:
                self.journal.close()

    def fit(self) -> None:
        """Take the remaining steps; validate and save when they are due."""
        if self._stopping.agreed(steps_left=self.done < self.config.total_steps):
            raise self._stopping.stop("before it took a step", idle=True)
        with contextlib.closing(training_batches(self.config, first_step=self.done)) as batches:
            if self.device.type == "cuda":
                idle = torch.cuda.current_stream(self.device).query
                self._take_steps(TimedBatches(CopiedAhead(batches, self.device), idle=idle))
            else:
                self._take_steps(TimedBatches(batches))

    def _take_steps(self, batches: TimedBatches) -> None:
        config, journal, stopping = self.config, self.journal, self._stopping
        measured = Measurements(config, device=self.device, strategy=self.strategy, journal=journal, batches=batches)
        if self.done:  # the run may have been stopped before it validated and ended the epoch at the checkpoint's step
            validated = journal.last_val_step
            if not self._after_step(self.done):
                raise stopping.stop(f"after step {self.done}, which is saved", idle=True)
            if self.done == config.total_steps and journal.last_val_step != validated:
                self.saver.save(self.done, needed=True)  # the last checkpoint may be the best
        for step in range(self.done + 1, config.total_steps + 1):
            epoch = (step - 1) // config.order.steps_per_epoch
            self.peers.begin("step" if step > self.done + 1 else "compilation", step)
            journal.meter.start()
            take = measured.watch(step)(self.strategy.train_step)  # what the checks exchange is not measured
            result = self._invariants.checked_step(take, batches, step)
            waited, watched = batches.take_seconds(), measured.watched or self._invariants.due(step)
            journal.step_done(step=step, epoch=epoch, result=result, dataload_sec=waited, watched=watched)
            if step <= self.done + 2:  # the peers need to know early how long a step takes
                journal.flush()
            self.peers.begin("record")
            measured.after(step)
            self.peers.begin("agreement")
            self.peers.worked(waited + journal.meter.computing_sec)

            stop = stopping.agreed() or not self._after_step(step)
            last = step == config.total_steps
            if not (stop or last):  # else ``save`` below waits for the background save
                self.saver.poll()
            if stop or last or _due(step, config.options.save_every):
                journal.flush()
                self.peers.begin("save")
                self.saver.save(step, needed=stop or last)
            if stop:
                raise stopping.stop(f"after step {step}, which is saved")

    def _after_step(self, step: int) -> bool:
        """Validate and end the epoch if they are due after ``step``, the last one taken.

        Returns:
            False if a request to stop ended the validation; the resumed run repeats it.
        """
        config, journal = self.config, self.journal
        epoch_ends = step == config.total_steps or step % config.order.steps_per_epoch == 0
        if epoch_ends or _due(step, config.options.eval_every):
            journal.flush()
            if journal.last_val_step != step and not self._validate(step):
                return False
        if epoch_ends and journal.meter.epoch.steps:
            journal.epoch_done((step - 1) // config.order.steps_per_epoch)
        return True

    def _validate(self, step: int) -> bool:
        """Measure the validation loss and note it; False where a request to stop ended it."""
        started = time.perf_counter()
        self.peers.begin("validation")
        measure = functools.partial(validation_loss, self.config, self.strategy, stop=self._stopping.agreed)
        measured = self._invariants.validated(measure, step)
        if measured is None:
            return False
        self.peers.begin("record")
        self.journal.validated(step=step, validation=measured, seconds=time.perf_counter() - started)
        return True

    def _complete(self) -> None:
        config, journal = self.config, self.journal
        self.peers.begin("end")
        gpus = [figures for own in gather_objects(self._monitor.figures) for figures in own]
        tokens = journal.meter.process.steps * config.tokens_per_step
        journal.gpu_use = gpu_use(gpus, expected=config.topology.world_size, tokens=tokens)
        if not config.options.no_inference:
            journal.record.inference = measure_inference(config, device=self.device, interruption=self.interruption)
        if self._stopping.agreed(steps_left=False):
            raise self._stopping.stop("when all steps were done and saved, before the end of the run")
        last = config.run_dir / folder_name(config.total_steps)
        if config.options.exact and config.topology.is_main and last.exists():
            journal.record.weights_sha256 = weights_hash(last)
        journal.write("completed")
        if config.topology.is_main:
            mark_complete(config, journal.record.summary, weights=journal.record.weights_sha256)
        barrier()
        self.peers.end()
        self.saver.finish_copy()


def validation_loss(
    config: RunConfig, strategy: Strategy, *, stop: Callable[[], bool] = lambda: False
) -> Validation | None:
    """The mean loss over the validation windows, which are the same, in the same order, for every strategy; collective.

    Args:
        config: the run.
        strategy: computes the losses.
        stop: called before each batch; returns the same on every rank.

    Returns:
        The losses; None where ``stop`` ended it.
    """
    size = config.batch.global_batch_size
    dataset = WindowDataset(config.val, seq_length=config.seq_length, vocab_size=config.model.vocab_size)
    windows = validation_windows(config.val_parts, _share(config), global_batch_size=size)
    batches = Batches(micro_batches(dataset, windows, workers=0, pin_memory=config.device == "cuda"))
    steps = [-(-len(part) // size) for part in config.val_parts]
    progress = Progress(total=sum(steps), what="validating", unit="batch")
    sums = []
    with contextlib.closing(progress), contextlib.closing(batches):
        for _ in range(sum(steps)):
            if stop():
                return None
            sums.append(torch.stack(strategy.eval_step(batches)))
            progress.advance()
    by_source = torch.stack([own.sum(dim=0) for own in torch.split(torch.stack(sums), steps)])  # (sources, 2)
    loss_sum, tokens = by_source.sum(dim=0).tolist()
    names = [source.name for source in config.val.sources]
    own_losses = (by_source[:, 0] / by_source[:, 1]).tolist()
    return Validation(loss_sum / tokens, int(tokens), dict(zip(names, own_losses, strict=True)))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
