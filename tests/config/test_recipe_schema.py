"""Our keys have DeepSpeed's names, types and defaults; the shipped recipes are valid for both."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from recipe_files import SHIPPED, understood
from small_run import REPOSITORY, command_line, write_data

from dsgpt.config import compatibility
from dsgpt.config.options import parse_arguments
from dsgpt.config.recipe_blocks import Bf16, Fp16, OffloadOptimizer, OffloadParam, SchedulerRecipe, ZeroRecipe
from dsgpt.config.run_config import RunConfig, resolve
from dsgpt.machine.topology import ParallelSizes, read_topology
from dsgpt.strategies.deepspeed.setup import engine_config

OURS_ALONE = {"overlap_comm", "buffer_count", "buffer_size", "offload_optimizer", "offload_param"}
"""Keys whose default strategies replace by a value for the run."""


def deepspeeds(model: type) -> dict[str, Any]:
    """The default of every key of one of DeepSpeed's schemas, by each name of the key."""
    return {name: each.get_default() for key, each in model.model_fields.items() for name in (key, each.alias) if name}


def schemas() -> list[tuple[type, type]]:
    """Our blocks and DeepSpeed's."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero import config as zero
    from deepspeed.runtime.zero import offload_config as offload

    return [
        (ZeroRecipe, zero.DeepSpeedZeroConfig),
        (OffloadOptimizer, offload.DeepSpeedZeroOffloadOptimizerConfig),
        (OffloadParam, offload.DeepSpeedZeroOffloadParamConfig),
        (Bf16, DeepSpeedBF16Config),
        (Fp16, DeepSpeedFP16Config),
    ]


def test_every_key_and_its_default_is_deepspeeds():
    for ours, theirs in schemas():
        defaults = deepspeeds(theirs)
        for each in fields(ours):
            assert each.name in defaults
            if each.name not in OURS_ALONE:
                assert defaults[each.name] == each.default, (ours, each.name)


def accepts(model: type, key: str, value: Any, **others: Any) -> bool:
    try:
        model(**others | {key: value})
    except ValidationError:
        return False
    return True


WRONG_OBJECTS_AND_OPTIONALS = {
    "nvme_path": 5,
    "buffer_count": -1,
    "buffer_size": -1,
    "offload_optimizer": 5,
    "offload_param": 5,
}
"""A wrong value for each key whose default, None or a block, does not show the type of its values."""


def test_types_of_values_are_deepspeeds():
    """DeepSpeed's schema accepts what ours accepts; both refuse values of another type."""
    wrong = {bool: "so-so", int: -1, str: 5}
    for ours, theirs in schemas()[:3]:
        needed = {"stage": 3} if ours is ZeroRecipe else {}
        for each in fields(ours):
            taken = [value for value in (True, 1, 5e8, "cpu", "/tmp", {}) if accepts(ours, each.name, value, **needed)]
            assert taken, each.name
            assert all(accepts(theirs, each.name, value, **needed) for value in taken), each.name
            refused = WRONG_OBJECTS_AND_OPTIONALS.get(each.name, wrong.get(type(each.default)))
            assert refused is not None, each.name
            assert not accepts(ours, each.name, refused), each.name
            assert not accepts(theirs, each.name, refused), each.name


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_scheduler_params_are_deepspeeds(kind):
    import inspect

    from deepspeed.runtime import lr_schedules

    theirs = set(inspect.signature(getattr(lr_schedules, kind)).parameters)
    assert theirs - {"optimizer", "last_batch_iteration"} == set(SchedulerRecipe.PARAMS[kind])


def resolved(folder: Path, recipe: Path, **flags: Any) -> RunConfig:
    options, problems = parse_arguments(command_line(folder, deepspeed_config=recipe, run_type="optimized", **flags))
    return resolve(options, topology=read_topology({}), problems=problems)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def test_a_recipe_is_shipped_for_every_stage():
    stages = {"zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "zero3_nvme", "zeropp"}
    assert {path.stem for path in SHIPPED} >= stages | {"tensor", "sequence", "pipeline", "3d"}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("tensor", ParallelSizes(tensor=2)),
        ("sequence", ParallelSizes(sequence=2)),
        ("pipeline", ParallelSizes(pipeline=2)),
        ("3d", ParallelSizes(pipeline=2, tensor=2)),
    ],
)
def test_shipped_recipes_split_in_two_in_each_dimension(name, sizes):
    assert understood(REPOSITORY / "ds_configs" / f"{name}.json").parallel == sizes
    for stage in range(4):
        assert understood(REPOSITORY / "ds_configs" / f"zero{stage}.json").zero_stage == stage


def test_shipped_recipes_describe_the_same_training():
    recipes = [understood(path) for path in SHIPPED]
    for recipe in recipes:
        assert recipe.optimizer == recipes[0].optimizer
        assert recipe.scheduler == recipes[0].scheduler
        assert recipe.gradient_clipping == recipes[0].gradient_clipping
        assert recipe.train_batch_size == recipes[0].train_batch_size
        assert (recipe.precision, recipe.train_micro_batch_size_per_gpu, recipe.gradient_accumulation_steps) == (
            None,
            None,
            None,
        )
        assert '"auto"' not in recipe.path.read_text()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("path", [path for path in SHIPPED if "zero" in path.stem], ids=lambda path: path.stem)
def test_deepspeed_accepts_the_engine_config(data, monkeypatch, path, precision):
    from deepspeed.runtime.config import DeepSpeedConfig

    for check in ("_check_nvme", "_check_zero_plus_plus"):  # reading a recipe needs no drive and no GPUs
        monkeypatch.setattr(compatibility, check, lambda request, problems: None)
    config = resolved(data, path, precision=precision, grad_accum_steps=2)
    theirs = DeepSpeedConfig(engine_config(config))
    ours = understood(path)
    assert theirs.zero_optimization_stage == ours.zero_stage
    assert theirs.gradient_clipping == ours.gradient_clipping
    sizes = (theirs.train_batch_size, theirs.train_micro_batch_size_per_gpu, theirs.gradient_accumulation_steps)
    assert sizes == (ours.train_batch_size, ours.train_batch_size // 2, 2)
    assert theirs.bfloat16_config.enabled == (precision == "bf16")
    assert not theirs.float16_config.enabled
    assert theirs.optimizer_name is None  # the optimizer is ours
