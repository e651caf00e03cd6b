"""Loss scaling for fp16: one object's rules for every strategy, so that all of them scale by the same factor.

The rules are DeepSpeed 0.19.8's (``deepspeed/runtime/fp16/loss_scaler.py``), which the JSON's ``fp16`` block speaks of;
torch's ``GradScaler`` knows no hysteresis. DeepSpeed's own scaler is not used: its effective scale grows with the
number of ranks, and its optimizers change the scale between scaling and unscaling one gradient.

At the edge of overflow two strategies may still skip different steps, because some add up micro batches or ranks in
fp16 and others in fp32.
"""

from dsgpt.checkpointing.training_state import LossScaleState
from dsgpt.common.errors import NonFiniteError
from dsgpt.config.recipe_blocks import LossScaling

MOST_SKIPS = 100
"""A fixed scale cannot adapt: this many overflows in a row mean that it never will fit."""


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
        self._skips = 0

    def update(self, *, overflow: bool) -> None:
        """Note whether a step's gradients overflowed; lower the factor after overflows, raise it after calm.

        Raises:
            NonFiniteError: they overflow at the smallest factor allowed, or again and again at a fixed one.
        """
        self._skips = self._skips + 1 if overflow else 0
        if not self._dynamic:
            if self._skips >= MOST_SKIPS:
                raise NonFiniteError(
                    f"fp16 gradients overflowed in {MOST_SKIPS} steps in a row at the fixed loss scale "
                    f"{self.factor:g}: training stopped; lower loss_scale, or leave it out for a dynamic one"
                )
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

    def state(self) -> LossScaleState | None:
        """For a checkpoint; None in a precision that needs no scaling."""
        if not self.enabled:
            return None
        return LossScaleState(
            factor=self.factor, step=self._step, last_overflow=self._last_overflow, patience=self._patience
        )

    def take_up(self, state: LossScaleState | None) -> None:
        """Continue where ``state`` was taken; a fixed factor is the recipe's."""
        if state is None or not self._dynamic:
            return
        self.factor, self._step = state.factor, state.step
        self._last_overflow, self._patience = state.last_overflow, state.patience
