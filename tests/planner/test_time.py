"""Time: the order of a step, its passes over memory, and how long they take."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from planner_records import RATES, machine

from dsgpt.model.config import PRESETS
from dsgpt.planner.formulas import copied, passes, placed_traffic, step_traffic, strategy_of
from dsgpt.planner.hardware import find_gpu
from dsgpt.planner.pytorch_formulas import AFTER_STEP, BACKWARD, BEFORE_STEP, FORWARD
from dsgpt.planner.rates import Rates, at_ranks, datasheet_machine, on_grid
from dsgpt.planner.setup import Setup, model_parameters, total
from dsgpt.planner.step_time import (
    block_backward,
    block_forward,
    bubble_fraction,
    head_and_loss,
    predict_step,
    sending_sec,
)

# The order of a step: every byte of the planned traffic has its place, and pipelines run as DeepSpeed's do.


SMALL = {"model": PRESETS["small"], "world_size": 8, "precision": "bf16", "seq_length": 1024}
RECIPES = ("zero0", "zero1", "zero2", "zero3", "zero3_offload", "tensor", "sequence", "pipeline", "3d")
FSDP, DDP = {"run_type": "fsdp"}, {"run_type": "ddp"}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("fields", [*({"name": name} for name in RECIPES), DDP, FSDP], ids=str)
def test_places_share_out_the_traffic_of_the_step(setup, fields, again):
    training = setup(activation_checkpointing=again, **SMALL | fields)
    for rank in training.first_ranks:
        placed, sent = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
        for each in placed_traffic(training, rank=rank):
            placed[each.traffic.what, each.traffic.operation, each.traffic.axis] += each.traffic.payload_bytes
        for traffic in step_traffic(training, rank=rank):
            sent[traffic.what, traffic.operation, traffic.axis] += traffic.payload_bytes
        assert placed == sent


EACH_PASS = [(kind, number) for number in range(3) for kind in (FORWARD, BACKWARD)]


@pytest.mark.parametrize(
    ("fields", "what", "rank", "places"),
    [
        (DDP, "gradients", 0, [(BACKWARD, 2)]),
        ({"name": "zero1"}, "gradients", 0, [(BEFORE_STEP, None)]),
        ({"name": "zero2"}, "gradients", 0, [(BACKWARD, 0), (BACKWARD, 1), (BACKWARD, 2)]),
        (FSDP, "weights", 0, EACH_PASS),
        ({"name": "zero2"}, "weights", 0, [(AFTER_STEP, None)]),
        ({"name": "zero3"}, "weights", 0, [*EACH_PASS, (AFTER_STEP, None)]),
        # a stage sends to its neighbours alone
        ({"name": "pipeline", "world_size": 4}, "activations", 0, [(FORWARD, number) for number in range(3)]),
        ({"name": "pipeline", "world_size": 4}, "activations", 2, [(BACKWARD, number) for number in range(3)]),
    ],
)
def test_each_strategy_sends_at_its_places(setup, fields, what, rank, places):
    placed = placed_traffic(setup(**SMALL | fields), rank=rank)
    assert [(each.moment, each.micro_batch) for each in placed if each.traffic.what == what] == places


def megabytes(setup: Setup, what: str) -> tuple[int, int]:
    """What a rank copies to its host in a step, and back."""
    copies = [each for each in copied(setup) if each.what == what]
    out, back = (sum(each.size for each in copies if each.to_device == to) for to in (False, True))
    return round(out / 1e6), round(back / 1e6)


@pytest.mark.parametrize(
    ("recipe", "precision", "batches", "gradients"),
    [
        # A rank's part has 15.6 million elements, 62 MB in fp32. ZeRO-3 copies it to the host and back each time.
        ("zero3_offload", "bf16", 1, (62 + 62, 62)),
        ("zero3_offload", "bf16", 8, (9 * 62.24, 8 * 62.24)),
        ("zero2_offload", "bf16", 1, (62, 0)),
        # The part lies in the embedding, of 50,304 x 768 elements: 155 MB, which go out each time and come back from
        # the second time on.
        ("zero2_offload", "fp32", 8, (8 * 154.53 + 62.24, 7 * 154.53)),
    ],
)
def test_offload_copies_gradients_as_deepspeed_does(setup, recipe, precision, batches, gradients):
    training = setup(recipe, **SMALL | {"precision": precision, "gradient_accumulation_steps": batches})
    assert megabytes(training, "gradients") == pytest.approx(gradients, abs=1)
    own = 62 if precision == "fp32" else 31
    if recipe == "zero2_offload":
        assert megabytes(training, "weights") == (0, own)
    else:  # the weights stay in the host, and reach the device in the passes alone
        assert {each.moment for each in copied(training) if each.what == "weights"} == {FORWARD, BACKWARD}


def test_fsdp_copies_what_stays_gathered_once(setup):
    """Blocks have 85.1 million elements, embeddings and last LayerNorm 39.4 million, of which a rank has an eighth."""
    training = setup(top={"dsgpt": {"fsdp": {"cpu_offload": True}}}, gradient_accumulation_steps=8, **SMALL | FSDP)
    assert megabytes(training, "weights") == (0, round((16 * 85.05 + 39.42) * 4 / 8))
    assert megabytes(training, "gradients") == (62, 0)


@pytest.mark.parametrize(("stages", "batches"), [(2, 1), (4, 2), (4, 9)])
def test_a_pipeline_runs_in_the_order_of_deepspeed(setup, stages, batches):
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

    top = {"pipeline": {"stages": stages}}
    training = setup("pipeline", top=top, **SMALL | {"world_size": stages, "gradient_accumulation_steps": batches})
    for stage in range(stages):
        done, kinds = [], {ForwardPass: FORWARD, BackwardPass: BACKWARD}
        for commands in TrainSchedule(micro_batches=batches, stages=stages, stage_id=stage):
            done += [kinds[type(each)] for each in commands if type(each) in kinds]
        assert [each.kind for each in passes(training, rank=stage)] == done
        for kind in (FORWARD, BACKWARD):
            own = [each.micro_batch for each in passes(training, rank=stage) if each.kind == kind]
            assert own == list(range(batches))


# Bytes of a step's passes over gradients and weights, for each element, worked out by hand.


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
    p = total(found.parameters(0))
    assert strategy_of(found).gradient_bytes(0, kind="cpu") == pytest.approx(on_cpu * p)
    assert strategy_of(found).gradient_bytes(0, kind="cuda") == pytest.approx(on_gpu * p)


# The time of a step against figures worked out by hand.


C, LAYERS, VOCABULARY, TOKENS, LENGTH = 8, 2, 64, 8, 4
"""Of the tiny model, and of its micro batch of 2 sequences of 4 tokens."""
STREAM = 4 * TOKENS * C


def test_flops_of_a_micro_batch(setup):
    """Matrices as the PaLM paper counts them, 6 for each weight that multiplies; attention only below the diagonal."""
    tiny = setup(run_type="baseline", world_size=1)
    forward, backward, head = block_forward(tiny), block_backward(tiny), head_and_loss(tiny, kind="cpu")
    assert (forward.matrix_flops, backward.matrix_flops) == (24 * TOKENS * C * C, 48 * TOKENS * C * C)
    assert (forward.attention_flops, backward.attention_flops) == (2 * TOKENS * LENGTH * C, 5 * TOKENS * LENGTH * C)
    assert head.matrix_flops == 6 * TOKENS * VOCABULARY * C
    assert (forward.elementwise_bytes, backward.elementwise_bytes) == (20 * STREAM, 43 * STREAM)
    whole = LAYERS * (forward.matrix_flops + backward.matrix_flops) + head.matrix_flops
    vectors = LAYERS * 13 * C + 2 * C  # biases and LayerNorms, which PaLM's count includes
    attention = 12 * LAYERS * C * LENGTH
    assert whole == TOKENS * (tiny.model.flops_per_token(LENGTH) - 6 * vectors - attention)


def test_flops_are_split_among_tensor_and_sequence_ranks(setup):
    whole = block_forward(setup(run_type="baseline", world_size=1))
    by_matrix = block_forward(setup("tensor"))
    by_position = block_forward(setup("sequence"))
    assert by_matrix.matrix_flops == by_position.matrix_flops == whole.matrix_flops / 2
    assert by_matrix.attention_flops == by_position.attention_flops == whole.attention_flops / 2
    biases = 4 + 14 / 2  # added after the products of tensor ranks
    assert by_matrix.elementwise_bytes == (10 + 10 / 2 + biases) * STREAM
    assert block_backward(setup("tensor")).elementwise_bytes == (18 + 25 / 2) * STREAM
    arranged = 4 * 4  # around all-to-alls of half the tokens
    assert by_position.elementwise_bytes == (20 + arranged) * STREAM / 2
    assert block_backward(setup("sequence")).elementwise_bytes == (43 + arranged) * STREAM / 2


def test_parts_of_a_step_take_their_flops_and_bytes_at_the_machines_rates(setup):
    step = predict_step(setup(run_type="baseline", world_size=1), machine())
    micro = 24 * TOKENS * C * C / 1e9 + 2 * TOKENS * LENGTH * C / 1e8 + 20 * STREAM / 1e7
    assert step.parts["forward"] == pytest.approx(3 * (LAYERS * micro + 16 / 2 * STREAM / 1e7))
    head = 6 * TOKENS * VOCABULARY * C / 1e9 + TOKENS * VOCABULARY / 1e6 + 4 * 4 * VOCABULARY * C / 1e7
    assert step.parts["head and loss"] == pytest.approx(3 * head)
    p = total(model_parameters(setup().model))
    assert step.parts["optimizer"] == pytest.approx(28 * p / 1e12)
    assert step.parts["norm and clipping"] == pytest.approx(12 * p / 1e12)
    assert step.parts["gradients"] == pytest.approx(2 * 12 * p / 1e12)
    assert "communication" not in step.parts
    assert step.least < step.seconds < step.most
    assert step.most == pytest.approx(2 * step.seconds)


def test_activation_checkpointing_runs_every_block_forward_again(setup):
    plain = predict_step(setup(run_type="ddp"), machine())
    again = predict_step(setup(run_type="ddp", activation_checkpointing=True), machine())
    lookups = 3 * 16 / 2 * STREAM / 1e7
    assert again.parts["recomputation"] == pytest.approx(plain.parts["forward"] - lookups)
    assert again.seconds == pytest.approx(plain.seconds + again.parts["recomputation"])


def test_the_hooks_of_zero3_take_time_for_each_parameter_and_pass_on_a_cpu(setup):
    micro_batches, parameters = 3, 12 * LAYERS + 4
    hooks = predict_step(setup("zero3"), machine(kernel_sec=1e-3)).parts["hooks"]
    assert hooks == pytest.approx(micro_batches * 2 * parameters * 100 * 1e-3)
    again = predict_step(setup("zero3", activation_checkpointing=True), machine(kernel_sec=1e-3)).parts["hooks"]
    assert again == pytest.approx(1.5 * hooks)
    assert "hooks" not in predict_step(setup("zero2"), machine(kernel_sec=1e-3)).parts


def test_the_hooks_of_zero3_are_a_range_on_gpus(setup):
    """GPT-2 small at micro batch 4: 148 parameters, 2 passes, 100 operations of 4 us, which nobody measured."""
    fields = SMALL | {"micro_batch_size": 4, "gradient_accumulation_steps": 1}
    gpu, host = datasheet_machine(find_gpu("a100-80gb")), 29_600 * 4e-6
    step = predict_step(setup("zero3", **fields), gpu)
    assert step.seconds > step.parts["hooks"] > 0
    passes = sum(step.parts[name] for name in ("forward", "backward", "head and loss", "communication", "hooks"))
    assert passes == pytest.approx(host)
    assert step.least < 0.04 < host < step.seconds < step.most
    assert "0.12 s for ZeRO-3's hooks (assumed)" in step.overlap
    busy = predict_step(setup("zero3", **fields | {"micro_batch_size": 32}), gpu)
    assert "hooks" not in busy.parts  # the GPU is the slower one


@pytest.mark.parametrize(("stages", "micro_batches", "share"), [(2, 3, 1 / 4), (4, 5, 3 / 8)])
def test_the_bubble_of_a_pipeline(setup, stages, micro_batches, share):
    assert bubble_fraction(stages, micro_batches) == share
    model = replace(setup().model, n_layer=stages, n_embd=1024, n_head=1)  # next to which the head is nothing
    pipeline = {"pipeline": {"stages": stages, "partition": "type:StageBlock"}}
    fields = {"model": model, "world_size": stages, "gradient_accumulation_steps": micro_batches}
    alike = {name: {"fp32": 1e30} for name in ("logits", "elementwise")}
    no_gradients = machine(memory=1e30, bus={1: 1e30}, kernel_sec=0, **alike)
    parts = predict_step(setup("pipeline", top=pipeline, **fields), no_gradients).parts
    assert parts["bubble"] / sum(parts.values()) == pytest.approx(share, rel=0.02)


@pytest.mark.parametrize("layers", [2, 3])
def test_one_micro_batch_passes_all_stages_as_long_as_a_single_one(setup, layers):
    """The stage with the head, or with two blocks, is slower; the others are in the bubble with their own time."""
    model, top = replace(setup().model, n_layer=layers, vocab_size=4096), {"pipeline": {"stages": 2}}
    fields, endless = {"model": model, "precision": "fp32"}, machine(memory=1e30, bus={1: 1e30}, kernel_sec=0)

    def seconds(name: str, micro_batches: int, **more) -> float:
        return predict_step(setup(name, gradient_accumulation_steps=micro_batches, **fields | more), endless).seconds

    whole, deep = seconds("zero0", 1, world_size=1), seconds("pipeline", 1, top=top)
    assert deep == pytest.approx(whole)
    slowest = seconds("pipeline", 2, top=top) - deep
    assert slowest > whole / 2 * 1.1
    assert seconds("pipeline", 5, top=top) == pytest.approx(whole + 4 * slowest)


def test_collectives_take_their_ring_bytes_and_a_start_for_each_bucket(setup):
    p = total(model_parameters(setup().model))
    bytes_of_a_rank = 4 * p  # 2 (n - 1) / n of the gradients, on two ranks
    ddp = setup(run_type="ddp", top={"dsgpt": {"ddp": {"bucket_cap_mb": 4 * p / 2 / 2**20}}})
    assert predict_step(ddp, machine(collective_sec={2: 5.0})).parts["communication"] == pytest.approx(
        bytes_of_a_rank / 1e6 + 2 * 5.0
    )


def test_what_a_gpu_hides(setup):
    """DDP's embedding comes last. ZeRO hides nothing without ``overlap_comm``, and a CPU hides nothing at all."""
    p, embedding = total(model_parameters(setup().model)), VOCABULARY * C
    slow = {"elementwise": {"fp32": 1e3, "bf16": 1e3}}  # a backward pass longer than all communication
    ddp = predict_step(setup(run_type="ddp"), machine("cuda", **slow))
    assert ddp.parts["communication"] == pytest.approx(4 * p / 1e6 * embedding / p)
    assert ddp.hidden == pytest.approx(4 * p / 1e6 * (1 - embedding / p))
    assert predict_step(setup(run_type="ddp"), machine(**slow)).hidden == 0
    assert predict_step(setup("zero2"), machine("cuda", **slow)).hidden == 0
    overlapping = predict_step(setup("zero2", zero={"overlap_comm": True}), machine("cuda", **slow))
    assert overlapping.hidden > 0
    assert "overlap_comm" in overlapping.overlap


@pytest.mark.parametrize(
    ("fields", "times"),
    [
        (DDP, {"all_reduce": 1}),
        ({"name": "zero0"}, {"all_reduce": 3}),
        ({"name": "zero2"}, {"all_reduce": 3, "all_gather": 11}),
        (FSDP, {"reduce_scatter": 5, "all_gather": 11}),
        ({"name": "zero3"}, {"reduce_scatter": 7, "all_gather": 11}),
    ],
)
def test_collectives_take_the_time_of_their_operation_and_of_the_numbers_they_sum(setup, fields, times):
    """DDP sums gradients in fp32, ZeRO in the precision of the activations; FSDP gathers and scatters."""
    slowness = {"all_reduce": {"fp32": 1, "bf16": 3}, "reduce_scatter": {"fp32": 5, "bf16": 7}}
    found = setup(precision="bf16", **fields)
    ring = {traffic.operation: times[traffic.operation] * traffic.ring_bytes for traffic in step_traffic(found)}
    slow = machine(slowness=slowness | {"all_gather": {"fp32": 11}})
    assert 1e6 * predict_step(found, slow).parts["communication"] == pytest.approx(sum(ring.values()))


def rates_of(found: Setup, *, devices: int = 8, rates: Rates = RATES) -> dict[str, float]:
    """Bytes that a rank sends per second in each of its groups."""
    seconds = partial(sending_sec, found, rates, devices=devices, kind="cuda")
    return {each.axis: pytest.approx(each.ring_bytes / seconds(each)) for each in step_traffic(found)}


def test_rings_over_several_machines_pass_their_network_once(setup):
    """Tensor peers share a machine, and their data peers share its network. Stages are on two machines."""
    ddp = setup(run_type="ddp", world_size=16)
    assert [rates_of(ddp, devices=each) for each in (8, 16)] == [{"data": 1e5}, {"data": 1e6}]
    assert rates_of(setup("tensor", world_size=16)) == {"tensor": 1e6, "data": 1e5 / 2}
    # three peers of 8 GPUs a machine: ranks 6, 7 and 8
    odd = {"model": replace(setup().model, n_head=3, n_embd=12), "top": {"tensor_parallel": {"autotp_size": 3}}}
    assert rates_of(setup("tensor", world_size=24, **odd))["tensor"] == 1e5
    # four stages of 4 ranks: the second and the third, 7 and 8
    deep = {"model": replace(setup().model, n_layer=4), "top": {"pipeline": {"stages": 4, "partition": "uniform"}}}
    assert rates_of(setup("pipeline", world_size=16, **deep))["pipeline"] == 1e5 / 4
    more = replace(RATES, rings_power=0.5)  # more rings reach more of the network
    assert rates_of(setup("tensor", world_size=16), rates=more)["data"] == 1e5 * 2**0.5 / 2


def test_others_sum_the_tied_embedding_in_their_own_precision(setup):
    """This package sums it in fp32, and so does DeepSpeed's optimizer for bf16."""

    def summed(**fields) -> int:
        found = setup("pipeline", top={"pipeline": {"stages": 2}}, world_size=2, **fields)
        return sum(each.payload_bytes for each in step_traffic(found) if each.axis == "pipeline" and each.once)

    whole = summed(precision="fp16")
    assert summed(precision="fp16", accumulation="sharded") == whole / 2
    assert summed(precision="bf16", accumulation="sharded", zero={"stage": 1}) == whole


def test_a_slow_network_passes_what_is_sent_however_slow_an_operation_is_inside_a_machine(setup):
    """Inside a machine a scatter takes 5 times as long as its ring bytes, a gather 11 times; the network is at 1e5."""
    rates = replace(RATES, slowness={"reduce_scatter": {"fp32": 5.0}, "all_gather": {"fp32": 11.0}})
    found = setup(run_type="fsdp", world_size=2)
    sent = {each.operation: each for each in step_traffic(found)}
    scatter, gather = sent["reduce_scatter"].ring_bytes, sent["all_gather"].ring_bytes

    def seconds(operation: str, kind: str, *, devices: int = 1) -> float:
        return sending_sec(found, rates, sent[operation], devices=devices, kind=kind)

    assert seconds("all_gather", "cpu", devices=2) == pytest.approx(11 * gather / 1e6)
    assert seconds("all_gather", "cpu") == pytest.approx(11 * gather / 1e6 + gather / 1e5)
    assert seconds("reduce_scatter", "cpu") == pytest.approx(5 * scatter / 1e6 + 2 * scatter / 1e5)
    assert seconds("all_gather", "cuda") == pytest.approx(11 * gather / 1e6)
    assert seconds("reduce_scatter", "cuda") == pytest.approx(scatter / 1e5)


def test_a_sum_over_machines_starts_with_two_passes_of_their_network(setup):
    """Each rank gets it from a ring of machines; a gather needs half of the passes, and one machine none."""

    def seconds(name: str = "zero1", *, ranks: int, devices: int, **fields) -> dict[str, float]:
        found = setup(name, world_size=ranks, **fields)
        late = replace(RATES, bus={1: 1e30}, network=1e30, network_sec=1.0)
        sending = partial(sending_sec, found, late, devices=devices, kind="cuda")
        return {each.operation: sending(each) / each.calls for each in step_traffic(found)}

    sums = [seconds(run_type="ddp", ranks=16, devices=devices)["all_reduce"] for devices in (16, 8, 4, 1)]
    assert sums == pytest.approx([0, 2, 6, 30])
    assert seconds(ranks=16, devices=4)["all_gather"] == pytest.approx(3)
    deep = {"model": replace(setup().model, n_layer=4), "top": {"pipeline": {"stages": 4, "partition": "uniform"}}}
    assert seconds("pipeline", ranks=4, devices=1, **deep)["send"] == pytest.approx(1)


def test_rates_between_measured_widths_rows_and_ranks():
    rates = {100: {16: 1e9, 64: 2e9}, 400: {16: 4e9, 64: 8e9}}
    found = [on_grid(rates, width, rows) for width, rows in ((200, 16), (100, 32), (1, 1), (10_000, 10_000))]
    assert found == [pytest.approx(2e9), pytest.approx(2**0.5 * 1e9), 1e9, 8e9]
    assert [at_ranks({2: 20.0, 8: 80.0}, ranks) for ranks in (1, 2, 3, 16)] == [20.0, 20.0, 80.0, 80.0]
