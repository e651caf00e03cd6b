"""Each fact has its bound. A value just outside of it is reported, with step or parameter and both values."""

import copy

import pytest
import torch

from dsgpt.benchmarks.launch import read_rank
from dsgpt.benchmarks.parity_bounds import BF16, BF16_MANY, BF16_PIPELINE, BF16_SPLIT, CPU, CUDA, FP32
from dsgpt.benchmarks.parity_rank import full_gradient
from dsgpt.benchmarks.parity_reference import CHANGED, Measurement, WatchedBatches, compare
from dsgpt.data.loader import Batch

NAMES = ("wpe.weight", "blocks.0.ln_1.bias", "wte.weight", "blocks.0.attn.qkv.bias")
MATRIX, LAYER_NORM, TIED, QKV = NAMES
KINDS = ("gradient", "update", "weight")
STEPS = 3


def weight(name: str) -> torch.Tensor:
    return torch.arange(1, 7, dtype=torch.float32) / (1 + NAMES.index(name))


def take(measurement: Measurement, kind: str, name: str, value: torch.Tensor) -> None:
    """Note one parameter's gradient, or the parameter after its first change or the last step."""
    if kind == "gradient":
        measurement.gradient(name, value)
    else:
        measurement.weight(name, value, **({"after": CHANGED} if kind == "update" else {}))


@pytest.fixture
def training(tmp_path):
    """The files of a training of two ranks, which read different samples, and of its reference."""

    def write(name, *, data_rank, rank, samples, tensors):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        measurement = Measurement(data_rank=data_rank, strategy=name)
        for step in range(STEPS):
            measurement.step(
                loss=5.0 - step,
                grad_norm=2.0,
                lr=0.1 * step,
                used=[0.1 * step],
                skipped=False,
                samples=[f"{step}{s}" for s in samples],
            )
        for after_step, loss in ((0, 5.5), (STEPS, 4.5)):
            measurement.validation(after_step=after_step, loss=loss, targets=17)
        for parameter in NAMES:
            measurement.replica(parameter, weight(parameter))
            if tensors:
                for kind in KINDS:
                    take(measurement, kind, parameter, weight(parameter))
        measurement.write(folder, rank=rank)
        return read_rank(folder, rank)

    reference = write("reference", data_rank=0, rank=0, samples="abcd", tensors=True)
    ranks = [
        write("cell", data_rank=0, rank=0, samples="ca", tensors=True),
        write("cell", data_rank=1, rank=1, samples="bd", tensors=False),
    ]
    return tmp_path, reference, ranks


def found(training, *, bounds=CPU[FP32], replicas="all"):
    folder, reference, ranks = training
    comparison = compare(
        ranks,
        folder / "cell",
        reference=reference,
        reference_folder=folder / "reference",
        bounds=bounds,
        replicas=replicas,
    )
    return {failure["fact"]: failure for failure in comparison.failures}


def test_equal_trainings_pass(training):
    for bounds in (*CPU.values(), *CUDA.values()):
        assert found(training, bounds=bounds) == {}


@pytest.mark.parametrize(("kind", "loss", "norm"), [(FP32, 5e-6, 2e-6), (BF16, 2.4e-3, 1.7e-2)], ids=["fp32", "bf16"])
def test_bounds_of_numbers(training, kind, loss, norm):
    _, _, ranks = training
    for key, fact, size in (("loss", "loss", loss), ("grad_norm", "gradient norm", 2.0 * norm)):
        for factor, caught in ((0.99, False), (1.01, True)):
            changed = copy.deepcopy(ranks)
            for rank in changed:
                rank["steps"][1][key] -= size * factor
            failures = found((training[0], training[1], changed), bounds=CPU[kind])
            assert failures.keys() == ({fact} if caught else set())
    assert failures["gradient norm"]["where"] == "step 2"
    assert failures["gradient norm"]["expected"] == 2.0
    assert failures["gradient norm"]["actual"] == changed[0]["steps"][1]["grad_norm"]


def test_a_loss_that_is_not_finite(training):
    for rank in training[2]:
        rank["steps"][2]["loss"] = None
    assert found(training)["loss"]["where"] == "step 3"


def test_a_step_that_was_skipped(training):
    for rank in training[2]:
        rank["steps"][1]["skipped"] = True
    assert found(training)["skipped"]["where"] == "step 2"


@pytest.mark.parametrize("off", [0, 1], ids=["first rank", "second rank"])
@pytest.mark.parametrize("used", [[0.1, 0.1 + 1e-9], [0.2], []], ids=["of one group", "a step early", "none"])
def test_the_rate_that_an_optimizer_used(training, off, used):
    """The rate that was reported is right."""
    training[2][off]["steps"][1]["used"] = used
    failures = found(training)
    assert failures.keys() == {"learning rate"}
    assert failures["learning rate"]["where"].startswith("step 2")
    assert f"rank {off}" in failures["learning rate"]["where"]


def test_the_rate_that_was_reported(training):
    for rank in training[2]:
        rank["steps"][1]["lr"] += 1e-9
    assert found(training)["learning rate"]["where"] == "step 2, rank 0"


@pytest.mark.parametrize("index", [0, 1], ids=["before", "after"])
@pytest.mark.parametrize(
    ("key", "change", "fact"),
    [
        ("loss", 2.2e-6, "validation loss"),
        ("loss", -0.4, "validation loss"),
        ("loss", None, "validation loss"),
        ("targets", 7, "validation targets"),
    ],
)
def test_a_validation_of_one_rank(training, index, key, change, fact):
    validation = training[2][1]["validations"][index]
    validation[key] = None if change is None else validation[key] + change
    failure = found(training)[fact]
    assert failure["where"] == f"step {index * STEPS}, rank 1"


def test_a_validation_within_the_bound_and_one_that_is_missing(training):
    training[2][0]["validations"][1]["loss"] += 1.8e-6
    assert found(training) == {}
    training[2][0]["validations"].pop()
    assert found(training)["validations"]["where"] == "of rank 0"


def test_a_missing_step(training):
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


def changed(training, kind, name, off):
    """The training, with one tensor of rank 0 off by the fraction ``off``."""
    measurement = Measurement(data_rank=0, strategy="cell")
    for each in NAMES:
        for taken in KINDS:
            take(measurement, taken, each, weight(each) * (1 + off * ((taken, each) == (kind, name))))
    measurement.write(training[0] / "cell", rank=9)
    return training


@pytest.mark.parametrize(
    ("kind", "fact", "bound"),
    [("gradient", "first gradient", 2e-6), ("update", "first update", 2e-6), ("weight", "weights", 2e-6)],
)
def test_bounds_of_tensors(training, kind, fact, bound):
    """They apply to every parameter separately, small biases too."""
    assert found(changed(training, kind, LAYER_NORM, bound * 0.8)) == {}
    failures = found(changed(training, kind, LAYER_NORM, bound * 1.2))
    assert failures.keys() == {fact}
    assert failures[fact]["where"] == LAYER_NORM
    assert failures[fact]["difference"] == pytest.approx(bound * 1.2, rel=0.1)


@pytest.mark.parametrize(
    ("bounds", "kind", "name", "allowed"),
    [
        (BF16, "gradient", MATRIX, 1e-6),
        (BF16, "gradient", LAYER_NORM, 1e-6),
        (BF16, "gradient", TIED, 1e-6),
        (BF16, "update", LAYER_NORM, 1e-6),
        (BF16_MANY, "gradient", MATRIX, 1.6e-2),
        (BF16_PIPELINE, "gradient", MATRIX, 1e-6),
        (BF16_PIPELINE, "gradient", TIED, 9e-3),
        (BF16_PIPELINE, "update", MATRIX, 3.6e-5),
        (BF16_PIPELINE, "update", TIED, 4.8e-4),
        (BF16_SPLIT, "gradient", MATRIX, 1.5e-2),
        (BF16_SPLIT, "gradient", LAYER_NORM, 6e-2),
        (BF16_SPLIT, "update", LAYER_NORM, 4e-2),
    ],
)
def test_bf16_is_bound_as_closely_as_its_arithmetic_allows(training, bounds, kind, name, allowed):
    fact = {"gradient": "first gradient", "update": "first update"}[kind]
    assert found(changed(training, kind, name, allowed * 0.8), bounds=CPU[bounds]) == {}
    assert found(changed(training, kind, name, allowed * 1.2), bounds=CPU[bounds]).keys() == {fact}


@pytest.mark.parametrize(("part", "caught"), [(0, True), (1, False), (2, True)], ids=["queries", "keys", "values"])
def test_only_the_biases_of_keys_are_left_out_of_the_weights(training, part, caught):
    measurement = Measurement(data_rank=0, strategy="cell")
    for name in NAMES:
        for kind in KINDS:
            value = weight(name).clone()
            if (kind, name) == ("weight", QKV):
                value[2 * part] += 1.0
            take(measurement, kind, name, value)
    measurement.write(training[0] / "cell", rank=9)
    assert found(training).keys() == ({"weights"} if caught else set())


@pytest.mark.parametrize("change", ["missing", "reshaped"])
def test_parameters_that_are_missing_or_have_another_shape(training, change):
    measurement = Measurement(data_rank=0, strategy="cell")
    for name in NAMES:
        measurement.gradient(name, weight(name))
    measurement.weight(NAMES[0], weight(NAMES[0]) if change == "missing" else weight(NAMES[0])[:1])
    if change == "reshaped":
        for name in NAMES[1:]:
            measurement.weight(name, weight(name))
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
    """Compared with torch's own clipping and AdamW, with active and inactive clipping."""
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


def test_sample_hashes_depend_on_inputs_and_targets():
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
