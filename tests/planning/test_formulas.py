"""The formulas against figures worked out by hand; ``benchmarks/parity/test_traffic.py`` holds real trainings."""

import pytest

from dsgpt.model.config import PRESETS, GPT2Config
from dsgpt.planner.memory import peak_memory
from dsgpt.planner.model_state import largest_model_state, model_state
from dsgpt.planner.setup import Setup, model_parameters, total
from dsgpt.planner.traffic import gathered, most_sent_bytes, sent_bytes, step_traffic

TINY = GPT2Config(n_layer=2, n_head=2, n_embd=8, block_size=16, vocab_size=64)
P = 64 * 8 + 16 * 8 + 2 * (12 * 64 + 13 * 8) + 16
EMBEDDING, DECAYED = 64 * 8, 64 * 8 + 16 * 8 + 2 * 12 * 64
RESIDUAL = 2 * 4 * 8
"""Elements of the residual stream of a micro batch: 2 sequences of 4 tokens, width 8."""


def state(setup: Setup) -> tuple[int, int, int, int]:
    found = largest_model_state(setup)
    return found.parameters, found.gradients, found.optimizer, found.master


def test_whole_copies(setup):
    counters = 4 * len(model_parameters(TINY))
    assert state(setup(run_type="ddp")) == (4 * P, 4 * P, 8 * P + counters, 0)
    assert state(setup(run_type="ddp", precision="bf16")) == (2 * P, 4 * P, 8 * P + counters, 4 * P)
    assert state(setup("zero0", precision="bf16")) == (2 * P, 6 * P, 8 * P + counters, 4 * P)
    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    assert state(setup(run_type="baseline", world_size=1, top={"optimizer": sgd})) == (4 * P, 4 * P, 0, 0)
    assert sent_bytes(setup(run_type="baseline", world_size=1)) == 0
    assert sent_bytes(setup(run_type="ddp", precision="bf16", world_size=4)) == 2 * 3 / 4 * 4 * P


def test_zero_1_and_2(setup):
    parameters, gradients, optimizer, master = state(setup("zero2", precision="bf16"))
    assert (parameters, gradients, optimizer, master) == (2 * P, 2 * P, 4 * P + 8, 2 * P)
    assert state(setup("zero1", precision="bf16"))[1] == 6 * P
    # In fp32 a rank keeps whole parameters, of which one may reach into the other's part, and a flat copy of a group.
    assert DECAYED // 2 + P // 2 <= state(setup("zero2"))[1] / 4 <= DECAYED // 2 + P // 2 + 4 * 8 * 8
    assert sent_bytes(setup("zero1")) == 3 / 2 * 4 * P
    assert sent_bytes(setup("zero2", precision="bf16")) == (2 * 3 + 1) / 2 * 2 * P


def test_offload_keeps_parameters_and_sums_of_low_precision_on_the_device(setup):
    """DeepSpeed adds up bf16 and fp16 gradients in an fp32 buffer of the rank's part, on the GPU."""
    found = model_state(setup("zero2_offload", precision="bf16"))
    assert (found.on_device, found.parameters) == (2 * P + 4 * P // 2, 2 * P)
    peaks = {kind: peak_memory(setup("zero2_offload", precision=kind), device="cuda") for kind in ("fp16", "fp32")}
    assert [peak.parts["gradients"] for peak in peaks.values()] == [4 * P // 2, 0]
    assert (found.gradients, found.optimizer, found.master) == (4 * P, 4 * P, 2 * P)
    assert model_state(setup("zero2_offload", precision="bf16", gradient_accumulation_steps=1)).gradients == 4 * P
    assert model_state(setup("zero2_offload", gradient_accumulation_steps=1)).gradients == 2 * P
    assert model_state(setup("zero3_offload")).on_device == 0


def test_zero_3(setup):
    everything_splits = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    assert state(setup("zero3", zero=everything_splits))[0] == 4 * P // 2
    everything_stays = setup("zero3")  # all of this model is under the threshold
    assert state(everything_stays)[0] == 4 * P // 2 + 4 * P
    assert sent_bytes(everything_stays) == 1 / 2 * 4 * (P + 3 * P)


def test_zero_3_frees_between_forward_and_backward_pass(setup):
    model = PRESETS["small"]
    at_once = total(gathered(setup("zero3", model=model)))
    whole = total(model_parameters(model))
    kept = {"stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9}
    assert 2.2 * whole < at_once < 2.4 * whole  # twice, and the tied embedding a third time, of 0.31 of the model
    assert total(gathered(setup("zero3", model=model, zero=kept))) < whole  # DeepSpeed's defaults: all of it stays


def test_options_that_move_gradients_otherwise(setup):
    to_the_owner = setup("zero2", zero={"use_multi_rank_bucket_allreduce": False})
    assert sent_bytes(to_the_owner) == 3 * 4 * P + 1 / 2 * 4 * P
    whole_buckets = {"reduce_scatter": False, "reduce_bucket_size": EMBEDDING - 1}  # the embedding goes alone
    gathered_and_reduced = {t.operation: t.payload_bytes for t in step_traffic(setup("zero3", zero=whole_buckets))}
    assert gathered_and_reduced["reduce_scatter"] == 3 * 4 * EMBEDDING
    assert gathered_and_reduced["all_reduce"] == 3 * 4 * (P - EMBEDDING)
    few_stay = {"stage3_model_persistence_threshold": EMBEDDING + 3}
    assert state(setup("zero3", zero=few_stay))[0] == 4 * P // 2 + 4 * EMBEDDING


def test_zero_plus_plus_has_no_formula(setup):
    with pytest.raises(ValueError, match="no formula predicts Zero"):
        setup("zeropp")


def test_fsdp(setup):
    blocks = 2 * (12 * 64 + 13 * 8)
    counters = 4 * len(model_parameters(TINY))
    assert state(setup(run_type="fsdp", precision="bf16")) == (2 * P, 2 * P, 4 * P + counters, 0)
    gathers = 2 * (6 * blocks + P - blocks)
    assert sent_bytes(setup(run_type="fsdp", precision="bf16")) == 1 / 2 * (gathers + 4 * P)
    kept = {"dsgpt": {"fsdp": {"reshard_after_forward": False, "reduce_dtype": "low"}}}
    assert sent_bytes(setup(run_type="fsdp", precision="bf16", top=kept)) == 1 / 2 * (2 * P + 2 * P)


def test_activations_of_tensor_and_sequence_ranks(setup):
    (tensor,) = step_traffic(setup("tensor"))  # one data rank: no gradients travel
    assert (tensor.operation, tensor.payload_bytes) == ("all_reduce", 4 * 3 * 2 * 4 * RESIDUAL)
    recomputed = setup("tensor", activation_checkpointing=True)
    assert step_traffic(recomputed)[0].payload_bytes == 5 * 3 * 2 * 4 * RESIDUAL
    activations, gradients, weights = step_traffic(setup("sequence", precision="bf16"))
    assert activations.payload_bytes == 8 * 3 * 2 * 2 * RESIDUAL // 2
    assert (gradients.payload_bytes, weights.payload_bytes) == (4 * P, 2 * P)


def test_a_pipeline_sends_to_the_neighbours_and_adds_up_the_embedding(setup):
    ends = setup("pipeline")
    assert sent_bytes(ends, rank=0) == 3 * 4 * RESIDUAL + 4 * EMBEDDING
    three = setup("pipeline", top={"pipeline": {"stages": 3, "partition": "uniform"}}, world_size=3)
    assert sent_bytes(three, rank=1) == 2 * 3 * 4 * RESIDUAL
    assert most_sent_bytes(three) == max(sent_bytes(three, rank=rank) for rank in range(3))


def test_the_rank_with_most_and_the_one_that_sends_most(setup):
    for name, ranks in (("zero1", 4), ("zero3", 4), ("tensor", 8), ("3d", 8)):
        planned = setup(name, world_size=ranks)
        states = [model_state(planned, rank=rank) for rank in range(ranks)]
        assert largest_model_state(planned).total == max(found.total for found in states)
        assert most_sent_bytes(planned) == max(sent_bytes(planned, rank=rank) for rank in range(ranks))


def test_3d_data_ranks_divide_a_stages_part(setup):
    found = model_state(setup("3d", precision="bf16", world_size=8), rank=7)
    held = total(setup("3d", world_size=8).held(7))
    assert found.parameters == pytest.approx(2 * held, abs=32)
    assert found.master == pytest.approx(4 * held / 2, abs=32)
