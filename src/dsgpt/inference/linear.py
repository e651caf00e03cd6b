"""Linear layers for decoding, and weights in 8 bits.

Linear layers for decoding, which reads every weight for every token: the time of a token is that of the memory.
Decoding multiplies a few rows by each weight. PyTorch's general product arranges the weight anew in every call when
there is more than one row, or when it is in bf16, and that costs more than the product. ``Packed`` arranges it once.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsgpt.machine.device import HugePages, multiplies, packs
from dsgpt.model.gpt2 import GPT2

# Weights in 8 bits. Each output has its own scale, and zero stays zero; activations are not quantized.

LARGEST = 127


def to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values in int8, (out, in), and scales in fp32, (out,), whose product is close to ``weight``, (out, in)."""
    wide = weight.float()
    scales = (wide.abs().amax(dim=1) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scales[:, None]).round().to(torch.int8), scales


@torch.no_grad()
def round_to_int8(model: GPT2) -> None:
    """Replace the weights that ``Decoder(model, quantize="int8")`` quantizes by what they become.

    The embedding of ids keeps its weights: the head, which shares them, gets its own.
    """
    model.lm_head.weight = nn.Parameter(_rounded(model.lm_head.weight))
    for module in model.blocks.modules():
        if isinstance(module, nn.Linear):
            module.weight.copy_(_rounded(module.weight))


def _rounded(weight: Tensor) -> Tensor:
    values, scales = to_int8(weight)
    return (values * scales.to(weight.dtype).float()[:, None]).to(weight.dtype)


_NO_SCALARS: list[float] = []
_FEW_ROWS = 16
"""The most rows for which PyTorch's product with weights in 8 or 16 bits is faster than converting them first."""


class Linear(Protocol):
    """A weight (out, in) and a bias (out,), applied to rows x, (N, in)."""

    def product(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``, (N, out)."""
        ...

    def gelu(self, x: Tensor) -> Tensor:
        """The tanh GELU of the product, (N, out)."""
        ...

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """The product plus ``residual``, (N, out)."""
        ...


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``; many rows in a precision that this CPU cannot multiply in, in fp32, rounded once."""
    if x.device.type != "cpu" or len(x) <= _FEW_ROWS or multiplies(x.dtype):
        return F.linear(x, weight, bias)
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


class Plain:
    """A linear layer on the weight as it is: shares the model's memory."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def product(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return _product(x, self._weight, self._bias)

    def gelu(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return F.gelu(_product(x, self._weight, self._bias), approximate="tanh")

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return residual + _product(x, self._weight, self._bias)


class Transposed:
    """A linear layer on a copy of the weight as (in, out), which MKL's product of one row reads faster."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, memory: HugePages) -> None:
        self._weight, self._bias = memory.copy(weight.t()), bias

    def product(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return torch.mm(x, self._weight) if self._bias is None else torch.addmm(self._bias, x, self._weight)

    def gelu(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return F.gelu(self.product(x), approximate="tanh")

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See ``Linear``."""
        out = torch.addmm(residual, x, self._weight)
        return out if self._bias is None else out.add_(self._bias)


class Packed:
    """A linear layer on a copy of the weight in the layout of oneDNN's kernels, which also add and apply the GELU.

    These are the operators that ``torch.compile`` replaces linear layers by; they work without a compiler, too.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, rows: int) -> None:
        """Copy ``weight`` into the layout for ``rows`` rows; other numbers of rows are computed, too."""
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        self._bias = bias

    def product(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return self._apply(x, "none", "")

    def gelu(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return self._apply(x, "gelu", "tanh")

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See ``Linear``."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")
        return out

    def _apply(self, x: Tensor, activation: str, algorithm: str) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, activation, _NO_SCALARS, algorithm
        )
        return out


class Int8:
    """A linear layer on a copy of the weight in 8 bits, for bf16 or fp16: less memory, and less time for one row."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, memory: HugePages) -> None:
        rounded, scales = to_int8(weight)
        self._weight = memory.copy(rounded)
        self._scales, self._bias = scales.to(weight.dtype), bias

    def product(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        out: Tensor
        if x.device.type == "cpu" and len(x) <= _FEW_ROWS:
            out = torch.ops.aten._weight_int8pack_mm(x, self._weight, self._scales)
        else:
            out = _product(x, self._weight.to(x.dtype)) * self._scales
        return out if self._bias is None else out.add_(self._bias)

    def gelu(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return F.gelu(self.product(x), approximate="tanh")

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return residual + self.product(x)


def fast_linear(weight: Tensor, bias: Tensor | None, *, rows: int, memory: HugePages, quantize: str = "none") -> Linear:
    """The fastest for products of ``rows`` rows with ``weight``, or with its 8 bits, of those that work here.

    GPUs need no other layouts; what a CPU cannot do is left to ``Plain``.

    Args:
        weight: (out, in).
        bias: (out,).
        rows: usual rows of a product.
        memory: of the copies whose layout is PyTorch's.
        quantize: ``int8`` or ``none``.
    """
    if quantize == "int8":
        return Int8(weight, bias, memory=memory)
    on_cpu = weight.device.type == "cpu"
    if on_cpu and weight.dtype == torch.float32 and rows == 1 and torch._C.has_mkl:
        return Transposed(weight, bias, memory=memory)
    if on_cpu and packs(weight.dtype):
        return Packed(weight, bias, rows=rows)
    return Plain(weight, bias)
