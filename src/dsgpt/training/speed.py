"""The speed of a run for its lines and its record: throughput, its share of the hardware's peak, ranks that wait."""

import logging
from typing import Any

from dsgpt.common.errors import UserError
from dsgpt.config.run_config import RunConfig
from dsgpt.planning.calibrations import Calibration, read_calibration
from dsgpt.planning.rates import CALIBRATION
from dsgpt.planning.utilisation import Utilisation, utilisation
from dsgpt.runtime.process_group import HostGroup
from dsgpt.telemetry.interval import RankShare, RankTimes, interval_figures
from dsgpt.telemetry.meter import StepMeter, throughput

logger = logging.getLogger(__name__)


class Speed:
    """Computes the speed of a run; every rank has one.

    Args:
        config: the run.
        description: of this process, with its hardware; empty on all ranks but the main one.
        ranks: all ranks.
    """

    def __init__(self, config: RunConfig, description: dict[str, Any], *, ranks: HostGroup) -> None:
        self._config, self._ranks = config, ranks
        on_cpu = description.get("hardware", {}).get("device") == "cpu"
        self._calibration = _calibration_of_this_machine() if on_cpu else None
        self._here = self._utilisation_on(description)
        self._times = RankTimes()

    def interval(self, meter: StepMeter) -> dict[str, Any]:
        """The figures of the steps since the last call; collective: the ranks are compared."""
        figures, computing_sec = meter.take_interval()
        own = RankShare(sum(figures.dataload_secs), computing_sec, meter.last_own_loss)
        ranks = [RankShare(*values) for values in self._ranks.gathered(own)]
        interval, times = interval_figures(figures, ranks=ranks)
        self._times.add(times)
        return {**interval, "mfu": self._here.mfu(throughput(figures))}

    def of_run(self, meter: StepMeter, description: dict[str, Any]) -> dict[str, Any]:
        """The keys of the summary; those that compare ranks are of the steps of this process that were shown.

        Args:
            meter: of the run.
            description: what all segments of the run share: without a common hardware its share is unknown.
        """
        use, tokens_per_sec = self._utilisation_on(description), throughput(meter.run)
        return {
            "mean_tokens_per_sec_global": tokens_per_sec,
            "mean_tokens_per_sec_per_device": use.per_device(tokens_per_sec),
            "flops_per_token": use.flops_per_token,
            "mfu": use.mfu(tokens_per_sec),
            **self._times.figures(),
        }

    def _utilisation_on(self, description: dict[str, Any]) -> Utilisation:
        config = self._config
        hardware = description.get("hardware", {})
        return utilisation(
            config.model,
            hardware,
            seq_length=config.seq_length,
            precision=config.precision,
            calibration=self._calibration,
        )


def _calibration_of_this_machine() -> Calibration | None:
    """What ``plan.py --calibrate`` measured, if it did."""
    if not CALIBRATION.exists():
        return None
    try:
        return read_calibration(CALIBRATION)
    except UserError:
        logger.warning(f"MFU is unknown: {CALIBRATION} cannot be used; write it again with src/plan.py --calibrate")
        return None
