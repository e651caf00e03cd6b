"""Every combination that cannot be trained rightly is refused in one line, with the reason and what to take instead."""

import pytest
from small_run import RECIPE, command_line, write_data, write_recipe

from dsgpt.cli import parse_arguments
from dsgpt.config import RunConfig, resolve
from dsgpt.errors import UserError
from dsgpt.topology import Topology


def asked(folder, *, ranks: int, recipe: dict, **flags) -> RunConfig:
    """A request of ``ranks`` processes, resolved; ``recipe`` is laid over the small one."""
    write_recipe(write_data(folder) / "recipe.json", RECIPE, **recipe)
    options, problems = parse_arguments(command_line(folder, **{"run_type": "optimized", **flags}))
    topology = Topology(rank=0, local_rank=0, world_size=ranks, local_world_size=ranks, launcher="deepspeed")
    return resolve(options, topology=topology, problems=problems)


REFUSED = {
    "ranks that hold no whole copy": (
        {"ranks": 3, "recipe": {"tensor_parallel": {"autotp_size": 2}}},
        "splits the model over 2 ranks (tensor 2), but 3 were started: start 2 or 4, or take ds_configs/zero1.json",
    ),
    "fewer ranks than a copy needs": (
        {"ranks": 1, "recipe": {"pipeline": {"stages": 2}}},
        "splits the model over 2 ranks (pipeline 2), but 1 was started: start 2, or take ds_configs/zero1.json",
    ),
    "a pipeline with ZeRO-2": (
        {"ranks": 2, "recipe": {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 2}}},
        "a pipeline does not go with ZeRO stage 2",
    ),
    "a pipeline with ZeRO-3": (
        {"ranks": 2, "recipe": {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 3}}},
        "take stage 0 or 1 (ds_configs/pipeline.json)",
    ),
    "a pipeline with ZeRO-0 in bf16": (
        {"ranks": 2, "recipe": {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 0}}, "precision": "bf16"},
        "a pipeline at ZeRO stage 0 does not go with bf16",
    ),
    "tensor parallelism with ZeRO-3": (
        {"ranks": 2, "recipe": {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 3}}},
        "take stage 0, 1 or 2 (ds_configs/tensor.json)",
    ),
    "sequence and tensor parallelism": (
        {"ranks": 4, "recipe": {"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2}},
        "sequence parallelism is not combined with tensor parallelism",
    ),
    "heads that do not divide": (
        {"ranks": 4, "recipe": {"tensor_parallel": {"autotp_size": 4}}},
        "autotp_size 4 does not divide the model's 2 heads: take 2 for tensor parallelism",
    ),
    "heads that sequence parallelism does not divide": (
        {"ranks": 4, "recipe": {"sequence_parallel_size": 4}},
        "sequence_parallel_size 4 does not divide the model's 2 heads",
    ),
    "sequences that do not divide": (
        {"ranks": 2, "recipe": {"sequence_parallel_size": 2}, "seq_length": 15},
        "does not divide sequences of 15 tokens: take --seq_length 14 or 16",
    ),
    "more stages than blocks": (
        {"ranks": 4, "recipe": {"pipeline": {"stages": 4}}},
        "a pipeline of 4 stages needs as many blocks, but the model has 2: take at most 2 stages, or --num_layers 4",
    ),
    "offload with a split model": (
        {
            "ranks": 2,
            "recipe": {
                "tensor_parallel": {"autotp_size": 2},
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            },
        },
        "offload is combined with data parallelism alone here",
    ),
    "compiling a split model": (
        {"ranks": 2, "recipe": {"pipeline": {"stages": 2}}, "compile": True},
        "--compile does not go with a model split over ranks (pipeline 2)",
    ),
    "compiling at ZeRO-3": (
        {"ranks": 2, "recipe": {"zero_optimization": {"stage": 3}}, "compile": True},
        "--compile does not go with ZeRO stage 3",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    request, words = REFUSED[case]
    with pytest.raises(UserError) as caught:
        asked(tmp_path, **request)
    (line,) = [line for line in caught.value.problems if words in line]
    assert len(line) < 300


@pytest.mark.parametrize("run_type", ["ddp", "fsdp"])
def test_torch_strategies_ignore_how_deepspeed_splits_and_say_so(tmp_path, run_type):
    config = asked(tmp_path, ranks=2, recipe={"tensor_parallel": {"autotp_size": 2}}, run_type=run_type)
    assert config.topology.data_parallel_size == 2
    assert any("tensor_parallel means nothing here and is ignored" in notice for notice in config.notices)


@pytest.mark.parametrize(
    ("recipe", "name", "data_ranks"),
    [
        ({}, "zero1", 4),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor2-zero1", 2),
        ({"pipeline": {"stages": 2}}, "pipeline2-zero1", 2),
        ({"sequence_parallel_size": 2}, "sequence2-zero1", 2),
        ({"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}}, "pipeline2-tensor2-zero1", 1),
    ],
)
def test_what_is_left_over_is_data_parallel(tmp_path, recipe, name, data_ranks):
    config = asked(tmp_path, ranks=4, recipe=recipe)
    assert config.strategy_name == name
    assert config.batch.data_parallel_size == data_ranks
    assert config.batch.micro_batch_size * config.batch.gradient_accumulation_steps * data_ranks == 8
