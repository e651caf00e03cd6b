"""What PyTorch's private operators say that this CPU can do is what they do."""

import pytest
import torch

from dsgpt.machine.device import multiplies, packs, slow_precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_arranged_where_the_answer_is_yes(dtype):
    """Under ``ONEDNN_MAX_CPU_ISA=AVX2``, or on a CPU without AVX512, the second answer is no."""
    weight, x = torch.randn(8, 4).to(dtype), torch.randn(3, 4).to(dtype)
    if packs(dtype):
        arranged = torch.ops.mkldnn._reorder_linear_weight(weight, 3)
        found = torch.ops.mkldnn._linear_pointwise(x, arranged, None, "none", [], "")
        torch.testing.assert_close(found, x @ weight.T)
    elif not multiplies(dtype):
        with pytest.raises(RuntimeError, match="needs the cpu support"):
            torch.ops.mkldnn._reorder_linear_weight(weight, 3)


def test_only_bf16_on_a_cpu_without_its_instructions_is_called_slow():
    asked = {(precision, device): slow_precision(precision, device=device) for precision in ("fp32", "bf16")
             for device in ("cpu", "cuda")}  # fmt: skip
    slow = [] if multiplies(torch.bfloat16) else [("bf16", "cpu")]
    assert [key for key, line in asked.items() if line] == slow
