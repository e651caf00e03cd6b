"""Limits on time and cost of a run, and the ``--on_event`` command."""

import contextlib
import logging
import statistics
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import psutil
from pydantic import Field

from dsgpt.common.errors import Interrupted, NonFiniteError, Problems
from dsgpt.common.json_files import JsonError, Positive, read_as
from dsgpt.common.text import duration
from dsgpt.config.run_config import RunConfig
from dsgpt.planner.hardware import SEC_PER_HOUR, Dollars
from dsgpt.record.schema import RECORD_FILE
from dsgpt.training.run_folder import EarlierRecord

logger = logging.getLogger(__name__)

STEPS, CHANGE = 20, 0.1
"""Steps to measure before the plan is compared with them, and the change of their ratio that is worth another line."""
# Time and money of a run: what it has spent, the limits of both, and its plan beside the steps as measured.

SLOW_DISK = 100e6
"""Assumed bytes per second of a save, until one is measured."""
RECORD_SEC = 60
"""Seconds after which the spent money is written into the record again."""


@dataclass(frozen=True, kw_only=True)
class PlannedSize:
    """The size of the model, or of the machine."""

    parameters: Positive = 1
    devices: Positive = 1
    fingerprint: str | None = None
    """Of the machine's rates."""


@dataclass(frozen=True, kw_only=True)
class PlannedTime:
    """The likely time of a step, or of a training of ``steps``."""

    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    uncorrected_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    steps: Positive = 1


@dataclass(frozen=True, kw_only=True)
class PlannedCost:
    """The price of an offer."""

    usd_per_hour: Dollars


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The keys of ``plan.json`` that a run is compared with."""

    strategy: str
    model: PlannedSize
    machine: PlannedSize
    precision: str | None = None
    seq_length: Positive
    micro_batch_size: Positive
    gradient_accumulation_steps: Positive
    data_parallel_size: Positive
    activation_checkpointing: bool = False
    step: PlannedTime
    training: PlannedTime
    costs: list[PlannedCost]
    """The cheapest first."""


def read_plan(config: RunConfig, problems: Problems) -> TrainingPlan | None:
    """The plan of ``--plan``; None without one. Refuses the plan of another training, and a limit without a price.

    An elastic launch may have another number of devices than was planned.
    """
    path, plan = config.options.plan, None
    if path is not None:
        try:
            plan = read_as(path, TrainingPlan, unknown_keys=True)
        except JsonError as error:
            problems.add(f"--plan {path}: is not a plan.json of src/plan.py ({error})")
            return None
        sequences = plan.micro_batch_size * plan.gradient_accumulation_steps * plan.data_parallel_size
        planned_and_run = {
            "strategy": (plan.strategy, config.strategy_name),
            "parameters": (plan.model.parameters, config.model.parameter_count()),
            "devices": (plan.machine.devices, config.topology.world_size),
            "precision": (plan.precision or config.precision, config.precision),
            "global batch": (sequences, config.batch.global_batch_size),
            "sequence length": (plan.seq_length, config.seq_length),
        }
        if config.topology.machines is not None:
            del planned_and_run["devices"]
        if other := [f"{name} {one}, not {two}" for name, (one, two) in planned_and_run.items() if one != two]:
            problems.add(f"--plan {path}: was made for {'; '.join(other)}: plan this training, or leave --plan out")
    if config.options.max_cost is not None and _usd_per_hour(config, plan) is None:
        problems.add("--max_cost needs a price: give --price_per_gpu_hour, or a --plan that has a cost")
    return plan


def _executes(config: RunConfig, plan: TrainingPlan) -> bool:
    """Whether a run executes its plan: with other micro batches or kernels it would say nothing about the rates."""
    options, batch, recomputes = config.options, config.batch, config.activation_checkpointing
    ours = (config.topology.world_size, batch.micro_batch_size, batch.gradient_accumulation_steps, recomputes)
    sizes = (plan.machine.devices, plan.micro_batch_size, plan.gradient_accumulation_steps)
    same = ours == (*sizes, plan.activation_checkpointing)
    return same and not (options.compile or options.pad_logits or options.mask_documents)


def _usd_per_hour(config: RunConfig, plan: TrainingPlan | None) -> float | None:
    """Dollars an hour of all machines of the run, spares included; None where no price was given."""
    if config.options.price_per_gpu_hour is not None:
        return config.options.price_per_gpu_hour * config.topology.started
    if plan is None or not plan.costs:
        return None
    return plan.costs[0].usd_per_hour * config.topology.started / plan.machine.devices


class Budget:
    """The time and money of a run; one per rank.

    Args:
        config: the run.
        plan: that of ``--plan``.
    """

    def __init__(self, config: RunConfig, plan: TrainingPlan | None) -> None:
        self._options, self._plan, self._total_steps = config.options, plan, config.total_steps
        self._tokens_per_step, self._planned_tokens_per_sec = config.tokens_per_step, None
        if plan is not None and plan.step.uncorrected_seconds and _executes(config, plan):
            self._planned_tokens_per_sec = config.tokens_per_step / plan.step.uncorrected_seconds
        self._usd_per_hour, self._earlier_usd = _usd_per_hour(config, plan), 0.0
        self._as_planned = plan is not None and plan.machine.devices == config.topology.world_size
        self._began = self._recorded = time.monotonic() - (time.time() - psutil.Process().create_time())
        self._assumed_save_sec = 12 * config.model.parameter_count() / SLOW_DISK
        self.save_secs: list[float] = []
        """Seconds of each save of this process."""
        self._times: deque[float] = deque(maxlen=10 * STEPS)
        self._said: float | None = None
        self.progressed: float | None = None
        """Time at which the run last took a step or validated a batch (``time.monotonic``); None before it began to."""
        self.longest_sec = 0.0
        """The longest time between two of these moments."""

    @property
    def process_sec(self) -> float:
        """Seconds since this process started, its imports included."""
        return max(0.0, time.monotonic() - self._began)

    def resume(self, earlier: EarlierRecord) -> None:
        """Add what earlier processes cost; where they had no price, their training at the price of this one."""
        if earlier.saves:
            self._assumed_save_sec = max(save.save_total_sec for save in earlier.saves)
        spent = earlier.plan.spent_usd if earlier.plan else None
        self._earlier_usd = self._usd(earlier.summary.total_wall_time_sec) or 0.0 if spent is None else spent

    def _usd(self, seconds: float | None) -> float | None:
        if self._usd_per_hour is None or seconds is None:
            return None
        return seconds * self._usd_per_hour / SEC_PER_HOUR

    @property
    def save_sec(self) -> float:
        """Seconds that a save takes: the longest so far."""
        return max(self.save_secs, default=self._assumed_save_sec)

    def progress(self) -> None:
        """Note that the run has taken a step, or validated a batch."""
        now = time.monotonic()
        if self.progressed is not None:
            self.longest_sec = max(self.longest_sec, now - self.progressed)
        self.progressed = now

    def reached(self) -> str | None:
        """The limit that one more step and the save after it might exceed; None if there is time for both."""
        seconds = self.process_sec + self.longest_sec + self.save_sec
        hours, dollars = self._options.max_hours, self._options.max_cost
        if hours is not None and seconds > hours * SEC_PER_HOUR:
            return f"--max_hours {hours:g}"
        if dollars is not None and self._earlier_usd + (self._usd(seconds) or 0.0) > dollars:
            return f"--max_cost {dollars:g}"
        return None

    def measured(self, lines: Sequence[dict[str, Any]]) -> bool:
        """Hold the plan against more steps, and log what changes; returns whether the record should be written."""
        self._times.extend(line["step_time_sec"] for line in lines if not line["warm_up"])
        due = self._usd_per_hour is not None and time.monotonic() - self._recorded > RECORD_SEC
        block = self.block() or {}
        ratio = block.get("step_vs_plan")
        if ratio and (self._said is None or abs(ratio - self._said) > CHANGE * self._said):
            self._said, due = ratio, True
            cost = f", ${block['usd']:,.2f} instead of ${block['planned_usd']:,.2f}" if block["usd"] else ""
            change = f"{abs(ratio - 1):.0%} {'slower' if ratio > 1 else 'faster'} than planned"
            times = f"{duration(block['seconds'])} instead of {duration(block['planned_seconds'])}"
            logger.info(f"plan        {change}: {times}{cost}")
        if due:
            self._recorded = time.monotonic()
        return due

    def block(self) -> dict[str, Any] | None:
        """The ``plan`` block of the record; None for a run without plan and price."""
        if self._plan is None and self._usd_per_hour is None:
            return None
        spent = self._usd(self.process_sec)
        planned = seconds = ratio = None
        if self._plan is not None and self._as_planned:
            step, training = self._plan.step.seconds, self._plan.training
            planned = training.seconds * self._total_steps / training.steps
            if len(self._times) >= STEPS:
                ratio = statistics.median(self._times) / step
                seconds = planned + self._total_steps * step * (ratio - 1)
        return {
            "path": str(self._options.plan) if self._plan else None,
            "comparable": self._as_planned if self._plan else None,
            "usd_per_hour": self._usd_per_hour,
            "spent_usd": None if spent is None else self._earlier_usd + spent,
            "step_vs_plan": ratio,
            "fingerprint": self._plan.machine.fingerprint if self._plan else None,
            "planned_tokens_per_sec": self._planned_tokens_per_sec,
            "tokens_per_sec": self._tokens_per_step / statistics.median(self._times) if ratio else None,
            "planned_seconds": planned,
            "seconds": seconds,
            "planned_usd": self._usd(planned),
            "usd": self._usd(seconds),
        }


# Calls the command of ``--on_event`` when something happens to a run that a person should know.

COMMAND_SEC = 30
"""Seconds that the command has; then it is killed."""
STALLED_SEC, STALLED_TIMES, POLL_SEC = 300, 3, 1.0
"""A run is stalled if it takes no step for this long and for this many times its longest time between two steps."""


def notify(config: RunConfig, event: str) -> None:
    """Call the command, on rank 0; its failure is one line and changes nothing."""
    command, record = config.options.on_event, config.run_dir / RECORD_FILE
    if not command or config.options.dry_run or not config.topology.is_main:
        return
    words = [*command, event, str(record)]
    try:
        # of its own session, so that Ctrl-C does not end it
        subprocess.run(words, stdin=subprocess.DEVNULL, timeout=COMMAND_SEC, check=True, start_new_session=True)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(f"--on_event {event}: {error}")


@contextlib.contextmanager
def end_reported(config: RunConfig) -> Iterator[None]:
    """Calls the command when the run inside has ended, and how."""
    event = "failed"
    try:
        yield
        event = "done"
    except NonFiniteError:
        event = "nan"
        raise
    except KeyboardInterrupt as error:
        event = "limit" if isinstance(error, Interrupted) and error.limit else "preempted"
        raise
    finally:
        notify(config, event)


@contextlib.contextmanager
def stalls_reported(config: RunConfig, budget: Budget) -> Iterator[None]:
    """Calls the command, once for each stall, while the run inside takes no step."""
    ended = threading.Event()

    def watch() -> None:
        reported: float | None = None
        while not ended.wait(POLL_SEC):
            last, longest = budget.progressed, max(STALLED_SEC, STALLED_TIMES * budget.longest_sec)
            if last is not None and last != reported and time.monotonic() - last > longest:
                reported = last
                logger.warning(f"no step for {duration(longest)}")
                notify(config, "stalled")

    thread = threading.Thread(target=watch, name="stalls", daemon=True)
    if config.topology.is_main:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.is_alive():
            thread.join()  # a command that runs has a time limit, and hears of the end after it
