"""``convert.py --to deepspeed``: DeepSpeed's own tools take up what was saved under a baseline and under ZeRO."""

import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import deepspeed
import pytest
import torch
from convert_script import SCRIPT, config_of, converted, damage, refusal
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from forked_ranks import run_script
from messages import without_paths
from safetensors.torch import load_file
from small_run import REPOSITORY, command_line, write_inputs, write_recipe
from torch import Tensor
from training_runs import finished

from dsgpt.inference.export import LAYOUT_VERSION
from dsgpt.model.gpt2 import GPT2
from dsgpt.training.command import train

STEP = "step-00000003"
STAGE_3 = {"stage": 3, "stage3_param_persistence_threshold": 0}
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``baseline`` and ``zero3``, three steps each, the latter on two ranks, and each ``as-deepspeed-``; only read."""
    folder = write_inputs(tmp_path_factory.mktemp("runs"))
    assert train(command_line(folder, checkpoint_path=folder / "baseline", max_train_steps=3)) == 0
    stage_3 = write_recipe(folder / "zero3.json", zero_optimization=STAGE_3)
    words = command_line(
        folder,
        run_type="optimized",
        checkpoint_path=folder / "zero3",
        deepspeed_config=stage_3,
        max_train_steps=3,
        precision="bf16",
    )
    finished(run_script(REPOSITORY / "src" / "gpt2.py", words, ranks=2, cwd=folder))
    for run in ("baseline", "zero3"):
        converted("--from", folder / run, "--to", "deepspeed", folder / f"as-deepspeed-{run}")
    return folder


def by_deepspeed(tool: str, *words: object) -> None:
    """One of DeepSpeed's scripts, as a user starts it."""
    command = [sys.executable, "-m", tool, *map(str, words)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("DS_", "OMP_"))}
    finished(subprocess.run(command, capture_output=True, text=True, check=False, env=environment))


def page_flags(tool: str, places: dict[str, str]) -> list[str]:
    """What the page gives to one of DeepSpeed's scripts, in other ``places``, each of which it must name."""
    text = (REPOSITORY / "docs" / "exporting.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if f"python -m {tool}" in line]
    words = shlex.split(line.split(tool)[1], comments=True)
    assert places.keys() <= set(words)
    return [places.get(word, word) for word in words]


def assert_same(found: dict[str, Tensor], checkpoint: Path) -> None:
    """Bit for bit the weights of ``checkpoint``, and the output head that is one of them."""
    saved = load_file(checkpoint / "model.safetensors")
    assert found.keys() == saved.keys() | {"lm_head.weight"}
    for name, value in (saved | {"lm_head.weight": saved["wte.weight"]}).items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], value), name


def optimizer_states(out: Path) -> dict:
    (path,) = out.glob("global_step*/*_optim_states.pt")
    return torch.load(path, weights_only=False)["optimizer_state_dict"]


def test_the_layout_is_that_of_the_deepspeed_installed():
    assert deepspeed.__version__ == LAYOUT_VERSION


@pytest.mark.parametrize(
    ("run", "form", "file"),
    [("baseline", [], "pytorch_model.bin"), ("zero3", ["--safe_serialization"], "model.safetensors")],
)
def test_zero_to_fp32_gives_the_weights(folder, tmp_path, run, form, file):
    by_deepspeed("deepspeed.utils.zero_to_fp32", folder / f"as-deepspeed-{run}", tmp_path, *form)
    read = load_file if file.endswith(".safetensors") else torch.load
    assert_same(read(tmp_path / file), folder / run / STEP)


@pytest.mark.parametrize("run", ["baseline", "zero3"])
def test_so_does_its_function_and_the_model_takes_them(folder, run):
    out = folder / f"as-deepspeed-{run}"
    weights = get_fp32_state_dict_from_zero_checkpoint(out)
    assert_same(weights, folder / run / STEP)
    model = GPT2(config_of(out))
    model.load_state_dict(weights)
    whole = torch.load(out / "global_step3" / "mp_rank_00_model_states.pt", weights_only=True)
    model.load_state_dict(whole["module"])
    assert_same(whole["module"], folder / run / STEP)


def test_the_universal_conversion_gives_the_moments(folder, tmp_path):
    places = {"exported/demo-ds/global_step200": f"{folder}/as-deepspeed-zero3/global_step3"}
    words = page_flags("deepspeed.checkpoint.ds_to_universal", places | {"exported/demo-universal": str(tmp_path)})
    by_deepspeed("deepspeed.checkpoint.ds_to_universal", *words, "--num_extract_workers", 1, "--num_merge_workers", 1)
    moments = load_file(folder / "zero3" / STEP / "optimizer.safetensors")
    assert moments["wte.weight.exp_avg"].abs().max() > 0
    for name, value in moments.items():
        parameter, _, moment = name.rpartition(".")
        found = torch.load(tmp_path / "zero" / parameter / f"{moment}.pt", weights_only=False)["param"]
        assert torch.equal(found, value), name
    counters = json.loads((folder / "zero3" / STEP / "training_state.json").read_text())
    assert torch.load(tmp_path / "zero" / "ln_f.bias" / "step.pt", weights_only=False) == counters["optimizer_steps"]


def test_what_else_is_there(folder):
    out = folder / "as-deepspeed-baseline"
    assert (out / "latest").read_text() == "global_step3"
    assert {path.name for path in out.iterdir()} == {"latest", "global_step3", "model.json", "tokenizer"}
    assert (out / "model.json").read_bytes() == (folder / "baseline" / STEP / "model.json").read_bytes()
    names = {"mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"}
    assert {path.name for path in (out / "global_step3").iterdir()} == names
    (path,) = out.glob("global_step3/zero_*")
    assert torch.serialization.get_unsafe_globals_in_checkpoint(path) == ["types.SimpleNamespace"]


def test_sgd_has_its_own_moment_and_does_not_count(folder, tmp_path):
    recipe = write_recipe(tmp_path / "sgd.json", optimizer=SGD)
    words = command_line(folder, checkpoint_path=tmp_path / "sgd", deepspeed_config=recipe, max_train_steps=3)
    assert train(words) == 0
    converted("--from", tmp_path / "sgd", "--to", "deepspeed", tmp_path / "out")
    assert_same(get_fp32_state_dict_from_zero_checkpoint(tmp_path / "out"), tmp_path / "sgd" / STEP)
    momentum = load_file(tmp_path / "sgd" / STEP / "optimizer.safetensors")
    states = optimizer_states(tmp_path / "out")
    for number, slices in enumerate(states["param_slice_mappings"]):
        state = states["base_optimizer_state"]["state"][number]
        assert state.keys() == {"momentum_buffer"}
        for name, place in slices.items():
            found = state["momentum_buffer"][place.start : place.start + place.numel]
            assert torch.equal(found, momentum[f"{name}.momentum_buffer"].flatten()), name


def test_weights_alone_have_no_moments(folder, tmp_path):
    converted("--from", folder / "baseline", "--to", "portable", tmp_path / "portable")
    converted("--from", tmp_path / "portable", "--to", "deepspeed", tmp_path / "out")
    assert_same(get_fp32_state_dict_from_zero_checkpoint(tmp_path / "out"), folder / "baseline" / STEP)
    assert optimizer_states(tmp_path / "out")["base_optimizer_state"]["state"] == {}


def test_other_precisions_are_refused(tmp_path, snapshot):
    lines = refusal("--from", tmp_path, "--to", "deepspeed", "--dtype", "bf16", tmp_path / "out")
    assert [without_paths(line, tmp_path) for line in lines] == snapshot
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["optimizer.safetensors", "training_state.json", "model.safetensors"])
def test_damage_is_found(folder, tmp_path, name):
    copy = tmp_path / STEP
    shutil.copytree(folder / "baseline" / STEP, copy)
    damage(copy / name)
    (line,) = refusal("--from", copy, "--to", "deepspeed", tmp_path / "out")
    assert line.startswith(f"{copy}/{name}: is damaged")
    assert not (tmp_path / "out").exists()


def test_a_failed_write_leaves_nothing_and_deepspeed_is_not_needed(folder, tmp_path):
    """A limit of the system on the size of a file stands for a full disk: the second of the two files is larger."""
    command = [sys.executable, "-X", "importtime", SCRIPT, "--from", folder / "baseline", "--to", "deepspeed"]
    done = subprocess.run(
        [*command, tmp_path / "out"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
    assert done.returncode == 2
    assert f"error: {tmp_path}/out: could not be written (File too large)\n" in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert " torch\n" in done.stderr
    assert " deepspeed\n" not in done.stderr
