"""Which of PyTorch's own CPU kernels the inference engine may use here. docs/inference.md has the table.

PyTorch's private operators raise where the CPU lacks their instructions, so they are asked about first.
"""

from functools import cache

import torch

_ASKED = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
"""The operator that says whether oneDNN computes in a precision. ``ONEDNN_MAX_CPU_ISA`` makes it answer no, too."""


@cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices in ``dtype`` about as fast as in fp32, or faster.

    If not, PyTorch's product of more than a few rows takes four times as long as in fp32.
    """
    return dtype not in _ASKED or (torch._C._has_mkldnn and getattr(torch.ops.mkldnn, _ASKED[dtype])())


@cache
def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN's products with a GELU or a sum take a weight of ``dtype`` in their own layout.

    On ARM, with the Arm Compute Library, they are not faster; PyTorch's compiler does not use them there either.
    """
    if not torch._C._has_mkldnn or torch.ops.mkldnn._is_mkldnn_acl_supported():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and multiplies(dtype))


def slow_precision(precision: str, *, device: str) -> str:
    """A line for the user if ``precision`` (``bf16``) is slow on ``device`` (``cpu``, ``cuda``); empty if it is not."""
    if device == "cpu" and precision == "bf16" and not multiplies(torch.bfloat16):
        return "bf16 is slow on this CPU, which has no instructions for it (AVX512 or newer): fp32 is faster"
    return ""
