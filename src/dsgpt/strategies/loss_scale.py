"""Loss scaling for fp16 under plain PyTorch, rule for rule DeepSpeed's, so that both skip the same steps.

DeepSpeed 0.19.8, ``deepspeed/runtime/fp16/loss_scaler.py``. torch's ``GradScaler`` knows no hysteresis, DeepSpeed's
default, and so would skip other steps than the run it is compared with.
"""

from dsgpt.errors import NonFiniteError
from dsgpt.recipe import LossScaling


class LossScale:
    """The factor on the loss: 1 in other precisions, fixed or dynamic in fp16."""

    def __init__(self, scaling: LossScaling | None) -> None:
        """Follow ``scaling``, the JSON's ``fp16`` block; None for a precision that needs no scaling."""
        self.enabled = scaling is not None
        self._scaling = scaling or LossScaling(loss_scale=1.0)
        self._dynamic = self._scaling.loss_scale == 0
        self.factor = 2.0**self._scaling.initial_scale_power if self._dynamic else self._scaling.loss_scale
        self._step = 0
        self._last_overflow = -1
        self._patience = self._scaling.hysteresis

    def update(self, *, overflow: bool) -> None:
        """Note whether a step's gradients overflowed; lower the factor after overflows, raise it after calm.

        Raises:
            NonFiniteError: they overflow at the smallest factor allowed.
        """
        if not self._dynamic:
            return
        if overflow:
            self._lower()
            self._last_overflow = self._step
        else:
            self._raise()
        self._step += 1

    def _lower(self) -> None:
        if self._patience > 1:
            self._patience -= 1
            return
        smallest = self._scaling.min_loss_scale
        if self.factor == smallest:
            raise NonFiniteError(
                f"fp16 gradients overflow at the smallest loss scale, {smallest:g}: training stopped; lower the "
                "learning rate, or take bf16 or fp32"
            )
        self.factor = max(self.factor / 2, smallest)

    def _raise(self) -> None:
        if self._scaling.consecutive_hysteresis:
            self._patience = self._scaling.hysteresis
        calm = self._step - self._last_overflow - 1
        if calm > 0 and calm % self._scaling.loss_scale_window == 0:
            if not self._scaling.consecutive_hysteresis:
                self._patience = self._scaling.hysteresis
            self.factor *= 2

    def state(self) -> dict[str, float | int]:
        """For a checkpoint."""
        return {
            "factor": self.factor,
            "step": self._step,
            "last_overflow": self._last_overflow,
            "patience": self._patience,
        }

    def take_up(self, state: dict[str, float | int]) -> None:
        """Continue where ``state`` was taken."""
        self.factor, self._step = state["factor"], state["step"]
        self._last_overflow, self._patience = state["last_overflow"], state["patience"]
