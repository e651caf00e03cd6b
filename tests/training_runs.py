"""Start small real trainings and read what they leave behind."""

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import small_run
from forked_ranks import run_script
from harmful_tokenizers import seal
from small_run import REPOSITORY, command_line
from torch import Tensor

from dsgpt.benchmarks.cells import Corpus
from dsgpt.checkpoints.pieces import moment_key
from dsgpt.checkpoints.training_state import StateReader
from dsgpt.config.options import parse_arguments
from dsgpt.config.run_config import RunConfig, resolve
from dsgpt.machine.topology import Topology, read_topology
from dsgpt.training.command import train as train_here
from dsgpt.training.journal import Journal

SCRIPT = str(REPOSITORY / "src" / "gpt2.py")
SHAPE = ["--num_layers", "2", "--num_heads", "2", "--embedding_size", "32", "--max_position_embeddings", "64"]
GLOBAL_BATCH = 8

ADAMW = {"type": "AdamW", "params": {"lr": 0.003, "betas": [0.9, 0.95], "weight_decay": 0.1}}
SGD = {"type": "SGD", "params": {"lr": 1.0}}
WARM_UP_2 = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "cos_min_ratio": 0.1}}


def data_flags(corpus: Corpus) -> list[str]:
    """The two flags that name the data."""
    return ["--train_data_path", str(corpus.train), "--val_data_path", str(corpus.val)]


def write_optimizer_recipe(
    path: Path, *, optimizer: dict[str, Any] = ADAMW, clipping: float = 1.0, stage: int = 1, **more: Any
) -> Path:
    """Write a recipe with the small global batch; ``more`` replaces or adds top-level keys."""
    recipe = {
        "train_batch_size": GLOBAL_BATCH,
        "optimizer": optimizer,
        "scheduler": WARM_UP_2,
        "gradient_clipping": clipping,
        "zero_optimization": {"stage": stage},
    }
    return small_run.write_recipe(path, recipe, **more)


def train(
    run_dir: Path, corpus: Corpus, recipe: Path, *flags: str, ranks: int | None = None, run_type: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Train a small model to its end in processes of their own, which are forked.

    Args:
        run_dir: the run folder.
        corpus: what to train on.
        recipe: the JSON.
        flags: in addition to those for data, shape, sequence length 32 and the CPU.
        ranks: processes; None for a baseline.
        run_type: by default ``optimized``, and ``baseline`` without ``ranks``.
    """
    run_type = run_type or ("baseline" if ranks is None else "optimized")
    words = ["--run_type", run_type, *data_flags(corpus), *SHAPE, "--seq_length", "32", "--device", "cpu"]
    words += ["--deepspeed_config", str(recipe), "--checkpoint_path", str(run_dir), *flags]
    return run_script(SCRIPT, words, ranks=ranks, cwd=run_dir.parent)


def resolved(
    words: Sequence[object], topology: Topology | None = None, *, ranks: int | None = None, launcher: str = "torchrun"
) -> RunConfig:
    """The configuration of a run with the flags ``words``; by default of one process without a launcher.

    With ``ranks`` it is that of rank 0, of so many on one machine.
    """
    if ranks:
        topology = Topology(rank=0, local_rank=0, world_size=ranks, local_world_size=ranks, launcher=launcher)
    options, problems = parse_arguments([str(word) for word in words])
    return resolve(options, topology=topology or read_topology({}), problems=problems)


def finished(done: subprocess.CompletedProcess[str]) -> None:
    """Require that a training ended well, and show its output if not."""
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def read_record(run_dir: Path) -> dict[str, Any]:
    """``training_metrics.json``; NaN and Infinity are not JSON and fail."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} in training_metrics.json")

    return json.loads((run_dir / "training_metrics.json").read_text(encoding="utf-8"), parse_constant=refuse)


def read_lines(run_dir: Path, key: str = "loss") -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` that hold ``key``: training steps, or with ``val_loss`` evaluations."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if key in line]


def steps_of(run_dir: Path) -> list[tuple[int, float, float, float]]:
    """Of each step its number, loss, gradient norm and learning rate."""
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in read_lines(run_dir)]


def roll_back(run: Path, copy: Path, step: int) -> Path:
    """A copy of ``run`` as a kill after ``step`` steps would have left it, with later lines in its log."""
    shutil.copytree(run, copy)
    (copy / "RUN_COMPLETE.txt").unlink()
    for checkpoint in copy.glob("step-*"):
        if int(checkpoint.name[5:]) > step:
            shutil.rmtree(checkpoint)
    with (copy / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 13, "los')  # torn in the middle of a line
    return copy


def assert_same_training(reference: Path, other: Path, *, loss: float, norm: float) -> None:
    """Compare each step: loss within ``loss``, norm within ``norm`` relative, rate equal; and each validation loss."""
    expected, actual = read_lines(reference), read_lines(other)
    assert [line["step"] for line in actual] == [line["step"] for line in expected]
    for one, two in zip(expected, actual, strict=True):
        where = f"step {one['step']} of {other.name}"
        assert two["lr"] == one["lr"], where
        assert abs(two["loss"] - one["loss"]) <= loss, f"{where}: loss {two['loss']} instead of {one['loss']}"
        assert abs(two["grad_norm"] - one["grad_norm"]) <= norm * one["grad_norm"], (
            f"{where}: gradient norm {two['grad_norm']} instead of {one['grad_norm']}"
        )
    expected, actual = read_lines(reference, "val_loss"), read_lines(other, "val_loss")
    for one, two in zip(expected, actual, strict=True):
        assert (two["step"], two["val_tokens"]) == (one["step"], one["val_tokens"])
        assert abs(two["val_loss"] - one["val_loss"]) <= loss


def weights_of(checkpoint: Path) -> dict[str, Tensor]:
    """Every weight, whole, however many ranks wrote the checkpoint."""
    reader = StateReader(checkpoint)
    return {name: reader.read(name) for name in reader.shapes}


def moments_of(checkpoint: Path) -> dict[str, Tensor]:
    """Every moment, whole, as ``NAME.exp_avg``."""
    reader = StateReader(checkpoint)
    return {moment_key(name, key): reader.read(name, key) for key in reader.index.moments for name in reader.shapes}


# Trainings in this process, and what is in their folders.

# 12 steps over epochs of 5, saved inside the epochs
LONG = {"max_train_steps": 12, "save_every": 3, "keep_checkpoints": 9, "eval_every": 4, "steps_per_print": 5}


def resume(run_dir: Path, folder: Path, **changes: Any) -> int:
    """Resume the run in ``run_dir``, which was started with the data and recipe in ``folder``."""
    return train_here(command_line(folder, **LONG | {"checkpoint_path": run_dir, "resume": True} | changes))


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]


def checkpoints(run_dir: Path) -> list[int]:
    """The steps that have a folder named like a checkpoint, in order."""
    return sorted(int(path.name[5:]) for path in run_dir.glob("step-*") if path.name[5:].isdecimal())


def rewrite(checkpoint: Path, file: Path, data: bytes) -> None:
    """Replace a file of a checkpoint, and its size and hash in the manifest."""
    file.write_bytes(data)
    seal(checkpoint)


def stop_after_9(run_dir: Path) -> Path:
    """Leave of a finished run of 12 steps what a kill after step 9 would have left."""
    (run_dir / "RUN_COMPLETE.txt").unlink()
    shutil.rmtree(run_dir / "step-00000012")
    return run_dir


def after_step(monkeypatch: pytest.MonkeyPatch, step: int, then: Callable[[], object]) -> None:
    """Call ``then`` when a training has taken and noted ``step``."""
    done = Journal.step_done

    def step_done(self: Journal, **values: Any) -> None:
        done(self, **values)
        if values["step"] == step:
            then()

    monkeypatch.setattr(Journal, "step_done", step_done)


def damage(file: Path) -> None:
    """Flip one bit in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""

    @classmethod
    def now(cls, *args: Any, **kwargs: Any) -> None:
        raise cls
