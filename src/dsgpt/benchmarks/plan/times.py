"""Step times of the cells as the planner predicts them: from a calibration, fitted to a part of the cells."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from dsgpt.calibration.calibrate import calibrate
from dsgpt.planning.calibrations import Calibration, calibrated_machine, read_calibration
from dsgpt.planning.fitting import Factors, MeasuredStep, fit
from dsgpt.planning.setup import Setup
from dsgpt.planning.step_time import StepTime, predict_step

DEVICES = 2
"""Of the machine; the cells have one or two ranks."""


def calibration_in(folder: Path, *, seconds: float) -> Calibration:
    """Measure this machine for about ``seconds``."""
    path = folder / "calibration.json"
    calibrate(path, seconds=seconds, devices=DEVICES)
    return read_calibration(path)


def fitted(calibration: Calibration, measured: Sequence[tuple[Setup, float]]) -> Factors:
    """The factors that follow from the seconds of some setups."""
    return fit(
        [
            MeasuredStep(
                setup=setup, machine=calibrated_machine(calibration, devices=setup.world_size), seconds=seconds
            )
            for setup, seconds in measured
        ]
    )


def predicted_times(setups: Mapping[str, Setup], calibration: Calibration, factors: Factors) -> dict[str, StepTime]:
    """The step time of every setup, by its key."""
    machines = {
        setup.world_size: calibrated_machine(calibration, devices=setup.world_size) for setup in setups.values()
    }
    return {key: predict_step(setup, factors.applied(machines[setup.world_size])) for key, setup in setups.items()}
