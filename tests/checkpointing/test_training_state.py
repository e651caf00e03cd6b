"""The state of training in files: whole tensors in any order; unexpected ones are refused."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsgpt.checkpoints.training_state import (
    Counters,
    KeptState,
    LossScaleState,
    ParamState,
    StateReader,
    write_training_state,
)
from dsgpt.common.errors import UserError

SHAPES = {"wte.weight": (4, 3), "wpe.weight": (2, 3), "ln_f.bias": (3,)}
SCALE = {"factor": 8.0, "step": 9, "last_overflow": -1, "patience": 2}
COUNTERS = Counters(optimizer_steps=7, loss_scale=LossScaleState(**SCALE))


def states(*, moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")) -> dict[str, ParamState]:
    torch.manual_seed(1)
    return {
        name: ParamState(torch.randn(shape), **{key: torch.randn(shape) for key in moments})
        for name, shape in SHAPES.items()
    }


def written(folder: Path, values: dict[str, ParamState]) -> Path:
    folder.mkdir()
    assert write_training_state(folder, iter(values.items()), COUNTERS, shapes=SHAPES, writes=True) == []
    return folder


@pytest.mark.parametrize("moments", [("exp_avg", "exp_avg_sq"), ("momentum_buffer",), ()], ids=len)
def test_what_was_written_is_read(tmp_path, moments):
    values = states(moments=moments)
    folder = written(tmp_path / "step", dict(reversed(values.items())))  # each strategy has its own order
    reader = StateReader(folder)
    reader.require_shapes(SHAPES)
    assert reader.counters == COUNTERS
    assert reader.has_moments == bool(moments)
    for name, state in values.items():
        for ours, theirs in zip(reader.state(name), state, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or ours.equal(theirs)
    assert load_file(folder / "model.safetensors").keys() == SHAPES.keys()  # safetensors' own reader accepts it too
    assert (folder / "optimizer.safetensors").exists() == bool(moments)


def test_a_copy_is_of_its_moment_and_its_memory_is_used_again():
    kept, values = KeptState(), states()
    kept.keep(iter(values.items()), keeps=True)
    first = dict(kept.states())
    before = values["wte.weight"].weight.clone()
    values["wte.weight"].weight.zero_()
    assert first["wte.weight"].weight.equal(before)
    kept.keep(iter(values.items()), keeps=True)
    again = dict(kept.states())
    assert again["wte.weight"].weight.data_ptr() == first["wte.weight"].weight.data_ptr()
    assert not again["wte.weight"].weight.any()


def test_moments_that_appear_after_the_first_copy_are_kept_too():
    """A run may save before its first optimizer step, when there are none."""
    kept, later = KeptState(), states()
    kept.keep(iter(states(moments=()).items()), keeps=True)
    kept.keep(iter(later.items()), keeps=True)
    for name, state in kept.states():
        assert state.moments.keys() == {"exp_avg", "exp_avg_sq"}
        assert state.weight.equal(later[name].weight)
        assert all(value.equal(later[name].moments[key]) for key, value in state.moments.items())


def test_a_change_of_every_tensor_keeps_them_apart():
    for state in (*states().values(), *states(moments=("momentum_buffer",)).values(), *states(moments=()).values()):
        doubled = state.mapped(lambda value: 2 * value)
        assert doubled.weight.equal(2 * state.weight)
        assert doubled.moments.keys() == state.moments.keys()
        assert all(value.equal(2 * state.moments[key]) for key, value in doubled.moments.items())


def test_a_weight_that_is_not_finite_is_named(tmp_path):
    values = states()
    values["wpe.weight"].weight[1, 2] = float("nan")
    assert write_training_state(tmp_path, iter(values.items()), COUNTERS, shapes=SHAPES, writes=True) == ["wpe.weight"]


def test_a_rank_that_cannot_write_takes_part_to_the_end(tmp_path):
    """The others gather each tensor together with it, and would otherwise wait for ever."""
    gathered = []

    def gather() -> Iterator[tuple[str, ParamState]]:
        for name, state in states().items():
            gathered.append(name)
            yield name, state

    (tmp_path / "model.safetensors").write_bytes(b"in the way")
    with pytest.raises(FileExistsError):
        write_training_state(tmp_path, gather(), COUNTERS, shapes=SHAPES, writes=True)
    assert gathered == list(SHAPES)


def test_a_missing_tensor_is_an_error(tmp_path):
    missing = states()
    del missing["ln_f.bias"]
    with pytest.raises(ValueError, match=r"ln_f\.bias"):
        write_training_state(tmp_path, iter(missing.items()), COUNTERS, shapes=SHAPES, writes=True)


def test_another_models_tensors_are_refused(tmp_path):
    reader = StateReader(written(tmp_path / "step", states()))
    with pytest.raises(UserError, match="not those of this model"):
        reader.require_shapes(SHAPES | {"wpe.weight": (3, 3)})
    with pytest.raises(UserError, match="not those of this model"):
        reader.require_shapes({name: shape for name, shape in SHAPES.items() if name != "wpe.weight"})


def test_moments_of_other_weights_are_refused(tmp_path):
    folder = written(tmp_path / "step", states())
    moments = load_file(folder / "optimizer.safetensors")
    del moments["wpe.weight.exp_avg"]
    save_file(moments, folder / "optimizer.safetensors")
    with pytest.raises(UserError, match="not those of the weights"):
        StateReader(folder)


@pytest.mark.parametrize("text", ["", "[]", '{"steps": 1}', '{"optimizer_steps": 1, "more": 2}', None])
def test_counters_of_another_version_are_refused(tmp_path, text):
    folder = written(tmp_path / "step", states())
    if text is None:
        (folder / "training_state.json").unlink()
    else:
        (folder / "training_state.json").write_text(text)
    with pytest.raises(UserError, match="not a training state of this version"):
        StateReader(folder)


def test_counters_are_plain_json(tmp_path):
    folder = written(tmp_path / "step", states())
    assert json.loads((folder / "training_state.json").read_text()) == {
        "optimizer_steps": 7,
        "loss_scale": SCALE,
    }
