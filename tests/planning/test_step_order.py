"""The order of a step: every byte of the planned traffic has its place, and pipelines run as DeepSpeed's do."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from small_run import REPOSITORY

from dsgpt.common.errors import Problems
from dsgpt.config.recipe import read_recipe
from dsgpt.model.config import PRESETS
from dsgpt.planner.setup import Setup
from dsgpt.planner.step_order import AFTER_STEP, BACKWARD, BEFORE_STEP, FORWARD, copied, passes, placed_traffic
from dsgpt.planner.traffic import gathered, gathered_forward, step_traffic

RECIPES = ("zero0", "zero1", "zero2", "zero3", "zero3_offload", "tensor", "sequence", "pipeline", "3d")


def setup_of(
    recipe: str, *, run_type: str = "optimized", ranks: int = 8, batches: int = 3, again: bool = False
) -> Setup:
    problems = Problems()
    read = read_recipe(REPOSITORY / "ds_configs" / f"{recipe}.json", problems)
    assert read is not None
    return Setup(
        run_type=run_type,
        model=PRESETS["small"],
        recipe=read,
        world_size=ranks,
        precision="bf16",
        micro_batch_size=2,
        gradient_accumulation_steps=batches,
        seq_length=1024,
        activation_checkpointing=again,
    )


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("recipe", [*RECIPES, "ddp", "fsdp"])
def test_places_share_out_the_traffic_of_the_step(recipe, again):
    run_type = recipe if recipe in {"ddp", "fsdp"} else "optimized"
    setup = setup_of("zero0" if run_type != "optimized" else recipe, run_type=run_type, again=again)
    for rank in setup.first_ranks:
        found = Counter[tuple[str, str, str]]()
        for each in placed_traffic(setup, rank=rank):
            found[each.traffic.what, each.traffic.operation, each.traffic.axis] += each.traffic.payload_bytes
        assert found == {(t.what, t.operation, t.axis): t.payload_bytes for t in step_traffic(setup, rank=rank)}


def places(setup: Setup, what: str, rank: int = 0) -> list[tuple[str, int | None]]:
    return [(each.moment, each.micro_batch) for each in placed_traffic(setup, rank=rank) if each.traffic.what == what]


def test_gradients_are_sent_where_each_strategy_sends_them():
    assert places(setup_of("zero0", run_type="ddp"), "gradients") == [(BACKWARD, 2)]
    assert places(setup_of("zero1"), "gradients") == [(BEFORE_STEP, None)]
    assert places(setup_of("zero2"), "gradients") == [(BACKWARD, 0), (BACKWARD, 1), (BACKWARD, 2)]


def test_weights_are_gathered_where_each_strategy_gathers_them():
    each_pass = [(kind, number) for number in range(3) for kind in (FORWARD, BACKWARD)]
    assert places(setup_of("zero0", run_type="fsdp"), "weights") == each_pass
    assert places(setup_of("zero2"), "weights") == [(AFTER_STEP, None)]
    assert places(setup_of("zero3"), "weights") == [*each_pass, (AFTER_STEP, None)]


def test_zero_3_gathers_every_large_parameter_before_its_first_use():
    setup = setup_of("zero3")
    forward = {part.name for part in gathered_forward(setup)}
    assert forward == {part.name for part in gathered(setup)}
    assert len(gathered_forward(setup)) < len(gathered(setup))


def megabytes(setup: Setup, what: str) -> tuple[int, int]:
    """What a rank copies to its host in a step, and back."""
    found = [each for each in copied(setup) if each.what == what]
    out, back = (sum(each.size for each in found if each.to_device == way) for way in (False, True))
    return round(out / 1e6), round(back / 1e6)


@pytest.mark.parametrize(
    ("recipe", "precision", "batches", "gradients"),
    [
        # A rank's part has 15.6 million elements, 62 MB in fp32. ZeRO-3 copies it to the host and back each time.
        ("zero3_offload", "bf16", 1, (62 + 62, 62)),
        ("zero3_offload", "bf16", 8, (9 * 62.24, 8 * 62.24)),
        ("zero2_offload", "bf16", 1, (62, 0)),
        ("zero2_offload", "fp16", 8, (62, 0)),
        ("zero2_offload", "fp32", 1, (62, 0)),
        # The part lies in the embedding, of 50,304 x 768 elements: 155 MB, which go out each time and come back from
        # the second time on.
        ("zero2_offload", "fp32", 8, (8 * 154.53 + 62.24, 7 * 154.53)),
    ],
)
def test_offload_copies_gradients_as_deepspeed_does(recipe, precision, batches, gradients):
    setup = replace(setup_of(recipe, batches=batches), precision=precision)
    assert megabytes(setup, "gradients") == pytest.approx(gradients, abs=1)
    own = 62 if precision == "fp32" else 31
    if recipe == "zero2_offload":
        assert megabytes(setup, "weights") == (0, own)
    else:  # the weights stay in the host, and reach the device in the passes alone
        assert {each.moment for each in copied(setup) if each.what == "weights"} == {FORWARD, BACKWARD}


def test_fsdp_copies_what_stays_gathered_once():
    """Blocks have 85.1 million elements, embeddings and last LayerNorm 39.4 million, of which a rank has an eighth."""
    setup = setup_of("zero0", run_type="fsdp", batches=8)
    offload = replace(setup.recipe.dsgpt.fsdp, cpu_offload=True)
    setup = replace(setup, recipe=replace(setup.recipe, dsgpt=replace(setup.recipe.dsgpt, fsdp=offload)))
    assert megabytes(setup, "weights") == (0, round((16 * 85.05 + 39.42) * 4 / 8))
    assert megabytes(setup, "gradients") == (62, 0)


def test_a_stage_sends_to_its_neighbours_alone():
    setup = setup_of("pipeline", ranks=4)
    assert {moment for moment, _ in places(setup, "activations", rank=0)} == {FORWARD}
    assert {moment for moment, _ in places(setup, "activations", rank=2)} == {BACKWARD}


@pytest.mark.parametrize(("stages", "batches"), [(2, 1), (2, 5), (4, 2), (4, 4), (4, 9)])
def test_a_pipeline_runs_in_the_order_of_deepspeed(stages, batches, tmp_path):
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

    recipe = tmp_path / "pipeline.json"
    text = (REPOSITORY / "ds_configs" / "pipeline.json").read_text(encoding="utf-8")
    recipe.write_text(text.replace('"stages": 2', f'"stages": {stages}'), encoding="utf-8")
    setup = setup_of(str(Path(recipe).with_suffix("")), ranks=stages, batches=batches)
    for stage in range(stages):
        done, kinds = [], {ForwardPass: FORWARD, BackwardPass: BACKWARD}
        for commands in TrainSchedule(micro_batches=batches, stages=stages, stage_id=stage):
            done += [kinds[type(each)] for each in commands if type(each) in kinds]
        assert [each.kind for each in passes(setup, rank=stage)] == done
        for kind in (FORWARD, BACKWARD):
            own = [each.micro_batch for each in passes(setup, rank=stage) if each.kind == kind]
            assert own == list(range(batches))
