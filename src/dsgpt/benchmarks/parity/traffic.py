"""What a cell cost, measured and by the formulas of ``dsgpt.planning``."""

from typing import Any

from dsgpt.config.run_config import RunConfig
from dsgpt.planning.communication import most_sent_bytes
from dsgpt.planning.model_state import largest_model_state
from dsgpt.telemetry.step_traffic import MODEL_STATE
from dsgpt.training.run_description import setup_of

SENT = "sent"
"""Bytes that the busiest rank sends in a step, beside the categories of ``MODEL_STATE``."""


def compared(measured: dict[str, Any], config: RunConfig) -> dict[str, dict[str, int | None]]:
    """Measured bytes and those of the formulas, by category; both of the rank that has most.

    Args:
        measured: the ``cost`` block of a run's record.
        config: the run.
    """
    setup = setup_of(config)
    state, traffic = measured["model_state_bytes_per_rank"], measured["communication_per_step"]
    predicted = largest_model_state(setup)
    found = {name: {"measured": state[name], "formula": getattr(predicted, name)} for name in MODEL_STATE}
    sent = None if traffic is None else traffic["ring_bytes_per_rank"]
    return found | {SENT: {"measured": sent, "formula": most_sent_bytes(setup)}}
