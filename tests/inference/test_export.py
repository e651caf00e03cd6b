"""Exports: for Hugging Face, for this program, for DeepSpeed, of every strategy."""

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
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from forked_ranks import run_script
from harmful_tokenizers import seal
from published import RunsCode, called, config_of, converted, largest_difference, our_model, publish, refusal
from safetensors.torch import load_file
from small_run import REPOSITORY, SEQUENCE, VOCABULARY, command_line, write_inputs, write_recipe
from torch import Tensor
from training_runs import SCRIPT, damage, finished, moments_of, weights_of
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dsgpt.formats.hugging_face import PretrainedWeights
from dsgpt.inference.commands import generate
from dsgpt.inference.model_files import LAYOUT_VERSION
from dsgpt.model.gpt2 import GPT2, parameter_shapes
from dsgpt.training.command import train

# `src/convert.py` exports the weights of real runs for other tools, or refuses with the reason.


LAST = "step-00000003"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A baseline of three steps, each kept, on data with a tokenizer; tests only read it."""
    folder = write_inputs(tmp_path_factory.mktemp("run"))
    assert train(command_line(folder, save_every=1, keep_checkpoints=9, max_train_steps=3, eval_every=1)) == 0
    return folder / "run"


def test_a_run_becomes_a_model_of_transformers(run_dir, tmp_path):
    out = tmp_path / "new" / "hf"
    assert "step-00000003 (baseline, step 3)" in converted("--from", run_dir, "--to", "hf", out)
    checkpoint = run_dir / LAST
    config = config_of(checkpoint)
    theirs = AutoModelForCausalLM.from_pretrained(out)
    assert largest_difference(our_model(load_file(checkpoint / "model.safetensors"), config), theirs) < 1e-5
    assert theirs.dtype == torch.float32
    assert theirs.get_input_embeddings().weight.shape[0] == config.vocab_size != config.padded_vocab_size
    assert theirs.lm_head.weight is theirs.transformer.wte.weight
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer.encode("def é 日")) == "def é 日"
    assert tokenizer.model_max_length == config.block_size
    assert tokenizer.eos_token_id == theirs.config.eos_token_id == GenerationConfig.from_pretrained(out).eos_token_id
    assert {path.name for path in out.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    }
    (tmp_path / "any").mkdir()
    assert out.stat().st_mode == (tmp_path / "any").stat().st_mode
    converted("--from", run_dir, "--to", "hf", "--dtype", "bf16", tmp_path / "any")  # an empty folder is used
    theirs, whole = AutoModelForCausalLM.from_pretrained(tmp_path / "any"), weights_of(checkpoint)
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(theirs.transformer.h[1].mlp.c_fc.weight, whole["blocks.1.mlp.fc.weight"].t().bfloat16())


def test_export_and_import_is_the_identity(run_dir, tmp_path):
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    converted("--from", run_dir, "--to", "hf", one)
    converted("--from", one, "--to", "portable", two)
    converted("--from", two, "--to", "hf", three)
    assert {path.name for path in one.iterdir()} == {path.name for path in three.iterdir()}
    for path in one.iterdir():
        assert path.read_bytes() == (three / path.name).read_bytes(), path.name
    back, saved = (load_file(folder / "model.safetensors") for folder in (two, run_dir / LAST))
    assert back.keys() == saved.keys() and all(torch.equal(back[name], saved[name]) for name in saved)
    assert (two / "model.json").read_bytes() == (run_dir / LAST / "model.json").read_bytes()
    converted("--from", run_dir / "step-00000002", "--to", "portable", tmp_path / "portable")
    manifest = json.loads((tmp_path / "portable" / "manifest.json").read_text())
    assert (manifest["portable"], manifest["step"], manifest["strategy"]) == ("weights", 2, "baseline")


def test_a_run_without_a_tokenizer(checkpoint, tmp_path, snapshot):
    shutil.rmtree(checkpoint / "tokenizer")
    seal(checkpoint)
    *_, last = converted("--from", checkpoint, "--to", "hf", tmp_path / "hf").splitlines()
    assert last == snapshot
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").config.eos_token_id is None
    _, _, err = called(generate, "--checkpoint", checkpoint, "--device", "cpu")
    assert err.startswith(f"error: {checkpoint}: has no tokenizer, because its training data had none: cannot")


def test_it_needs_neither_transformers_nor_deepspeed(run_dir, tmp_path):
    code = "import sys; from dsgpt.inference.commands import convert\n"
    code += "for form in ('hf', 'deepspeed'): convert(['--from', sys.argv[1], '--to', form, sys.argv[2] + form])\n"
    code += "print(*sys.modules)"
    command = [sys.executable, "-c", code, run_dir, tmp_path / "as-"]
    imported = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1].split()
    assert "torch" in imported
    assert not {"transformers", "huggingface_hub", "deepspeed"} & set(imported)


@pytest.mark.parametrize(("form", "limit"), [("hf", 9000), ("deepspeed", 100_000)])
def test_a_failed_write_leaves_nothing(run_dir, tmp_path, form, limit):
    """A limit of the system on the size of a file stands for a full disk: writing fails in the middle.

    Of DeepSpeed's two files it is the second one that is too large.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        lines = refusal("--from", run_dir, "--to", form, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert lines == [f"{tmp_path}/out: could not be written (File too large)"]
    assert list(tmp_path.iterdir()) == []


def test_damage_is_found_in_what_is_read(run_dir, tmp_path):
    copy = shutil.copytree(run_dir / LAST, tmp_path / LAST)
    for form, name in (
        *(("deepspeed", name) for name in ("optimizer.safetensors", "training_state.json", "model.safetensors")),
        *(("hf", name) for name in ("model.safetensors", "model.json", "tokenizer/tokenizer.json")),
    ):
        damage(copy / name)
        (line,) = refusal("--from", copy, "--to", form, tmp_path / "out")
        assert line.startswith(f"{copy}/{name}: is damaged")
        assert not (tmp_path / "out").exists()
        damage(copy / name)  # flips the bit back
    (copy / "optimizer.safetensors").unlink()
    converted("--from", copy, "--to", "hf", tmp_path / "out")  # what only a resume needs may be missing


def test_values_that_a_dtype_cannot_hold(tmp_path, snapshot):
    model = publish(tmp_path / "hf", vocab_size=60)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight[0, 0] = 1e6
    model.save_pretrained(tmp_path / "hf")
    assert "to" in converted("--from", tmp_path / "hf", "--to", "hf", "--dtype", "bf16", tmp_path / "bf16")
    assert refusal("--from", tmp_path / "hf", "--to", "hf", "--dtype", "fp16", tmp_path / "fp16") == snapshot
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "bf16"}


# Weights into and out of strategies that split them, and what their checkpoints may not do.


STAGE_3 = {"stage": 3, "stage3_param_persistence_threshold": 0}
WAYS = {"zero3": {"run_type": "optimized", "precision": "bf16"}, "fsdp": {"run_type": "fsdp"}}


@pytest.fixture(scope="module")
def folder(run_dir: Path) -> Path:
    """``baseline``, and runs of two ranks that train the model in ``hf`` on, three steps each; only read."""
    folder = run_dir.parent
    (folder / "baseline").symlink_to(run_dir)
    publish(folder / "hf", vocab_size=VOCABULARY)
    shape = ("num_layers", "num_heads", "embedding_size", "max_position_embeddings")
    recipe = write_recipe(folder / "zero3.json", zero_optimization=STAGE_3)
    start = dict.fromkeys(shape) | {"init_from": folder / "hf", "seq_length": SEQUENCE, "deepspeed_config": recipe}
    for run, way in WAYS.items():
        changes = {"checkpoint_path": folder / run, "max_train_steps": 3, "save_every": 1, "keep_checkpoints": 9}
        finished(run_script(SCRIPT, command_line(folder, **start, **changes, **way), ranks=2, cwd=folder))
    for run in ("baseline", "zero3"):
        converted("--from", folder / run, "--to", "deepspeed", folder / f"as-deepspeed-{run}")
    return folder


@pytest.mark.parametrize("layout", WAYS)
def test_each_starts_from_the_published_weights_and_is_exported(folder, layout, tmp_path):
    """The schedule's first steps have learning rate 0: after one, the weights are still those of the source."""
    config = config_of(folder / layout / LAST)
    source = PretrainedWeights(folder / "hf", config)
    saved = weights_of(folder / layout / "step-00000001")
    for name, shape in parameter_shapes(config).items():
        expected = source(name, shape)
        if layout == "zero3":  # in bf16 DeepSpeed makes its master weights from rounded ones
            expected = expected.bfloat16().float()
        assert torch.equal(saved[name], expected), name
    last = weights_of(folder / layout / LAST)
    assert not torch.equal(last["wte.weight"], saved["wte.weight"])
    converted("--from", folder / layout, "--to", "hf", tmp_path / "hf")
    assert largest_difference(our_model(last, config), AutoModelForCausalLM.from_pretrained(tmp_path / "hf")) < 1e-5


def test_a_forged_checkpoint_runs_no_code(run_dir, tmp_path, capsys):
    """Every hash of the manifest is right, as a forger would see to; a tensor file that is a pickle is none."""
    folder = write_inputs(tmp_path)
    shutil.copytree(run_dir, folder / "run")
    for path in (folder / "run" / LAST).glob("*.safetensors"):
        torch.save({"more": RunsCode(tmp_path / "ran")}, path)
    seal(folder / "run" / LAST)
    (folder / "run" / "RUN_COMPLETE.txt").unlink()
    again = {"save_every": 1, "keep_checkpoints": 9, "max_train_steps": 3, "eval_every": 1, "resume": True}
    assert train(command_line(folder, **again)) == 0
    said = capsys.readouterr().out
    assert "--resume: step-00000003 is refused: " in said
    assert "is not a readable safetensors file" in said
    assert not (tmp_path / "ran").exists()


# `convert.py --to deepspeed`: DeepSpeed's own tools take up what was saved under a baseline and under ZeRO.


SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


def by_deepspeed(tool: str, *words: object) -> None:
    """One of DeepSpeed's scripts, as ``python -m`` starts it."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("DS_", "OMP_"))}
    finished(run_script(tool, words, environment=environment))


def assert_same(found: dict[str, Tensor], checkpoint: Path) -> None:
    """Bit for bit the weights of ``checkpoint``, and the output head that is one of them."""
    saved = weights_of(checkpoint)
    assert found.keys() == saved.keys() | {"lm_head.weight"}
    for name, value in (saved | {"lm_head.weight": saved["wte.weight"]}).items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], value), name


def optimizer_states(out: Path) -> dict:
    (path,) = out.glob("global_step*/*_optim_states.pt")
    return torch.load(path, weights_only=False)["optimizer_state_dict"]


def test_the_layout_is_that_of_the_deepspeed_installed():
    assert deepspeed.__version__ == LAYOUT_VERSION


def test_zero_to_fp32_gives_the_weights_and_the_model_takes_them(folder, tmp_path):
    out = folder / "as-deepspeed-zero3"
    by_deepspeed("deepspeed.utils.zero_to_fp32", out, tmp_path, "--safe_serialization")
    assert_same(load_file(tmp_path / "model.safetensors"), folder / "zero3" / LAST)
    for run in ("baseline", "zero3"):
        out = folder / f"as-deepspeed-{run}"
        whole = torch.load(out / "global_step3" / "mp_rank_00_model_states.pt", weights_only=True)
        for weights in (get_fp32_state_dict_from_zero_checkpoint(out), whole["module"]):
            assert_same(weights, folder / run / LAST)
            GPT2(config_of(out)).load_state_dict(weights)


def test_the_universal_conversion_gives_the_moments(folder, tmp_path):
    page = (REPOSITORY / "docs" / "exporting.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = [line for line in page.splitlines() if "python -m deepspeed.checkpoint.ds_to_universal" in line]
    tool, *words = shlex.split(line.split(" -m ")[1], comments=True)
    places = {"exported/demo-ds/global_step800": f"{folder}/as-deepspeed-zero3/global_step3"}
    places |= {"exported/demo-universal": str(tmp_path)}
    assert places.keys() <= set(words)
    words = [places.get(word, word) for word in words]
    by_deepspeed(tool, *words, "--num_extract_workers", 1, "--num_merge_workers", 1)
    moments = moments_of(folder / "zero3" / LAST)
    assert moments["wte.weight.exp_avg"].abs().max() > 0
    for name, value in moments.items():
        parameter, _, moment = name.rpartition(".")
        found = torch.load(tmp_path / "zero" / parameter / f"{moment}.pt", weights_only=False)["param"]
        assert torch.equal(found, value), name
    counters = json.loads((folder / "zero3" / LAST / "training_state.json").read_text())
    assert torch.load(tmp_path / "zero" / "ln_f.bias" / "step.pt", weights_only=False) == counters["optimizer_steps"]


def test_what_else_is_there(folder):
    out = folder / "as-deepspeed-baseline"
    assert {path.name for path in out.iterdir()} == {"latest", "global_step3", "model.json", "tokenizer"}
    names = {"mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"}
    assert {path.name for path in (out / "global_step3").iterdir()} == names
    (path,) = out.glob("global_step3/zero_*")
    assert torch.serialization.get_unsafe_globals_in_checkpoint(path) == ["types.SimpleNamespace"]


def test_sgd_has_its_own_moment_and_does_not_count(folder, tmp_path):
    recipe = write_recipe(tmp_path / "sgd.json", optimizer=SGD)
    words = command_line(folder, checkpoint_path=tmp_path / "sgd", deepspeed_config=recipe, max_train_steps=3)
    assert train(words) == 0
    converted("--from", tmp_path / "sgd", "--to", "deepspeed", tmp_path / "out")
    states = optimizer_states(tmp_path / "out")["base_optimizer_state"]["state"].values()
    assert [state.keys() for state in states] == [{"momentum_buffer"}] * 2
    momentum = load_file(tmp_path / "sgd" / LAST / "optimizer.safetensors")
    flat = torch.cat([state["momentum_buffer"] for state in states])
    assert sorted(flat.tolist()) == sorted(torch.cat([each.flatten() for each in momentum.values()]).tolist())


def test_weights_alone_have_no_moments(folder, tmp_path):
    converted("--from", folder / "baseline", "--to", "portable", tmp_path / "portable")
    converted("--from", tmp_path / "portable", "--to", "deepspeed", tmp_path / "out")
    assert_same(get_fp32_state_dict_from_zero_checkpoint(tmp_path / "out"), folder / "baseline" / LAST)
    assert optimizer_states(tmp_path / "out")["base_optimizer_state"]["state"] == {}
