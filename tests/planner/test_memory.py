"""Memory: the parts of model state, the moments of a step, and the committed peaks."""

import contextlib
import itertools
import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_run import REPOSITORY, command_line, write_inputs
from training_runs import resolved

from dsgpt.benchmarks.plan import cells
from dsgpt.benchmarks.plan_rank import TensorMemory
from dsgpt.checkpoints.training_state import write_shards
from dsgpt.machine.device import bring_up
from dsgpt.model import linear_cross_entropy
from dsgpt.model.config import PRESETS, GPT2Config, decays
from dsgpt.model.gpt2 import parameter_shapes
from dsgpt.planner.formulas import (
    CACHED,
    CHUNK,
    MOMENTS,
    PARTS,
    STEP,
    largest_model_state,
    model_state,
    most_sent_bytes,
    peak_memory,
    sent_bytes,
    worst_peak,
)
from dsgpt.planner.setup import _balanced_bounds, model_parameters, stage_parameters, total
from dsgpt.strategies.base import build_strategy
from dsgpt.strategies.deepspeed.state import is_split
from dsgpt.training.run_description import setup_of
from dsgpt.training.trainer import training_batches

# The sizes that plans are made of are the model's, and layers go to stages as DeepSpeed deals them.


ODD = GPT2Config(n_layer=3, n_head=2, n_embd=34, block_size=48, vocab_size=300)
"""Its rows divide no number of ranks evenly."""


@pytest.mark.parametrize("model", [ODD, PRESETS["small"]], ids=["odd", "small"])
def test_parameters_are_the_models(model):
    """The published size counts no padding."""
    parts, shapes = model_parameters(model), parameter_shapes(model)
    assert [(part.name, part.shape) for part in parts] == [(name, tuple(shape)) for name, shape in shapes.items()]
    assert all(part.decays == decays(part.name) and part.splits == is_split(part.name) for part in parts)
    assert total(parts) == model.parameter_count() + (model.padded_vocab_size - model.vocab_size) * model.n_embd


def test_layers_are_dealt_as_deepspeed_deals_them():
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    numbers = random.Random(0)
    for items, parts in itertools.product(range(2, 12), (2, 3, 4)):
        weights = [numbers.randrange(1, 40) for _ in range(items)]
        if items > parts:
            assert _balanced_bounds(weights, parts) == list(map(int, partition_balanced(weights, parts)))
        layers = items + 4  # embedding, positions, the last LayerNorm and the head beside the blocks
        dealt = stage_parameters(replace(ODD, n_layer=items), stages=parts, partition="uniform")
        blocks = [sum(part.name.endswith("ln_1.weight") for part in stage) for stage in dealt]
        bounds = list(map(int, partition_uniform(layers, parts)))
        assert blocks == [len(range(max(first, 2), min(end, items + 2))) for first, end in itertools.pairwise(bounds)]


# The formulas against figures worked out by hand; `benchmarks/test_parity_core.py` holds real trainings.


P = 64 * 8 + 16 * 8 + 2 * (12 * 64 + 13 * 8) + 16
"""Parameters of the tiny model."""
EMBEDDING = 64 * 8
RESIDUAL = 2 * 4 * 8
"""Elements of the residual stream of a micro batch: 2 sequences of 4 tokens, width 8."""


NOTHING_STAYS = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


@pytest.mark.parametrize(
    ("zero", "whole"),
    [
        (NOTHING_STAYS, 0),
        ({}, P),  # all of this model is under the threshold
        ({"stage3_model_persistence_threshold": EMBEDDING + 3}, EMBEDDING),
    ],
)
def test_zero_3_holds_small_parameters_whole(setup, zero, whole):
    assert largest_model_state(setup("zero3", zero=zero)).parameters == 4 * P // 2 + 4 * whole


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_with_offload_a_gpu_holds_small_parameters_whole_until_the_step(setup, ranks, device):
    """On the CPU of a single rank they are the pieces themselves."""
    every, none = setup("zero3_offload", world_size=ranks), setup("zero3_offload", zero=NOTHING_STAYS, world_size=ranks)
    states = [largest_model_state(each) for each in (every, none)]
    assert [state.on_device for state in states] == [4 * P if ranks > 1 else 0, 0]
    assert [state.off_device["parameters"] for state in states] == [4 * P // ranks] * 2
    peak = peak_memory(every, device=device, among={"evaluation"})
    pieces = 4 * P // ranks if device == "cpu" else 0  # in the same memory
    assert peak.parts["weights"] + peak.parts["gathered"] == pieces + (4 * P if (ranks, device) != (1, "cpu") else 0)


WHOLE_BLOCKS = {"dsgpt": {"fsdp": {"reshard_after_forward": False, "reduce_dtype": "low"}}}
NEAR = {"stage3_max_reuse_distance": 400, "stage3_prefetch_bucket_size": 0}
WHOLE_BUCKETS = {"reduce_scatter": False, "reduce_bucket_size": EMBEDDING - 1}
THREE_STAGES = {"top": {"pipeline": {"stages": 3, "partition": "uniform"}}, "world_size": 3}


@pytest.mark.parametrize(
    ("fields", "rank", "sent"),
    [
        ({"run_type": "ddp", "precision": "bf16", "world_size": 4}, 0, 2 * 3 / 4 * 4 * P),
        # reduced to the rank that steps, instead of an all-reduce
        ({"name": "zero2", "zero": {"use_multi_rank_bucket_allreduce": False}}, 0, 3 * 4 * P + 1 / 2 * 4 * P),
        ({"run_type": "fsdp", "precision": "bf16", "top": WHOLE_BLOCKS}, 0, 1 / 2 * (2 * P + 2 * P)),
        # the embedding goes alone, the rest in a bucket
        ({"name": "zero3", "zero": WHOLE_BUCKETS}, 0, 1 / 2 * 4 * P + 3 * 4 * (EMBEDDING / 2 + P - EMBEDDING)),
        # a compiled block is gathered in both passes, the positions as well, and the embedding once
        ({"name": "zero3", "compiled": True, "zero": NOTHING_STAYS | NEAR}, 0, 1 / 2 * 4 * 3 * (3 * P - EMBEDDING)),
        ({"name": "pipeline"} | THREE_STAGES, 1, 2 * 3 * 4 * RESIDUAL),
    ],
)
def test_sent_bytes(setup, fields, rank, sent):
    """Of settings that no training of the parity suite has; it measures the others."""
    assert sent_bytes(setup(**fields), rank=rank) == sent


# Predicted peaks against a measured one, and what is derived from them. `tests/benchmarks/test_plan_suite.py`
# measures more.


MODEL = GPT2Config(n_layer=4, n_head=4, n_embd=64, block_size=64, vocab_size=1000)


@pytest.mark.parametrize(
    ("moment", "changes"),
    [
        ("step", {"micro_batch_size_per_gpu": 4, "precision": "bf16"}),
        ("step", {"num_layers": 2, "vocab_size": 300, "embedding_size": 256}),
        ("step", {"vocab_size": 300, "embedding_size": 32, "activation_checkpointing": True}),
        ("evaluation", {"precision": "bf16"}),
        ("save", {}),
    ],
)
def test_a_measured_peak_is_predicted(tmp_path, moment, changes):
    """Of the third step of a baseline in this process, or of another moment of its training.

    Never under, and at most 6% over. Without a LayerNorm's output in every block it would be under.
    """
    shape = {"num_layers": 3, "num_heads": 4, "embedding_size": 64, "vocab_size": 4000, "max_train_steps": 5}
    config = resolved(command_line(write_inputs(tmp_path), **shape | changes))
    with contextlib.ExitStack() as stack:

        def measured(name: str) -> contextlib.AbstractContextManager[None]:
            return memory.step() if name == moment else contextlib.nullcontext()

        device = bring_up(config.device, local_rank=0, threads=1)
        memory = stack.enter_context(TensorMemory())
        strategy = stack.enter_context(contextlib.closing(build_strategy(config, device)))
        batches = stack.enter_context(contextlib.closing(training_batches(config, first_step=0)))
        for step in (1, 2):
            strategy.train_step(batches, step)
        with measured("step"):
            strategy.train_step(batches, 3)
        with measured("evaluation"):
            strategy.eval_step(batches)
        with measured("save"):
            write_shards(tmp_path, strategy.shards(), rank=0, ranks=1)
    predicted = peak_memory(setup_of(config), among=STEP if moment == "step" else {moment}).total
    assert (0.999 if moment == "step" else 0.99) <= predicted / memory.peak() <= 1.06


def test_the_loss_has_the_chunks_that_are_predicted():
    assert (CHUNK, CACHED) == (linear_cross_entropy.CHUNKS, linear_cross_entropy.CACHED)


RECIPES = ["zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "tensor", "sequence", "pipeline", "3d"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_strategy_has_a_peak_that_holds_its_state(setup, recipe, precision):
    training = setup(recipe, model=MODEL, world_size=8, precision=precision, seq_length=64)
    for device in ("cpu", "cuda"):
        rank, peak = worst_peak(training, device=device)
        assert tuple(peak.parts) == PARTS
        assert min(peak.parts.values()) >= 0
        assert peak.total == sum(peak.parts.values()) == peak_memory(training, rank=rank, device=device).total
        assert peak.total > peak.parts["weights"] > 0 or recipe == "zero3_offload"
        assert all(peak_memory(training, rank=other, device=device).total <= peak.total for other in range(8))
    assert largest_model_state(training).total == max(model_state(training, rank=rank).total for rank in range(8))
    assert most_sent_bytes(training) == max(sent_bytes(training, rank=rank) for rank in range(8))


def test_offload_starts_with_one_copy_of_its_part_and_saves_with_a_buffer(setup):
    """3.9e9 parameters on 8 GPUs: fp32 weights at the start would take 15.6 GB."""
    large = GPT2Config(n_layer=48, n_head=32, n_embd=2560, block_size=1024, vocab_size=50257)
    fields = {"model": large, "world_size": 8, "precision": "fp16", "seq_length": 1024, "micro_batch_size": 1}
    training = setup("zero2_offload", activation_checkpointing=True, **fields)
    elements, embedding = total(model_parameters(large)), 50304 * 2560
    peaks = {name: peak_memory(training, device="cuda", among={name}).total for name in MOMENTS if name != "forward"}
    assert peaks["start"] == pytest.approx((2 + 2 / 8) * elements, rel=1e-3)
    assert peaks["save"] == pytest.approx(2 * (elements + embedding), rel=1e-3)
    assert peak_memory(training, device="cuda").total == max(peaks.values()) < 14.4e9


ZERO = ["zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"]
LARGER = {"seq_length": 64, "micro_batch_size": 3, "gradient_accumulation_steps": 2}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.data())
def test_more_work_needs_no_less_memory_and_more_ranks_no_more(setup, data):
    """Of ZeRO, for the worst rank: longer sequences, larger or more micro batches, a wider or deeper model, more words.

    ZeRO pads every parameter, or all together, to a multiple of the ranks. Of more ranks, only that may need more.
    """
    recipe, precision, device = (
        data.draw(st.sampled_from(some)) for some in (ZERO, ("fp32", "bf16", "fp16"), ("cpu", "cuda"))
    )
    heads, ranks = data.draw(st.integers(1, 8)), data.draw(st.integers(2, 64))
    model = GPT2Config(
        n_layer=data.draw(st.integers(1, 6)),
        n_head=heads,
        n_embd=heads * data.draw(st.integers(2, 40)),
        block_size=256,
        vocab_size=data.draw(st.integers(10, 9000)),
    )
    fields = {"model": model, "world_size": ranks, "precision": precision}
    fields |= {"activation_checkpointing": data.draw(st.booleans())}
    fields |= {name: data.draw(st.integers(1, most)) for name, most in LARGER.items()}

    def need(**changes: Any) -> int:
        return worst_peak(setup(recipe, **fields | changes), device=device)[1].total

    now = need()
    for name in LARGER:
        assert need(**{name: fields[name] * 2}) >= now, name
    for changes in ({"n_layer": model.n_layer + 1}, {"n_embd": 2 * model.n_embd}, {"vocab_size": 2 * model.vocab_size}):
        assert need(model=replace(model, **changes)) >= now, changes
    more = ranks * data.draw(st.integers(2, 8))
    assert need(world_size=more) <= now + 4 * more * len(model_parameters(model))


STAY = {"zero0": 0, "zero1": 4, "zero2": 0, "zero2_offload": 4 / 8, "zero3": 4 / 8, "zero3_offload": 8 / 8}
"""Bytes a parameter of gradients between steps, in bf16 on 8 ranks of a CPU, where the host's copies count too."""


@pytest.mark.parametrize("recipe", STAY)
def test_an_evaluation_needs_the_gradients_that_stay(setup, recipe):
    training = setup(recipe, model=MODEL, world_size=8, precision="bf16", seq_length=64)
    evaluation, step = (peak_memory(training, among=among) for among in ({"evaluation"}, STEP))
    assert evaluation.parts["gradients"] == pytest.approx(STAY[recipe] * total(model_parameters(MODEL)), rel=0.01)
    assert peak_memory(training).total >= max(evaluation.total, step.total)


# Predicted peaks of memory against those of the committed record, without a run: every strategy has a cell there.


def test_predicted_peaks_are_those_that_were_measured(tmp_path):
    """Within 1% on every rank. FSDP or ZeRO-3 without the copies of what they gather would be under."""
    record = REPOSITORY / "checkpoint" / "reference" / "cpu-2-cores" / "plan.json"
    measured = {
        cell["key"]: [rank["measured"] for rank in cell["peak_memory"]]
        for cell in json.loads(record.read_text(encoding="utf-8"))["cells"]
    }
    predicted = {}
    for cell in cells():
        planned = cell.setup(cell.write_recipe(tmp_path / "recipe.json", recipes=REPOSITORY / "ds_configs"))
        peaks = [peak_memory(planned, rank=rank, device="cpu", among=STEP).total for rank in range(cell.ranks)]
        predicted[cell.key] = pytest.approx(peaks, rel=0.01)
    assert len(measured) == 34
    assert measured == predicted
