"""fp32 sums of low-precision gradients, for an engine that would add up micro batches in the low precision."""

from collections.abc import Iterable

from torch import Tensor, nn


class GradientSum:
    """Takes the gradient of each micro batch away from ``parameters`` and gives the sum back, rounded once."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._sums: list[Tensor | None] = [None] * len(self._parameters)

    def add(self) -> None:
        """Add the gradients that a backward pass left, and clear them."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                so_far = self._sums[index]
                self._sums[index] = parameter.grad.float() if so_far is None else so_far.add_(parameter.grad)
                parameter.grad = None

    def hand_over(self) -> None:
        """Set each gradient to its sum, in the parameter's precision, and start anew."""
        for index, parameter in enumerate(self._parameters):
            so_far = self._sums[index]
            parameter.grad = None if so_far is None else so_far.to(parameter.dtype)
            self._sums[index] = None
