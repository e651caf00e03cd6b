"""The speed of a run for its lines and its record: throughput, its share of the hardware's peak, waiting for data."""

from typing import Any

from dsgpt.config.run_config import RunConfig
from dsgpt.planning.utilisation import Utilisation, utilisation
from dsgpt.runtime.process_group import HostGroup
from dsgpt.telemetry.interval import interval_figures
from dsgpt.telemetry.meter import Figures, StepMeter, throughput


class Speed:
    """Computes the speed of a run; every rank has one.

    Args:
        config: the run.
        description: of this process, with its hardware; empty on all ranks but the main one.
        ranks: all ranks.
    """

    def __init__(self, config: RunConfig, description: dict[str, Any], *, ranks: HostGroup) -> None:
        self._config, self._ranks = config, ranks
        self._here = self._utilisation_on(description)

    def interval(self, meter: StepMeter) -> dict[str, Any]:
        """The figures of the steps since the last call; collective, so that the slowest rank's data loading shows."""
        figures, meter.interval = meter.interval, Figures()
        waits = self._ranks.gathered(sum(figures.dataload_secs))
        return {**interval_figures(figures, waits=waits), "mfu": self._here.mfu(throughput(figures))}

    def of_run(self, meter: StepMeter, description: dict[str, Any]) -> dict[str, Any]:
        """The keys of the summary.

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
        }

    def _utilisation_on(self, description: dict[str, Any]) -> Utilisation:
        config = self._config
        hardware = description.get("hardware", {})
        return utilisation(config.model, hardware, seq_length=config.seq_length, precision=config.precision)
