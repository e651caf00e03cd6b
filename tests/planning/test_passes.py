"""Bytes of a step's passes over gradients and weights, for each element, worked out by hand."""

import pytest
from round_machine import machine

from dsgpt.planner.setup import total
from dsgpt.planner.step_time import predict_step
from dsgpt.planner.traffic import step_traffic
from dsgpt.planner.work import gradient_bytes, low_arithmetic_bytes, optimizer_bytes

ALONE = {"run_type": "baseline", "world_size": 1}


@pytest.mark.parametrize(
    ("fields", "micro_batches", "on_cpu", "on_gpu"),
    [
        (ALONE, 3, 2 * 12, 2 * 12),
        (ALONE | {"precision": "bf16"}, 3, 3 * 10, 3 * 10),
        ({"run_type": "ddp"}, 1, 8 + 8, 0),
        ({"run_type": "ddp", "precision": "bf16"}, 1, 10 + 4 + 8, 10),
        ({"name": "zero0"}, 1, 3 * 8, 0),
        ({"name": "zero0", "precision": "bf16"}, 2, 2 * 10 + 2 * 4 + 6 + 6, 2 * 10),
        ({"name": "zero1"}, 1, 3 * 8 + 4, 8),
        ({"name": "zero1", "world_size": 1}, 1, 8, 8),
        ({"name": "zero1", "precision": "bf16"}, 1, 10 + 2 * 8 + 2 * 6, 10 + 4),
        ({"name": "zero1", "precision": "bf16"}, 2, 2 * 10 + 2 * 8 + 2 * 6 + 2 * 2 + 6, 2 * 10 + 4),
        ({"name": "sequence", "precision": "bf16"}, 1, 10 + 2 * 8 + 8, 10 + 4),
        ({"name": "zero2", "precision": "bf16"}, 2, 2 * 10 + 2 * (2 * 4 + 10 / 2), 2 * 10 + 2 * 4),
    ],
)
def test_passes_over_gradients(setup, fields, micro_batches, on_cpu, on_gpu):
    """Two ranks. A GPU keeps what was held against published figures."""
    found = setup(gradient_accumulation_steps=micro_batches, **fields)
    p = total(found.held(0))
    assert gradient_bytes(found, 0, kind="cpu") == pytest.approx(on_cpu * p)
    assert gradient_bytes(found, 0, kind="cuda") == pytest.approx(on_gpu * p)


@pytest.mark.parametrize(
    ("fields", "micro_batches", "each"),
    [
        ({"run_type": "ddp", "precision": "bf16"}, 1, 0),
        ({"name": "zero0"}, 1, 0),
        ({"name": "zero0", "precision": "bf16"}, 2, 4 + 4),
        ({"name": "zero1", "precision": "bf16"}, 2, 4),
        ({"name": "zero1", "precision": "bf16", "world_size": 1}, 1, 0),
        ({"name": "sequence", "precision": "bf16"}, 1, 0),
        ({"name": "zero2", "precision": "bf16"}, 2, 2 * 4),
        ({"name": "zero3", "precision": "bf16"}, 2, 2 * 4),
    ],
)
def test_deepspeed_divides_and_searches_gradients_in_their_precision(setup, fields, micro_batches, each):
    """On a CPU at the rate of elementwise operations. Sequence ranks divide in fp32, DDP does in every precision."""
    found = setup(gradient_accumulation_steps=micro_batches, **fields)
    p = total(found.held(0))
    assert low_arithmetic_bytes(found, 0, kind="cpu") == each * p
    assert low_arithmetic_bytes(found, 0, kind="cuda") == 0
    slow, fast = (machine(elementwise={"bf16": rate, "fp32": rate}, memory=1e30) for rate in (1e3, 1e30))
    seconds = [predict_step(found, other).parts.get("gradients", 0) for other in (slow, fast)]
    assert seconds == pytest.approx([each * p / 1e3, 0])


@pytest.mark.parametrize(
    ("fields", "each"), [({"run_type": "fsdp"}, 4 + 4 + 8 / 2), ({"name": "zero3"}, 4 * 4 + 12 / 2)]
)
def test_gathered_weights_are_copied(setup, fields, each):
    """In fp32 and one micro batch: the own half before a gather, and both halves after it."""
    found = setup(gradient_accumulation_steps=1, **fields)
    gathered = next(t.payload_bytes for t in step_traffic(found) if t.operation == "all_gather")
    expected = each * total(found.held(0)) + 2 * (gathered / 2 + gathered)
    assert gradient_bytes(found, 0, kind="cpu") == pytest.approx(expected)


def test_pipelines_step_in_several_operations(setup):
    """PyTorch's AdamW reads and writes 20 numbers a weight then, instead of 7; bf16 weights are written too."""
    fused, several = setup(precision="bf16", **ALONE), setup("pipeline", precision="bf16")
    assert optimizer_bytes(fused, 0) == (28 + 6) * total(fused.held(0))
    assert optimizer_bytes(several, 0) == pytest.approx((80 + 6) * total(several.held(0)))
