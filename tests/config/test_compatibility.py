"""What cannot be trained correctly is refused before anything is written, in one line, with the reason and a way out.

Most refusals are in tests/goldens/refusals.txt.
"""

import copy
import json
import re
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import training_runs
from deepspeed.utils import z3_leaf_module
from recipe_files import resolved
from small_run import RECIPE, REPOSITORY, TOKENS, command_line, random_ids, write_data, write_recipe, write_tokens

from dsgpt.common.errors import UserError
from dsgpt.config import compatibility
from dsgpt.config import options as trackers
from dsgpt.config.compatibility import ALLOW, KNOWN_BAD, TESTED, KnownBad, nvme_paths
from dsgpt.config.run_config import RunConfig
from dsgpt.machine import device
from dsgpt.model.gpt2 import GPT2
from dsgpt.planner.setup import model_parameters, total
from dsgpt.strategies.deepspeed import zero
from dsgpt.strategies.deepspeed.setup import engine_config
from dsgpt.training.command import train
from dsgpt.training.run_description import describe_run, setup_of
from dsgpt.training.run_folder import ResumePoint

# Every combination that cannot be trained correctly is refused in one line, with the reason and an alternative.


def asked(folder, *, ranks: int, recipe: dict, **flags) -> RunConfig:
    """A resolved request for ``ranks`` processes; ``recipe`` replaces keys of the small recipe."""
    write_recipe(write_data(folder) / "recipe.json", RECIPE, **recipe)
    words = command_line(folder, **{"run_type": "optimized", **flags})
    return training_runs.resolved(words, ranks=ranks, launcher="deepspeed")


NVME = {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}
SMALL_BUCKET = {"reduce_bucket_size": 500}


SUITABLE = {
    "compiler": ("g++",),
    "has_cuda_toolkit": True,
    "libaio_problem": "",
    "direct_io_problem": "",
    "may_lock": True,
}
"""What the probes of a machine answer if it can offload everywhere."""


def pretend(monkeypatch: pytest.MonkeyPatch, **answers: object) -> None:
    """Replace the probes of the machine by those of a suitable one, and some of them by ``answers``."""
    for name, value in (SUITABLE | answers).items():
        monkeypatch.setattr(compatibility, name, lambda *given, value=value: value)


NO_NVME = {
    "compiler": ((), "compiles DeepSpeed's asynchronous I/O and finds no C++ compiler: install one"),
    "has_cuda_toolkit": (False, "needs the CUDA toolkit, and finds no nvcc: install the toolkit and set CUDA_HOME"),
    "libaio_problem": ("finds no libaio with its header: install it", "nvme finds no libaio with its header: install"),
    "direct_io_problem": ("no O_DIRECT", "no O_DIRECT; name a folder on a local drive, or take ds_configs/zero3_off"),
    "may_lock": (False, "MB per rank in memory, more than this process may: raise the limit (ulimit -l unlimited)"),
}
"""For each probe of the machine: its answer on an unsuitable machine, and a part of the error."""


@pytest.mark.parametrize("probe", NO_NVME)
def test_offload_to_nvme_on_an_unsuitable_machine_is_refused(tmp_path, monkeypatch, probe):
    """The probes are replaced; ``test_device.py`` tests them on this machine. It is asked as if it had GPUs."""
    answer, words = NO_NVME[probe]
    monkeypatch.setattr(device, "cuda_devices", lambda: 2)
    pretend(monkeypatch, **{probe: answer})
    with pytest.raises(UserError) as caught:
        asked(tmp_path, ranks=2, recipe={"zero_optimization": NVME}, device="cuda", precision="fp32")
    (line,) = caught.value.problems
    assert words in line
    assert line.endswith(", or take ds_configs/zero3_offload.json, which offloads to memory")


@pytest.mark.parametrize(
    ("changes", "precision", "locked"),
    [
        ({}, "fp32", 5 * 2560 * 4 + 4 * 5480 * 4),
        ({}, "bf16", 5 * 2560 * 2 + 4 * 5480 * 4),
        ({"sub_group_size": 1000}, "fp32", 5 * 2560 * 4 + 4 * 1000 * 4),
        ({"offload_param": {"device": "nvme", "buffer_count": 2, "buffer_size": 600}}, "fp32", 2 * 600 * 4 + 87680),
        ({"offload_optimizer": {"device": "cpu"}}, "fp32", 5 * 2560 * 4),
        ({"offload_optimizer": {"device": "nvme", "pipeline_read": True}}, "fp32", 5 * 2560 * 4 + 12 * 5480 * 4),
    ],
)
def test_how_much_memory_offload_to_nvme_locks(tmp_path, monkeypatch, changes, precision, locked):
    """Five buffers for a rank's part of the largest parameter; weights, gradients and two moments of a sub-group.

    The embedding has 320 x 16 elements, the model 10,960 without the rows that pad it.
    """
    sizes = []
    pretend(monkeypatch)
    monkeypatch.setattr(compatibility, "may_lock", lambda size: not sizes.append(size))
    config = asked(tmp_path, ranks=2, recipe={"zero_optimization": NVME | changes}, precision=precision)
    assert sizes == [locked]
    block, given = config.recipe.zero_optimization.offload_optimizer, engine_config(config)["zero_optimization"]
    assert given["offload_param"]["buffer_size"] == (600 if "buffer_size" in changes.get("offload_param", {}) else 2560)
    if block.device == "nvme":
        assert given["offload_optimizer"]["buffer_count"] == block.swap_buffers == (12 if block.pipeline_read else 4)


def test_where_offload_to_nvme_swaps(tmp_path, monkeypatch):
    """In the run folder, unless the JSON names another; for a folder that does not exist yet, its parent is probed."""
    places = []
    pretend(monkeypatch)
    monkeypatch.setattr(compatibility, "direct_io_problem", lambda folder: places.append(folder) or "")
    (tmp_path / "drive").mkdir()
    elsewhere = {"device": "nvme", "nvme_path": str(tmp_path / "drive" / "deep" / "below")}
    config = asked(tmp_path, ranks=2, recipe={"zero_optimization": NVME | {"offload_param": elsewhere}})
    assert places == [tmp_path, tmp_path / "drive"]
    folders = {"offload_optimizer": config.run_dir, "offload_param": Path(elsewhere["nvme_path"])}
    assert nvme_paths(config.recipe, config.run_dir) == folders
    assert config.strategy_name == "zero3-nvme"


@pytest.mark.parametrize(("kind", "lines"), [("cuda", 1), ("cpu", 0)])
def test_overlap_is_off_unless_asked_for_and_noted_on_gpus(tmp_path, monkeypatch, kind, lines):
    """DeepSpeed's own default is true at stage 3. Races appear only on GPUs."""
    monkeypatch.setattr(device, "cuda_devices", lambda: 2)
    flags = {"ranks": 2, "device": kind, "precision": "fp32"}
    config = asked(tmp_path, recipe=stage(3), **flags)
    assert engine_config(config)["zero_optimization"]["overlap_comm"] is False
    chosen = asked(tmp_path, recipe=stage(3, overlap_comm=True), **flags)
    assert engine_config(chosen)["zero_optimization"]["overlap_comm"] is True
    noted = [line for line in chosen.notices if line not in config.notices]
    assert len(noted) == lines
    assert all("`.venv/bin/python src/benchmark.py parity --device cuda --only zero3`" in line for line in noted)


def test_what_the_engine_is_told_of_optimizer_and_ranks(tmp_path):
    """DeepSpeed would refuse SGD in host memory. Gradients that a single rank sends nowhere need no bucket."""
    offloaded = stage(1, offload_optimizer={"device": "cpu"})
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    assert "zero_force_ds_cpu_optimizer" not in engine_config(asked(tmp_path, ranks=2, recipe=offloaded))
    assert engine_config(asked(tmp_path, ranks=2, recipe=offloaded | sgd))["zero_force_ds_cpu_optimizer"] is False
    for ranks in (1, 2):
        told = engine_config(
            asked(tmp_path, ranks=ranks, recipe=stage(1) | {"tensor_parallel": {"autotp_size": ranks}})
        )
        assert ("contiguous_gradients" in told["zero_optimization"]) == (ranks == 1)
    for number in (1, 2):  # stage 1 all-reduces whole buckets, and so in place
        told = engine_config(asked(tmp_path, ranks=2, recipe=stage(number)))["zero_optimization"]
        assert told.get("reduce_scatter") is (False if number == 1 else None)


def test_stage_3_gathers_a_compiled_block_at_once(tmp_path, monkeypatch):
    """Hooks between its layers would break the graph."""
    monkeypatch.setattr(zero, "build_sharded", lambda config, _: GPT2(config.model))
    monkeypatch.setattr(zero.Zero, "_start", Mock())
    strategy = object.__new__(zero.Zero)
    strategy._stage = 3
    model = strategy._build(asked(tmp_path, ranks=2, recipe=stage(3), compile=True), torch.device("cpu"))
    assert {module for module in model.modules() if z3_leaf_module(module)} == {*model.blocks}


def test_low_precision_reduction_is_allowed_with_one_micro_batch_or_in_fp32(tmp_path):
    low = {"dsgpt": {"fsdp": {"reduce_dtype": "low"}}}
    asked(tmp_path, ranks=2, recipe=low, run_type="fsdp", precision="bf16", grad_accum_steps=1)
    asked(tmp_path, ranks=2, recipe=low, run_type="fsdp", precision="fp32", grad_accum_steps=2)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(("given", "larger"), [({}, True), ({"reduce_bucket_size": 5e7}, True), (SMALL_BUCKET, False)])
def test_the_bucket_is_no_larger_than_the_model(tmp_path, number, given, larger):
    """DeepSpeed allocates all of it: 2 GB in fp32 at its default. The record repeats what the engine got."""
    config = asked(tmp_path, ranks=2, recipe=stage(number, **given))
    size = total(model_parameters(config.model)) if larger else SMALL_BUCKET["reduce_bucket_size"]
    assert engine_config(config)["zero_optimization"]["reduce_bucket_size"] == size
    assert setup_of(config).reduce_bucket_size == size
    hashes = {"train": None, "val": None, "initial weights": None}
    record = describe_run(config, ResumePoint(), hashes=hashes)["deepspeed_config"]
    assert record["given"]["zero_optimization"] == {"stage": number, **given}
    assert record["resolved"]["zero_optimization"]["reduce_bucket_size"] == size


# Releases of DeepSpeed that train wrong are refused where they do, unless the user insists. Versions are pretended.


SPLIT = {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 1}}


def stage(number: int, **more: object) -> dict[str, object]:
    return {"zero_optimization": {"stage": number, **more}}


@pytest.mark.parametrize(
    ("release", "recipe", "flags", "thread"),
    [
        ("0.17.6", stage(2), {}, "issues/7718"),
        ("0.18.2.post1", stage(2), {}, "issues/7718"),
        ("0.17.5", stage(2), {}, None),
        ("0.18.3", stage(2), {}, None),
        ("0.18.2", SPLIT, {"grad_accum_steps": 2}, "issues/7773"),
        ("0.18.2", SPLIT, {"grad_accum_steps": 1}, None),
        ("0.18.5", stage(0), {"precision": "bf16"}, "issues/7837"),
        ("0.18.5", stage(0), {"precision": "fp32"}, None),
        ("0.18.6", stage(0), {"precision": "bf16"}, None),
        ("0.18.6", stage(1), {"precision": "bf16"}, "pull/7985"),
        ("0.18.6", stage(1), {"precision": "bf16", "ranks": 1}, None),
        ("0.19.0", stage(1), {"precision": "bf16"}, None),
        ("0.18.4", stage(2, overlap_comm=True), {"device": "cuda", "precision": "fp32"}, "pull/7965"),
        ("0.18.4", stage(2), {"device": "cuda", "precision": "fp32"}, None),
        ("0.18.9", stage(2), {}, "no thread"),
        ("0.18.9", stage(3), {}, None),
        ("0.18.2", stage(2), {"run_type": "ddp"}, None),
        (TESTED, stage(2), {"precision": "bf16"}, None),
    ],
)
def test_what_a_release_trains_wrong_is_refused(tmp_path, monkeypatch, release, recipe, flags, thread):
    monkeypatch.setattr(compatibility, "version", lambda _: release)
    monkeypatch.setattr(device, "cuda_devices", lambda: 2 if flags.get("device") == "cuda" else 0)
    flags = {"ranks": 2, **flags}
    if thread is None:
        notices = asked(tmp_path, recipe=recipe, **flags).notices
        untested = release != TESTED and flags.get("run_type") != "ddp"
        assert sum(f"DeepSpeed {release} is installed" in line for line in notices) == untested
        return
    with pytest.raises(UserError) as caught:
        asked(tmp_path, recipe=recipe, **flags)
    (line,) = caught.value.problems
    assert f"recipe.json: DeepSpeed {release} cannot train this: " in line
    assert f"(DeepSpeed's {thread}): install {TESTED}" in line


def test_a_machine_without_deepspeed_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(compatibility, "version", Mock(side_effect=PackageNotFoundError("deepspeed")))
    with pytest.raises(UserError, match=f"^--run_type optimized needs DeepSpeed: install it .*=={TESTED}"):
        asked(tmp_path, recipe=stage(2), ranks=2)


def test_a_dry_run_is_refused_and_the_user_may_insist_which_is_recorded(here, monkeypatch, capsys):
    monkeypatch.setattr(compatibility, "version", lambda _: "0.18.5")
    write_recipe(here / "recipe.json", RECIPE, **stage(0))
    words = command_line(here, run_type="optimized", precision="bf16", max_train_steps=1, no_inference=True)
    assert train([*words, "--dry_run"]) == 2
    assert f"set {ALLOW}=1 to train all the same" in capsys.readouterr().err
    monkeypatch.setenv(ALLOW, "1")
    assert resolved(here, run_type="optimized", precision="bf16").allowed_faults == ("issues/7837",)
    assert train(words) == 0
    assert f"{ALLOW}=1 lets DeepSpeed 0.18.5 train, though gradients are divided" in capsys.readouterr().out
    assert json.loads((here / "run" / "training_metrics.json").read_text())["env"]["allowed_faults"] == "issues/7837"


def test_the_page_shows_the_table_and_the_pin():
    page = (REPOSITORY / "docs" / "training.md").read_text()
    assert "|---|---|---|---|---|---|\n" + "".join(map(row, KNOWN_BAD)) in page
    pinned = re.search(r"^deepspeed==(.*)$", (REPOSITORY / "requirements.txt").read_text(), flags=re.MULTILINE)
    assert pinned and pinned.group(1) == TESTED


def row(known: KnownBad) -> str:
    """A fault as the page has it."""
    stages = "any" if len(known.stages) == 4 else ", ".join(map(str, known.stages))
    thread = known.thread
    if thread != "no thread":
        thread = f"[{thread}](https://github.com/deepspeedai/DeepSpeed/{thread})"
    return f"| `{known.releases}` | {stages} | {known.precision} | {known.needs} | {thread} | {known.effect} |\n"


# The recipe


def test_compile_and_offload_unless_torch_steps_need_a_compiler(here, refused, monkeypatch):
    monkeypatch.setenv("PATH", str(here / "nothing"))
    monkeypatch.delenv("CXX", raising=False)
    (line,) = refused(compile=True)
    assert line.startswith("--compile needs a C++ compiler, and none was found")
    recipe = copy.deepcopy(RECIPE) | {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    write_recipe(here / "recipe.json", recipe)
    (line,) = refused(run_type="optimized")
    assert "finds no C++ compiler: install one" in line
    recipe["optimizer"]["params"]["torch_adam"] = True
    write_recipe(here / "recipe.json", recipe)
    assert resolved(here, run_type="optimized").recipe.optimizer.torch_adam


# The flags


NO_PATH = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": 5}}


@pytest.mark.parametrize(
    ("ranks", "changes", "flags"),
    [
        (16, {"tensor_parallel": {"autotp_size": "2"}}, {"num_heads": 4}),
        (16, {"tensor_parallel": {"autotp_siz": 2}}, {"num_heads": 4}),
        (1, {"zero_optimization": NO_PATH, "aio": {"block_size": 4096}}, {}),
    ],
)
def test_what_follows_from_a_mistake_in_the_recipe_is_not_reported(here, refused, monkeypatch, ranks, changes, flags):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}.items():
        monkeypatch.setenv(name, value)
    pretend(monkeypatch, direct_io_problem="has no O_DIRECT")
    write_recipe(here / "recipe.json", RECIPE, **changes)
    (line,) = refused(run_type="optimized", **flags)
    assert line.startswith(f"recipe.json: {next(iter(changes))}")


# Trackers


def test_trackers_that_are_not_installed_are_reported_with_everything_else(here, refused, monkeypatch, snapshot):
    for package in ("wandb", "sqlalchemy", "alembic"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    assert refused(track="wandb,csv,mlflow", micro_batch_size_per_gpu=3) == snapshot


def test_a_folder_of_the_name_of_a_package_is_no_package(here, refused, monkeypatch):
    """Such as the folder ``wandb`` that Weights & Biases makes where a program runs."""
    (here / "leftovers").mkdir()
    monkeypatch.syspath_prepend(here)
    monkeypatch.setitem(trackers.PACKAGES, "csv", ("leftovers",))
    assert "needs leftovers, not installed here" in refused(track="csv")[0]


# Unusable token files are refused before a model is built and before anything is written.


@pytest.mark.parametrize("workers", [0, 1])
def test_ids_that_contradict_the_sidecar_are_found_while_reading(here, capsys, workers):
    ids = random_ids(TOKENS)
    ids[-2] = 257
    write_tokens(here / "train.bin", ids)
    assert train(command_line(here, max_train_steps=5, num_workers=workers)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert lines == [f"error: {here}/train.bin: holds id 257, but the model's vocabulary ends at 256"]
    assert json.loads((here / "run" / "training_metrics.json").read_text())["status"] == "failed"
    assert not (here / "run" / "RUN_COMPLETE.txt").exists()
