"""``--mask_documents``: a window trains as its documents alone would, and no strategy trains anything else."""

import itertools
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from small_run import END_OF_TEXT, VOCABULARY, command_line, random_ids, without_paths, write_data, write_recipe
from training_runs import (
    assert_same_training,
    errors,
    finished,
    read_lines,
    read_record,
    resolved,
    train,
    write_optimizer_recipe,
)

from dsgpt.benchmarks import stand_in_gpu
from dsgpt.benchmarks.cells import Corpus
from dsgpt.common.errors import UserError
from dsgpt.config.compatibility import ALLOW_MASKS
from dsgpt.model import gpt2
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2, initialize
from dsgpt.training.command import train as train_here

CONFIG = GPT2Config(n_layer=2, n_head=2, n_embd=16, block_size=24, vocab_size=VOCABULARY)
T = CONFIG.block_size


def model_with(end_of_text: int | None, **options: bool) -> GPT2:
    model = GPT2(CONFIG, **options)
    model.end_of_text = end_of_text
    initialize(model, config=CONFIG, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
    return model


def batch_of(*ends: list[int]) -> torch.Tensor:
    """A row of T + 1 ids for each list of places of end-of-text ids."""
    rows = random_ids(len(ends) * (T + 1)).reshape(len(ends), T + 1)
    for row, places in zip(rows, ends, strict=True):
        row[places] = END_OF_TEXT
    return torch.from_numpy(rows)


BATCH = batch_of([4, 5, 17], [], [0, T - 1, T], [9])


def alone(model: GPT2, ids: torch.Tensor) -> torch.Tensor:
    """The mean loss over all targets, from each document of each row by itself, as a sequence from position 0."""
    losses = []
    for row in ids:
        for first, end in itertools.pairwise([0, *(place for place in range(1, T) if row[place] == END_OF_TEXT), T]):
            losses.append(F.cross_entropy(model(row[None, first:end])[0], row[first + 1 : end + 1], reduction="sum"))
    return torch.stack(losses).sum() / ids[:, 1:].numel()


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": True}])
def test_loss_and_gradients_are_those_of_each_document_alone(options):
    masked, plain = model_with(END_OF_TEXT, **options), model_with(None)
    loss, expected = masked(BATCH[:, :-1], BATCH[:, 1:]), alone(plain, BATCH)
    loss.backward()
    expected.backward()
    loss, expected = loss.detach(), expected.detach()
    assert abs(float(loss - expected)) <= 1e-6
    assert abs(model_with(None)(BATCH[:, :-1], BATCH[:, 1:]).item() - expected) > 1e-3, "the masks matter"
    for one, two in zip(masked.parameters(), plain.parameters(), strict=True):
        assert float((one.grad - two.grad).norm()) <= 1e-6 * max(1.0, float(two.grad.norm()))


def test_the_kernel_of_a_gpu_gets_the_same_documents(monkeypatch):
    """PyTorch's varlen attention, here computed by its definition: every document by itself, causal."""

    def by_definition(q, k, v, bounds, bounds_k, longest, longest_k, *, window_size):
        assert (bounds is bounds_k, bounds.dtype, longest, longest_k) == (True, torch.int32, T, T)
        assert window_size == (-1, 0)  # causal
        assert int(bounds[-1]) == len(q)
        places = [slice(*ends) for ends in itertools.pairwise(bounds.tolist())]
        return torch.cat([gpt2._attend(q[place], k[place], v[place], 0.0) for place in places])

    losses = []
    for on_gpu in (False, True):
        with monkeypatch.context() as patch:
            if on_gpu:
                patch.setattr("torch.nn.attention.varlen.varlen_attn", by_definition)
                patch.setattr(torch.Tensor, "is_cuda", True)
            made = gpt2.Documents(BATCH[:, :-1], END_OF_TEXT)
            parts = [torch.randn(4, 2, T, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)]
            losses.append(made.attend(*parts, 0.0))
    assert torch.equal(*losses)


# Runs.

MASKED = ("--mask_documents", "--max_train_steps", "3", "--no_inference")


@pytest.fixture(scope="module")
def baseline(short_documents: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masked")
    finished(train(folder / "run", short_documents, write_optimizer_recipe(folder / "recipe.json"), *MASKED))
    return folder / "run"


@pytest.mark.parametrize(
    ("run_type", "stage", "more"),
    [("fsdp", 1, {}), ("optimized", 3, {}), ("optimized", 1, {"tensor_parallel": {"autotp_size": 2}})],
    ids=["fsdp", "zero3", "tensor"],
)
def test_two_ranks_train_what_one_does(baseline, short_documents, tmp_path, run_type, stage, more):
    recipe = write_optimizer_recipe(tmp_path / "recipe.json", stage=stage, **more)
    finished(train(tmp_path / "run", short_documents, recipe, *MASKED, ranks=2, run_type=run_type))
    assert_same_training(baseline, tmp_path / "run", loss=1e-5, norm=1e-4)


def test_the_record_says_it_and_counts_less_attention(baseline, short_documents, tmp_path):
    recipe, unmasked = write_optimizer_recipe(tmp_path / "recipe.json"), [word for word in MASKED if "mask" not in word]
    finished(train(tmp_path / "run", short_documents, recipe, *unmasked))
    assert read_lines(tmp_path / "run")[0]["loss"] != read_lines(baseline)[0]["loss"]
    record = read_record(baseline)
    config, model = record["training_config"], record["training_config"]["model"]
    assert config["mask_documents"]
    assert 8 < config["attended_length"] < 24 < config["seq_len"] == 32
    whole = GPT2Config(**model).flops_per_token(config["seq_len"])
    less = 12 * model["n_layer"] * model["n_embd"] * (config["seq_len"] - config["attended_length"])
    assert record["summary"]["flops_per_token"] == pytest.approx(whole - less, abs=1)


def test_a_resume_keeps_the_masks(here, capsys):
    """And the id that ends documents, which the hash of the data does not cover."""
    assert train_here(command_line(here)) == 0
    masked = {"mask_documents": True, "checkpoint_path": here / "masked"}
    assert train_here(command_line(here, **masked)) == 0
    for run in ("run", "masked"):
        (here / run / "RUN_COMPLETE.txt").unlink()
    assert train_here(command_line(here, resume=True, mask_documents=True)) == 2
    assert "--resume: end of masked documents is 256 but the checkpoint" in errors(capsys)[0]
    for path in (here / "train.json", here / "val.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eot_id": 7}))
    assert train_here(command_line(here, **masked, resume=True)) == 2
    assert "--resume: end of masked documents is 7 but the checkpoint" in errors(capsys)[0]


CASES = {
    "sequence": {"ranks": 2, "recipe": {"sequence_parallel_size": 2}},
    "pipeline": {"ranks": 2, "recipe": {"pipeline": {"stages": 2}}},
    "tensor": {"ranks": 2, "recipe": {"tensor_parallel": {"autotp_size": 2}}, "dropout": 0.1},
    "compile": {"compile": True},
    "no id": {"sidecar": {"eot_id": None}},
    "another id": {"sidecar": {"eot_id": 7}},
    "no such id": {"sidecar": {"eot_id": 257}},
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_mask_says_so(tmp_path, case, snapshot):
    changes = dict(CASES[case])
    write_recipe(write_data(tmp_path) / "recipe.json", **changes.pop("recipe", {}))
    sidecar = tmp_path / "val.json"
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | changes.pop("sidecar", {})))
    ranks = changes.pop("ranks", 1)
    words = command_line(tmp_path, mask_documents=True, run_type="optimized", **changes)
    with pytest.raises(UserError) as caught:
        resolved(words, ranks=ranks)
    assert [without_paths(line, tmp_path) for line in caught.value.problems] == snapshot


def test_a_gpu_masks_only_if_it_is_allowed(here, monkeypatch, snapshot):
    """Until a GPU has shown the losses of a CPU."""
    words = command_line(here, mask_documents=True, device="cuda")
    with stand_in_gpu.stand_in_gpu():
        with pytest.raises(UserError) as caught:
            resolved([*words, "--precision", "fp32"])
        monkeypatch.setenv(ALLOW_MASKS, "1")
        assert resolved([*words, "--precision", "bf16"]).end_of_text == END_OF_TEXT
    assert list(caught.value.problems) == snapshot
