"""Loss scaling for fp16, with the same rules under every strategy, so that all of them scale by the same factor.

The rules are DeepSpeed 0.19.8's (``deepspeed/runtime/fp16/loss_scaler.py``), because the keys of the JSON's ``fp16``
block are DeepSpeed's; torch's ``GradScaler`` has no hysteresis. DeepSpeed's scaler is not used: its effective scale
grows with the number of ranks, and its optimizers change the scale between scaling and unscaling one gradient.

Near overflow two strategies may still skip different steps, because some sum micro batches or ranks in fp16 and others
in fp32.
"""

from dsgpt.checkpoints.training_state import LossScaleState
from dsgpt.common.errors import NonFiniteError
from dsgpt.config.recipe_blocks import LossScaling

MOST_SKIPS = 100
"""At a fixed scale, which cannot adapt, training stops after this many overflows in a row."""


class LossScale:
    """The factor on the loss: 1 in other precisions, fixed or dynamic in fp16."""

    def __init__(self, scaling: LossScaling | None) -> None:
        """Begin at the scale of ``scaling``, the JSON's ``fp16`` block; None for a precision that needs no scaling."""
        self.enabled = scaling is not None
        self._scaling = scaling or LossScaling(loss_scale=1.0)
        self._dynamic = self._scaling.loss_scale == 0
        self.factor = 2.0**self._scaling.initial_scale_power if self._dynamic else self._scaling.loss_scale
        self._step = 0
        self._last_overflow = -1
        self._patience = self._scaling.hysteresis
        self._skips = 0

    def update(self, *, overflow: bool) -> None:
        """Lower the factor after overflows of a step's gradients, and raise it after a window without any.

        Raises:
            NonFiniteError: they overflow at the smallest factor allowed, or ``MOST_SKIPS`` times at a fixed one.
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
        steps_without = self._step - self._last_overflow - 1
        if steps_without > 0 and steps_without % self._scaling.loss_scale_window == 0:
            if not self._scaling.consecutive_hysteresis:
                self._patience = self._scaling.hysteresis
            self.factor *= 2

    def state(self) -> LossScaleState | None:
        """What a checkpoint keeps; None in a precision that needs no scaling."""
        if not self.enabled:
            return None
        return LossScaleState(
            factor=self.factor, step=self._step, last_overflow=self._last_overflow, patience=self._patience
        )

    def restore(self, state: LossScaleState | None) -> None:
        """Continue from a checkpoint's ``state``; a fixed factor stays the recipe's."""
        if state is None or not self._dynamic:
            return
        self.factor, self._step = state.factor, state.step
        self._last_overflow, self._patience = state.last_overflow, state.patience
