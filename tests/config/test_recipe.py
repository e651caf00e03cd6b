"""A recipe is read as DeepSpeed reads it, every mistake is a line, and ds_configs/README.md is complete and correct."""

import json
import re
import shlex
from dataclasses import fields, replace
from typing import Any

import pytest
from pydantic import ValidationError
from recipe_files import SHIPPED, problems_of, resolved
from small_run import RECIPE, REPOSITORY, write_recipe

from dsgpt.benchmarks.cells import STRATEGIES
from dsgpt.benchmarks.parity import select, whole_matrix
from dsgpt.config import compatibility
from dsgpt.config.options import parse_arguments
from dsgpt.config.recipe import merged, recipe_from, sound_recipe
from dsgpt.config.recipe_blocks import (
    Bf16,
    Fp16,
    OffloadOptimizer,
    OffloadParam,
    OptimizerRecipe,
    SchedulerRecipe,
    ZeroRecipe,
)
from dsgpt.model.config import PRESETS, GPT2Config
from dsgpt.planner.formulas import largest_model_state, most_sent_bytes
from dsgpt.planner.pytorch_formulas import ModelState
from dsgpt.planner.setup import Setup, model_parameters, total
from dsgpt.strategies.deepspeed.setup import engine_config

FOLDER = REPOSITORY / "ds_configs"

# A recipe is read as DeepSpeed reads it.


def test_each_written_key_is_read(file):
    recipe = sound_recipe(write_recipe(file))
    assert recipe.optimizer == OptimizerRecipe(type="AdamW", lr=0.001, betas=(0.9, 0.95), weight_decay=0.1)
    assert recipe.scheduler == SchedulerRecipe(type="WarmupCosineLR", warmup_num_steps=2, warmup_type="linear")
    assert (recipe.train_batch_size, recipe.zero_stage, recipe.gradient_clipping) == (8, 1, 1.0)
    assert (recipe.precision, recipe.offload_optimizer, recipe.offload_param) == (None, "none", "none")
    assert recipe.raw == RECIPE
    assert recipe.deepspeed_only == ("zero_optimization",)


@pytest.mark.parametrize(
    ("blocks", "precision"),
    [
        ({}, None),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": False}}, "fp16"),
        ({"bf16": {"enabled": False}}, "fp32"),
        ({"fp16": {}}, "fp32"),
    ],
)
def test_precision_by_block(file, blocks, precision):
    assert sound_recipe(write_recipe(file, RECIPE, **blocks)).precision == precision


# Every mistake in a recipe is reported, in one line, with its place and what is allowed.


def test_a_byte_order_mark_is_accepted(file):
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(RECIPE).encode())
    assert problems_of(file) == []


def test_a_recipe_of_many_unknown_keys_is_refused_at_once(file):
    """20,000 once took 12 s: each line was compared with all previous ones, and each key with all known ones."""
    found = problems_of(write_recipe(file, RECIPE, **{f"key_{number}": number for number in range(20_000)}))
    assert len(found) == 21
    assert found[0].startswith("key_0 is not a known key")
    assert found[-1] == f"{file} has 19,980 more unknown keys"


# `ds_configs/sizes`: one recipe for each size, and what the page says about them.


TUNED = {"train_batch_size", "lr", "betas", "weight_decay", "warmup_num_steps", "cos_min_ratio"}


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def differences(one: Any, two: Any, key: str = "") -> set[str]:
    """The keys at which two recipes differ."""
    if isinstance(one, dict) and isinstance(two, dict):
        return {name for key in one.keys() | two.keys() for name in differences(one.get(key), two.get(key), key)}
    return {key} if one != two else set()


@pytest.mark.parametrize("size", PRESETS)
def test_every_size_has_a_recipe_that_is_zero1_with_the_settings_of_the_page(size):
    assert differences(read("zero1.json"), read(f"sizes/{size}.json")) <= TUNED
    row = re.search(rf"^\| `sizes/{size}.json` \|(.*)\|$", PAGE, flags=re.MULTILINE)[1]
    recipe = read(f"sizes/{size}.json")
    optimizer, schedule = recipe["optimizer"]["params"], recipe["scheduler"]["params"]
    figures = (
        *(recipe["train_batch_size"], optimizer["lr"], schedule["warmup_num_steps"]),
        *(optimizer["betas"][1], schedule["cos_min_ratio"]),
    )
    assert [cell.strip() for cell in row.split("|")][:5] == [f"{figure:g}" for figure in figures]


# `ds_configs/README.md` is complete and correct: every recipe, key and command, and the figures by formula.


PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
NAMES = sorted(path.name for path in FOLDER.glob("*.json"))
PLAIN = ["baseline", "ddp", "fsdp"]


def rows(title: str) -> list[list[str]]:
    """The cells of the first table under the heading ``title``, without its header."""
    part = PAGE.split(f"\n## {title}", 1)[1].split("\n## ", 1)[0]
    lines = re.search(r"(?:^\|.*\n)+", part, flags=re.MULTILINE).group(0).splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def section(name: str) -> str:
    """The text under the heading of a recipe, or of a run type of plain PyTorch."""
    return PAGE.split(f"\n### `{name}`", 1)[1].split("\n### ", 1)[0].split("\n## ", 1)[0]


def test_every_recipe_has_its_row_with_every_column():
    table = rows("Which one")
    assert sorted(row[0].strip("`") for row in table if row[0] != "any") == NAMES
    assert [row[1].strip("`") for row in table if row[0] == "any"] == PLAIN
    assert {len(row) for row in table} == {7}
    assert all(cell for row in table for cell in row)


@pytest.mark.parametrize("name", [*PLAIN, *NAMES])
def test_every_recipe_has_an_explanation_a_training_and_a_parity_command(name):
    text, _, block = section(name).partition("```bash")
    assert len(text.split()) > 15
    train, prove = (shlex.split(line) for line in block.replace("\\\n", " ").strip("`\n ").splitlines())
    options, problems = parse_arguments(train[train.index("src/gpt2.py") + 1 :])
    recipe = sound_recipe(REPOSITORY / options.deepspeed_config)
    assert name in {options.run_type, recipe.path.name}
    ranks = next((int(train[train.index(flag) + 1]) for flag in ("--num_gpus", "--nproc_per_node") if flag in train), 1)
    assert ranks % recipe.parallel_of(options.run_type).ranks_per_copy == 0
    if name != "zeropp.json":  # outside the parity suite: it rounds what it sends
        assert prove[:3] == [".venv/bin/python", "src/benchmark.py", "parity"]
        only, numbers = prove[prove.index("--only") + 1 : prove.index("--ranks")], prove[prove.index("--ranks") + 1 :]
        chosen = select(whole_matrix(), ranks=list(map(int, numbers)), only=only, problems=problems)
        assert {cell.strategy for cell in chosen} == set(only)
        recipes = {STRATEGIES[cell].recipe if name.endswith(".json") else STRATEGIES[cell].run_type for cell in only}
        assert recipes == {name}
    problems.raise_if_any()


def test_every_key_of_a_shipped_file_is_explained_with_its_value():
    explained = {row[0].strip("`"): row[1] for row in rows("Buckets and limits")}
    structure = {"stage", "offload_optimizer", "offload_param", "zero_quantized_weights", "zero_quantized_gradients"}
    seen = set()
    for name in NAMES:
        block = json.loads((FOLDER / name).read_text())["zero_optimization"]
        for key in block.keys() - structure:
            seen.add(key)
            value = block[key]
            assert (str(value).lower() if isinstance(value, bool) else f"{value:,}") in explained[key], (name, key)
    assert seen == explained.keys()
    for key in structure - {"stage"}:
        assert key in PAGE


def test_default_limits_would_keep_all_of_gpt2_large_whole():
    """The page says so of ``stage3_max_live_parameters`` and ``stage3_max_reuse_distance``."""
    model, shipped = PRESETS["large"], example("zero3.json", model=PRESETS["large"])
    limits = ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size")
    plain = recipe_from(merged(shipped.recipe.raw, {"zero_optimization": dict.fromkeys(limits)}), FOLDER)
    for setup, times in ((replace(shipped, recipe=plain), 1), (shipped, 2)):
        assert total(setup.gathers.all) == pytest.approx(times * total(model_parameters(model)), rel=0.1)


def example(
    name: str,
    *,
    run_type: str = "optimized",
    model: GPT2Config = PRESETS["small"],
    ranks: int = 8,
    precision: str = "bf16",
) -> Setup:
    """The page's example: 8 ranks, the recipes' global batch in micro batches of 2 sequences of 1,024 tokens."""
    recipe = sound_recipe(FOLDER / name)
    micro, readers = 2, ranks // recipe.parallel_of(run_type).ranks_per_copy
    return Setup(
        run_type=run_type,
        model=model,
        recipe=recipe,
        world_size=ranks,
        precision=precision,
        micro_batch_size=micro,
        gradient_accumulation_steps=recipe.train_batch_size // readers // micro,
        seq_length=1024,
    )


def example_row(label: str, setup: Setup) -> list[str]:
    state: ModelState = largest_model_state(setup)
    parts = [state.parameters, state.gradients, state.optimizer, state.master, state.total, state.on_device]
    sizes = [*parts, most_sent_bytes(setup)]
    return [label, str(setup.gradient_accumulation_steps), *(f"{size / 1e6:,.0f}" for size in sizes)]


def example_rows() -> list[list[str]]:
    plain = [example_row(f"`{kind}`", example("zero1.json", run_type=kind)) for kind in ("ddp", "fsdp")]
    order = [row[0].strip("`") for row in rows("Which one")]
    shipped = [name for name in order if name in NAMES and name != "zeropp.json"]
    return [*plain, *(example_row(f"`{name}`", example(name)) for name in shipped)]


def test_the_example_follows_the_formulas():
    assert rows("Example: GPT-2 small") == example_rows()


STAGES = {
    **{kind: {"name": "zero1.json", "run_type": kind} for kind in ("ddp", "fsdp")},
    **{name: {"name": name} for name in ("zero0.json", "zero1.json", "zero2.json", "zero3.json")},
}


def test_the_example_in_the_other_precisions_follows_the_formulas():
    table = rows("The example in fp32 and fp16")
    for (label, how), row in zip(STAGES.items(), table, strict=True):
        setups = {precision: example(**how, precision=precision) for precision in ("fp32", "bf16", "fp16")}
        sent = {precision: most_sent_bytes(setup) for precision, setup in setups.items()}
        assert sent["bf16"] == sent["fp16"]
        sizes = [*(largest_model_state(setup).total for setup in setups.values()), sent["fp32"], sent["bf16"]]
        assert row == [f"`{label}`", *(f"{size / 1e6:,.0f}" for size in sizes)]


def test_the_models_of_the_commands_follow_the_formulas():
    """The demo model with the embedded corpus's vocabulary, on the commands' 2 ranks."""
    model = replace(PRESETS["demo"], vocab_size=8192)
    for precision, row in zip(("fp32", "bf16"), rows("The recipes one by one"), strict=True):
        setups = [example(**how, model=model, ranks=2, precision=precision) for how in STAGES.values()]
        assert row == [precision, *(f"{largest_model_state(setup).total / 1e6:,.1f}" for setup in setups)]
    setup = example("zero3.json", model=model, ranks=2)
    assert {part.name for part in setup.gathers.all} == {"wte.weight"}


def test_the_page_gives_the_gradients_that_are_freed_before_the_step():
    """ZeRO-1 at the end of the backward pass, FSDP until the last micro batch: 4P besides the rest."""
    whole = 4 * total(model_parameters(PRESETS["small"]))

    def before_the_step(label: str, **how) -> str:
        state = largest_model_state(example(**STAGES[label], **how))
        return f"{(state.total - state.gradients + whole) / 1e6:,.0f} MB"

    text = PAGE.replace("\n", " ")
    assert f"whole gradients, {before_the_step('fsdp')} in all" in text
    assert f"`fsdp` reaches {before_the_step('fsdp', precision='fp16')} in each" in text
    fp32, fp16 = (before_the_step("zero1.json", precision=precision) for precision in ("fp32", "fp16"))
    assert f"a rank has at least {fp32} in fp32 and {fp16} in fp16" in text
    cloud = {"ranks": 4, "precision": "fp16"}
    state = {
        label: f"{largest_model_state(example(**how, **cloud)).total / 1e6:,.0f} MB" for label, how in STAGES.items()
    }
    assert state["zero1.json"] == state["zero2.json"]
    page = (REPOSITORY / "docs" / "training.md").read_text(encoding="utf-8").replace("\n", " ")
    assert f"{state['ddp']} (10^6 bytes) with `ddp`, {state['zero1.json']} with `zero1.json` or `zero2.json`" in page
    assert f"{state['zero3.json']} with `zero3.json`, {state['fsdp']} with `fsdp`" in page
    zero1, fsdp = (before_the_step(label, **cloud) for label in ("zero1.json", "fsdp"))
    assert f"it is {zero1} at the end of the backward pass, with `fsdp` and accumulation {fsdp}" in page


# Our keys have DeepSpeed's names, types and defaults; the shipped recipes are valid for both.


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


WRONG_OBJECTS_AND_OPTIONALS = dict.fromkeys(("nvme_path", "offload_optimizer", "offload_param"), 5)
WRONG_OBJECTS_AND_OPTIONALS |= dict.fromkeys(("buffer_count", "buffer_size"), -1)
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


def test_shipped_recipes_describe_the_same_training():
    recipes = [sound_recipe(path) for path in SHIPPED]
    for recipe in recipes:
        assert recipe.optimizer == recipes[0].optimizer
        assert recipe.scheduler == recipes[0].scheduler
        assert recipe.gradient_clipping == recipes[0].gradient_clipping
        assert recipe.train_batch_size == recipes[0].train_batch_size
        decided_by_the_run = recipe.precision, recipe.train_micro_batch_size_per_gpu, recipe.gradient_accumulation_steps
        assert decided_by_the_run == (None, None, None)
        assert '"auto"' not in recipe.path.read_text()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("path", [path for path in SHIPPED if "zero" in path.stem], ids=lambda path: path.stem)
def test_deepspeed_accepts_the_engine_config(here, monkeypatch, path, precision):
    from deepspeed.runtime.config import DeepSpeedConfig

    for check in ("_check_nvme", "_check_zero_plus_plus"):  # reading a recipe needs no drive and no GPUs
        monkeypatch.setattr(compatibility, check, lambda request, problems: None)
    config = resolved(here, deepspeed_config=path, run_type="optimized", precision=precision, grad_accum_steps=2)
    theirs = DeepSpeedConfig(engine_config(config))
    ours = sound_recipe(path)
    assert theirs.zero_optimization_stage == ours.zero_stage
    assert theirs.gradient_clipping == ours.gradient_clipping
    sizes = (theirs.train_batch_size, theirs.train_micro_batch_size_per_gpu, theirs.gradient_accumulation_steps)
    assert sizes == (ours.train_batch_size, ours.train_batch_size // 2, 2)
    assert theirs.bfloat16_config.enabled == (precision == "bf16")
    assert not theirs.float16_config.enabled
    assert theirs.optimizer_name is None  # the optimizer is ours
