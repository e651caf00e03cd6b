"""Rates fitted to measured steps."""

import pytest
from round_machine import machine

from dsgpt.planner.fitting import MeasuredStep, fit
from dsgpt.planner.rates import Machine
from dsgpt.planner.setup import Setup
from dsgpt.planner.step_time import predict_step


def slower(setup: Setup, *, compute: float, communication: float) -> MeasuredStep:
    """A step on a machine that computes and sends slower than its rates say; reading memory costs nothing there."""
    rates = machine(memory=1e30).rates
    for precision in ("fp32", "bf16"):
        rates = rates.in_precision(precision, slower=compute)
    true = _with(rates.scaled(compute=1, communication=communication))
    return MeasuredStep(setup=setup, machine=machine(memory=1e30), seconds=predict_step(setup, true).seconds)


def _with(rates) -> Machine:
    return machine(**{name: getattr(rates, name) for name in vars(rates)})


def test_a_fit_finds_the_factors_of_a_machine(setup):
    setups = [setup(run_type="baseline", world_size=1), setup(run_type="ddp"), setup("zero2"), setup("tensor")]
    found = fit([slower(each, compute=1.7, communication=2.5) for each in setups])
    assert found.compute == {"fp32": pytest.approx(1.7, rel=1e-4)}
    assert found.communication == pytest.approx(2.5, rel=1e-4)
    assert found.spread == pytest.approx(0, abs=1e-4)
    unseen = slower(setup("sequence"), compute=1.7, communication=2.5)
    fitted = found.applied(unseen.machine)
    step = predict_step(unseen.setup, fitted)
    assert step.seconds == pytest.approx(unseen.seconds, rel=1e-4)
    assert step.least < step.seconds < step.most
    assert "fitted to measured steps (4)" in fitted.basis


def test_each_precision_has_its_own_factor(setup):
    alone = {"run_type": "baseline", "world_size": 1}
    steps = [
        slower(setup(**alone), compute=2.0, communication=1),
        slower(setup(**alone, precision="bf16"), compute=3.0, communication=1),
    ]
    found = fit(steps)
    assert found.compute == {"bf16": pytest.approx(3.0), "fp32": pytest.approx(2.0)}
    assert found.communication == 1


def test_the_spread_is_what_a_fit_to_the_others_misses(setup):
    """The first step is predicted from the others as the root of 2 x 4. All three miss it less: by 1."""
    alone = setup(run_type="baseline", world_size=1)
    steps = [slower(alone, compute=each, communication=1) for each in (1.0, 2.0, 4.0)]
    assert fit(steps).compute == {"fp32": pytest.approx(2.0)}
    assert fit(steps).spread == pytest.approx(8**0.5 - 1)
    assert fit(steps[1:2]).spread == pytest.approx(0.5)  # without it nothing is fitted
