"""Lines and figures from the times and losses of steps."""

import time
from typing import Any

import pytest
import torch

from dsgpt.common.errors import NonFiniteError
from dsgpt.machine.console import duration
from dsgpt.strategies.base import StepResult
from dsgpt.telemetry.meter import Figures, StepMeter, TimedBatches, require_finite, throughput, timing_figures

CPU = torch.device("cpu")


def result(loss: float) -> StepResult:
    return StepResult(
        loss=torch.tensor(loss),
        own_loss=torch.tensor(loss + 1),
        grad_norm=torch.tensor(1.0),
        lr=0.1,
        skipped=torch.tensor(False),
    )


def metered(steps: int, *, seconds: float = 0.01) -> tuple[StepMeter, list[dict[str, Any]]]:
    meter = StepMeter(CPU, tokens_per_step=100)
    for step in range(1, steps + 1):
        started = meter.start()
        time.sleep(seconds)
        meter.stop(started, step=step, epoch=0, result=result(float(step)), dataload_sec=0.001 * step)
    return meter, meter.flush()


def test_a_line_per_step():
    meter, lines = metered(5)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["tokens"] for line in lines] == [100, 200, 300, 400, 500]
    assert [line["warm_up"] for line in lines] == [True, True, True, False, False]
    for line in lines:
        assert line["step_time_sec"] >= 0.01
        assert line["tokens_per_sec"] == pytest.approx(100 / line["step_time_sec"])
    assert lines[-1]["train_time_sec"] == pytest.approx(sum(line["step_time_sec"] for line in lines))
    assert meter.flush() == []
    assert meter.last_loss == 5.0


def test_throughput_leaves_the_warm_up_out():
    meter, lines = metered(6)
    counted = [line["step_time_sec"] for line in lines[3:]]
    assert throughput(meter.run) == pytest.approx(300 / sum(counted))
    assert timing_figures(meter.run)["step_time_mean_sec"] == pytest.approx(sum(counted) / 3)
    assert timing_figures(meter.run)["dataload_time_mean_sec"] == pytest.approx(0.005)


def test_with_nothing_but_warm_up_the_throughput_is_unknown():
    meter, _ = metered(3)
    assert throughput(meter.run) is None
    assert set(timing_figures(meter.run).values()) == {None}


def test_a_resumed_run_counts_its_earlier_steps():
    earlier, lines = metered(5)
    lines.insert(4, {"step": 4, "val_loss": 2.0, "wall_time_sec": 1000.0})
    lines[-1]["wall_time_sec"] = 2000.0
    meter = StepMeter(CPU, tokens_per_step=100)
    meter.resume(lines, done=5, epoch_start=0)
    assert meter.run == meter.epoch == earlier.run
    assert 2000 <= meter.wall_seconds() < 2010
    other_epoch = StepMeter(CPU, tokens_per_step=100)
    other_epoch.resume(lines, done=5, epoch_start=5)
    assert (other_epoch.run, other_epoch.epoch) == (earlier.run, Figures())


def test_wall_time_is_when_the_step_ended():
    meter = StepMeter(CPU, tokens_per_step=100)
    started = meter.start()
    meter.stop(started, step=1, epoch=0, result=result(1.0), dataload_sec=0.0)
    ended = meter.wall_seconds()
    time.sleep(0.05)
    (line,) = meter.flush()
    assert line["wall_time_sec"] <= ended < ended + 0.05 <= meter.wall_seconds()


def test_lost_steps_make_sums_unknown_and_counts_stay():
    _, lines = metered(5)
    meter = StepMeter(CPU, tokens_per_step=100)
    meter.resume(lines[2:], done=5, epoch_start=3, wall_sec=70.0, last_loss=9.0)
    assert (meter.run.steps, meter.run.train_sec, meter.run.loss_mean()) == (5, None, None)
    assert (meter.epoch.steps, meter.epoch.loss_mean(), meter.last_loss) == (2, 4.5, 9.0)
    meter.stop(meter.start(), step=6, epoch=0, result=result(1.0), dataload_sec=0.0)
    (line,) = meter.flush()
    assert line["train_time_sec"] is None
    assert line["wall_time_sec"] >= 70


def test_steps_that_the_device_has_not_finished_wait(monkeypatch):
    """A stand-in for a GPU that has finished only step 1."""
    meter = StepMeter(CPU, tokens_per_step=100)
    for step in (1, 2):
        meter.stop(meter.start(), step=step, epoch=0, result=result(1.0), dataload_sec=0.0)
    first = meter._pending[0].ended
    monkeypatch.setattr(meter._clock, "reached", lambda mark: mark == first)
    assert [line["step"] for line in meter.flush(wait=False)] == [1]
    assert [line["step"] for line in meter.flush()] == [2]


def test_waiting_for_data_is_timed_and_counted_once():
    def slow():
        for number in range(3):
            time.sleep(0.02)
            yield number

    batches = TimedBatches(slow())
    assert [next(batches), next(batches)] == [0, 1]
    assert batches.take_seconds() >= 0.04
    assert batches.take_seconds() == 0.0
    assert list(batches) == [2]


@pytest.mark.parametrize("bad", [{"loss": float("nan")}, {"loss": float("inf")}, {"grad_norm": float("nan")}])
def test_a_value_that_is_not_finite_stops_the_run(bad):
    good = {"step": 1, "loss": 1.0, "grad_norm": 1.0, "skipped": False}
    require_finite([good, good | {"skipped": True, "grad_norm": float("inf")}])  # fp16 loss scaling skips such steps
    with pytest.raises(NonFiniteError, match=r"step 7: loss .*: training stopped, and this state is not saved"):
        require_finite([good, good | {"step": 7} | bad])


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10.0 s"),
        (42.4, "42 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7620, "2 h 07 min"),
    ],
)
def test_durations_in_words(seconds, words):
    assert duration(seconds) == words
