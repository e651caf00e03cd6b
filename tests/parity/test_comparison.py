"""Each fact has its bound, and what is just outside of it is reported, with step or parameter and both values."""

import copy

import pytest
import torch

from dsgpt.data.loader import Batch
from dsgpt.parity.comparison import BOUNDS, compare
from dsgpt.parity.first_gradient import full_gradient
from dsgpt.parity.measurement import Measurement, WatchedBatches, read_rank

NAMES = ("wte.weight", "blocks.0.ln_1.bias")
STEPS = 3


def weight(name: str) -> torch.Tensor:
    return torch.arange(1, 7, dtype=torch.float32).view(2, 3) / (1 + NAMES.index(name))


@pytest.fixture
def training(tmp_path):
    """The files of a training of two ranks, which read different samples, and of its reference."""

    def write(name, *, data_rank, rank, samples, tensors):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        measurement = Measurement(data_rank=data_rank, strategy=name)
        for step in range(STEPS):
            measurement.step(
                loss=5.0 - step, grad_norm=2.0, lr=0.1 * step, skipped=False, samples=[f"{step}{s}" for s in samples]
            )
        for parameter in NAMES:
            measurement.replica(parameter, weight(parameter))
            if tensors:
                measurement.gradient(parameter, weight(parameter))
                measurement.weight(parameter, weight(parameter))
        measurement.write(folder, rank=rank)
        return read_rank(folder, rank)

    reference = write("reference", data_rank=0, rank=0, samples="abcd", tensors=True)
    ranks = [
        write("cell", data_rank=0, rank=0, samples="ca", tensors=True),
        write("cell", data_rank=1, rank=1, samples="bd", tensors=False),
    ]
    return tmp_path, reference, ranks


def found(training, *, precision="fp32", replicas="all"):
    folder, reference, ranks = training
    comparison = compare(
        ranks,
        folder / "cell",
        reference=reference,
        reference_folder=folder / "reference",
        bounds=BOUNDS[precision],
        replicas=replicas,
    )
    return {failure["fact"]: failure for failure in comparison.failures}


def test_equal_trainings_pass(training):
    assert found(training) == {}
    assert found(training, precision="bf16") == {}


@pytest.mark.parametrize(
    ("precision", "loss", "norm"), [("fp32", 2e-4, 1e-4), ("bf16", 3e-3, 2e-2)], ids=["fp32", "bf16"]
)
def test_bounds_of_numbers(training, precision, loss, norm):
    _, _, ranks = training
    for key, fact, size in (("loss", "loss", loss), ("grad_norm", "gradient norm", 2.0 * norm)):
        for factor, caught in ((0.99, False), (1.01, True)):
            changed = copy.deepcopy(ranks)
            for rank in changed:
                rank["steps"][1][key] -= size * factor
            failures = found((training[0], training[1], changed), precision=precision)
            assert failures.keys() == ({fact} if caught else set())
    assert failures["gradient norm"]["where"] == "step 2"
    assert failures["gradient norm"]["expected"] == 2.0
    assert failures["gradient norm"]["actual"] == changed[0]["steps"][1]["grad_norm"]


def test_a_loss_that_is_not_finite(training):
    for rank in training[2]:
        rank["steps"][2]["loss"] = None
    assert found(training)["loss"]["where"] == "step 3"


@pytest.mark.parametrize(("key", "fact"), [("lr", "learning rate"), ("skipped", "skipped")])
def test_what_must_be_equal(training, key, fact):
    for rank in training[2]:
        rank["steps"][1][key] = rank["steps"][1][key] + 1e-9 if key == "lr" else True
    assert found(training)[fact]["where"] == "step 2"


def test_a_step_too_few(training):
    for rank in training[2]:
        rank["steps"].pop()
    assert found(training)["steps"]["actual"] == STEPS - 1


@pytest.mark.parametrize(
    ("samples", "where"),
    [
        (["1b", "1b"], "step 2"),
        (["1b"], "step 2"),
        (["0b", "0d"], "step 2"),
    ],
    ids=["one twice", "one too few", "another step's"],
)
def test_samples(training, samples, where):
    training[2][1]["steps"][1]["samples"] = samples
    assert found(training)["samples"]["where"] == where


def test_peers_of_a_data_rank_take_the_same_samples_or_none(training):
    folder, reference, ranks = training
    both = [*ranks, copy.deepcopy(ranks[1])]
    assert found((folder, reference, both)) == {}
    both[2]["steps"][0]["samples"] = []
    assert found((folder, reference, both)) == {}
    both[2]["steps"][0]["samples"] = ["0a", "0c"]
    assert found((folder, reference, both))["samples"]["where"] == "step 1, rank 2 beside rank 1 of data rank 1"


def test_ranks_that_report_different_numbers(training):
    training[2][1]["steps"][0]["loss"] += 1e-6
    assert found(training)["reports of all ranks"]["where"] == "step 1, loss of rank 1"


@pytest.mark.parametrize(("kind", "fact", "bound"), [("gradient", "first gradient", 1e-5), ("weight", "weights", 1e-3)])
def test_bounds_of_tensors(training, kind, fact, bound):
    folder, _, _ = training
    for factor, caught in ((0.9, False), (1.1, True)):
        measurement = Measurement(data_rank=0, strategy="cell")
        for name in NAMES:
            for taken in ("gradient", "weight"):
                off = bound * factor if (taken, name) == (kind, NAMES[1]) else 0.0
                getattr(measurement, taken)(name, weight(name) * (1 + off))
        measurement.write(folder / "cell", rank=9)
        failures = found(training)
        assert failures.keys() == ({fact} if caught else set())
    assert failures[fact]["where"] == NAMES[1]
    assert failures[fact]["difference"] == pytest.approx(bound * 1.1, rel=1e-2)


@pytest.mark.parametrize(
    ("name", "off", "caught"),
    [(NAMES[0], 1.6e-2, True), (NAMES[0], 1.4e-2, False), (NAMES[1], 1.6e-1, True), (NAMES[1], 1.4e-1, False)],
)
def test_in_bf16_only_layer_norms_have_a_wide_bound(training, name, off, caught):
    measurement = Measurement(data_rank=0, strategy="cell")
    for each in NAMES:
        measurement.gradient(each, weight(each) * (1 + off * (each == name)))
        measurement.weight(each, weight(each))
    measurement.write(training[0] / "cell", rank=9)
    assert found(training, precision="bf16").keys() == ({"first gradient"} if caught else set())


@pytest.mark.parametrize("change", ["missing", "reshaped"])
def test_parameters_that_are_not_there_or_not_whole(training, change):
    measurement = Measurement(data_rank=0, strategy="cell")
    for name in NAMES:
        measurement.gradient(name, weight(name))
    measurement.weight(NAMES[0], weight(NAMES[0]) if change == "missing" else weight(NAMES[0])[:1])
    if change == "reshaped":
        measurement.weight(NAMES[1], weight(NAMES[1]))
    measurement.write(training[0] / "cell", rank=9)
    assert "weights" in found(training)


def test_replicas_differ_in_one_bit(training):
    measurement = Measurement(data_rank=1, strategy="cell")
    for name in NAMES:
        measurement.replica(name, weight(name) + (1e-6 if name == NAMES[1] else 0.0))
    training[2][1]["replicas"] = {name: list(value) for name, value in measurement._replicas.items()}
    assert found(training)["replicated weights"]["where"] == f"{NAMES[1]} of rank 1 beside rank 0"


def test_a_rank_that_holds_less_than_it_should(training):
    training[2][1]["replicas"].pop(NAMES[0])
    assert "replicated weights" in found(training)
    assert found(training, replicas="some") == {}
    training[2][1]["replicas"].clear()
    assert "replicated weights" in found(training, replicas="some")
    assert found(training, replicas="none") == {}


def test_full_gradient_undoes_adam_and_clipping():
    """Against torch's own clipping and AdamW, with the clipping active and not."""
    for clipping in (0.5, 100.0, 0.0):
        parameter = torch.nn.Parameter(torch.zeros(4))
        gradient = torch.tensor([1.0, -2.0, 3.0, 0.5])
        parameter.grad = gradient.clone()
        norm = torch.linalg.vector_norm(gradient)
        if clipping:
            torch.nn.utils.clip_grad_norm_([parameter], clipping)
        optimizer = torch.optim.AdamW([parameter], betas=(0.9, 0.95))
        optimizer.step()
        moment = optimizer.state[parameter]["exp_avg"]
        whole = full_gradient(moment, beta1=0.9, grad_norm=float(norm), clipping=clipping)
        torch.testing.assert_close(whole, gradient, rtol=1e-6, atol=0)


def test_watched_batches_tell_inputs_from_targets():
    ids = torch.arange(12).view(2, 6)
    one, two = Batch(ids, ids + 1), Batch(ids, ids + 2)
    watched = WatchedBatches([one, one, two])
    next(watched)
    first = watched.take()
    assert len(set(first)) == 2
    assert watched.take() == []
    next(watched)
    assert watched.take() == first
    next(watched)
    assert not set(watched.take()) & set(first)
