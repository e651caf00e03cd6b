"""``make demo`` again, with other steps, text or recipe: it resumes, or starts again and prints why."""

import errno
import json
import os
import shutil
from itertools import chain, repeat
from pathlib import Path
from types import ModuleType
from unittest.mock import DEFAULT, Mock

import pytest
from small_run import REPOSITORY

import dsgpt.demo
from dsgpt.benchmarks.cells import Corpus
from dsgpt.common.command_line import Terminated
from dsgpt.training import run_folder
from dsgpt.training.command import train


@pytest.fixture
def demo(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``dsgpt.demo``, with a small text in its data folder and a smaller model."""
    module = dsgpt.demo
    shutil.copytree(corpus.train.parent, tmp_path / "data" / "python-transformers")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(REPOSITORY / "ds_configs", tmp_path / "ds_configs")
    shape = ["--num_layers", "1", "--num_heads", "1", "--embedding_size", "16", "--max_position_embeddings", "128"]
    monkeypatch.setattr(module, "WORK", [*module.WORK, *shape])
    return module


RUN = Path("checkpoint/demo-baseline")


def words(demo: ModuleType, steps: int) -> list[str]:
    """The command line of a baseline of so many steps."""
    return demo.Demo(into=Path(), steps=steps, gpus=0).training("baseline", "baseline")


def decided(demo: ModuleType, *, steps: int = 1) -> str:
    """The flag that the demo chooses for it."""
    return demo._resume_or_overwrite(words(demo, steps))


def baseline(demo: ModuleType, *, steps: int = 1) -> str:
    """Train the baseline as the demo does; returns the flag that it chose."""
    decision = decided(demo, steps=steps)
    assert train([*words(demo, steps), decision]) == 0
    record = json.loads((RUN / "training_metrics.json").read_text())
    assert (record["status"], record["training_config"]["total_steps"]) == ("completed", steps)
    return decision


def test_the_same_steps_resume_and_others_start_again(demo, capsys, snapshot):
    assert baseline(demo, steps=2) == "--resume"
    assert baseline(demo, steps=2) == "--resume"
    assert "is replaced" not in capsys.readouterr().out
    (RUN / "RUN_COMPLETE.txt").unlink()
    assert baseline(demo, steps=2) == "--resume"
    assert "resuming from checkpoint/demo-baseline/step-00000002" in capsys.readouterr().out
    for steps in (3, 1):
        assert baseline(demo, steps=steps) == "--overwrite"
        title, reason, *_ = capsys.readouterr().out.splitlines()
        assert title == snapshot(name="title")
        assert reason.startswith(f"  total steps is {steps} ")


def test_another_recipe_or_text_starts_again(demo, capsys):
    baseline(demo)
    recipe = Path("ds_configs/sizes/demo.json")
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | {"gradient_clipping": 0.5}))
    assert baseline(demo) == "--overwrite"
    assert "  gradient clipping is 0.5 but " in capsys.readouterr().out
    data = Path("data/python-transformers")
    for end in ("bin", "json"):
        shutil.copy(data / f"val.{end}", data / f"train.{end}")
    assert baseline(demo) == "--overwrite"
    assert "  train data is " in capsys.readouterr().out


def test_what_overwriting_does_not_cure_is_left_to_the_run(demo, capsys):
    """A folder of something else; other steps beside a tokenizer that is missing; and beside a damaged checkpoint."""
    RUN.mkdir(parents=True)
    (RUN / "config.json").write_text('{"of": "somebody else"}')
    assert (decided(demo), capsys.readouterr()) == ("--resume", ("", ""))
    shutil.rmtree(RUN)
    baseline(demo)
    sidecar, tokenizer = Path("data/python-transformers/train.json"), {"name": "missing", "sha256": None}
    whole = sidecar.read_text()
    sidecar.write_text(json.dumps(json.loads(whole) | {"tokenizer": tokenizer}))
    capsys.readouterr()
    assert (decided(demo, steps=2), capsys.readouterr()) == ("--resume", ("", ""))
    sidecar.write_text(whole)
    assert decided(demo, steps=2) == "--overwrite"
    (RUN / "RUN_COMPLETE.txt").unlink()
    (RUN / "step-00000001" / "model.safetensors").write_bytes(b"")
    assert decided(demo, steps=2) == "--resume"


def test_checkpoints_that_were_moved_stop_the_demo(demo, capsys, monkeypatch, snapshot):
    """The user may move them back; --overwrite would remove the rest of the run."""
    baseline(demo)
    (RUN / "RUN_COMPLETE.txt").unlink()
    (RUN / "step-00000001").rename("elsewhere")
    capsys.readouterr()
    commands = []
    monkeypatch.setattr(demo, "_run", lambda command: commands.append(command) or train(command[2:]))
    before = sorted(RUN.iterdir())
    assert demo._train("baseline", demo.Demo(into=Path(), steps=1, gpus=0)) == 2
    assert commands[0][-1] == "--resume" and sorted(RUN.iterdir()) == before
    output = capsys.readouterr()
    assert "bring them back" in output.err
    assert output.out.splitlines()[0] == snapshot
    assert [decided(demo, steps=steps) for steps in (2, 3)] == ["--resume"] * 2  # another length does not change this


def test_a_temporary_error_is_not_another_run(demo, monkeypatch):
    baseline(demo)
    effects = chain([OSError(errno.EIO, os.strerror(errno.EIO), "somewhere")], repeat(DEFAULT))
    failing = Mock(wraps=run_folder.plan_resume, side_effect=effects)
    monkeypatch.setattr(run_folder, "plan_resume", failing)
    assert decided(demo) == "--resume" and failing.called


def test_a_training_may_save_when_the_demo_is_terminated(demo, signals_of_a_script, monkeypatch):
    """The signal comes once the demo waits: under xdist, threads of pytest may take one that the demo has blocked."""
    wait = demo.subprocess.Popen.wait
    monkeypatch.setattr(demo.subprocess.Popen, "wait", lambda self: Path("waiting").touch() or wait(self))
    asked = "until [ -e waiting ]; do sleep 0.02; done; kill -TERM $PPID"
    training = f"trap 'echo saved > saved; exit 75' TERM; {asked}; sleep 60 & wait"
    with pytest.raises(Terminated):
        demo._run(["sh", "-c", training])
    assert Path("saved").read_text() == "saved\n"


def test_further_strategies_have_the_demos_training(demo, monkeypatch):
    """ZeRO-3 has a recipe of its own, with the demo's training and the blocks of ``ds_configs/zero3.json``."""
    commands = []
    monkeypatch.setattr(demo, "_run", lambda command: commands.append(command) or 0)
    here = demo.Demo(into=Path(), steps=1, gpus=0, strategies=("ddp", "zero3"))
    further = demo._steps(here)[3:6]
    assert [title.split(" on ")[0] for title, _ in further][::2] == ["train the same with ddp", "compare them"]
    assert [step(here) for _, step in further] == [0, 0, 0]
    ddp, zero3, charts = commands
    assert Path(ddp[0]).name == "torchrun" and Path(zero3[0]).name == "deepspeed"
    assert (ddp[-1], zero3[-1]) == ("--resume", "--resume")
    assert [word for word in charts if "=" in word] == [
        f"{name}=checkpoint/demo-{name}" for name in ("baseline", "zero1", "ddp", "zero3")
    ]
    places = [place for place, word in enumerate(zero3) if word == "--deepspeed_config"]  # the last one counts
    paths = zero3[places[-1] + 1], "ds_configs/sizes/demo.json"
    recipe, ours = (json.loads(Path(path).read_text()) for path in paths)
    assert recipe["zero_optimization"]["stage"] == 3
    assert all(recipe[key] == ours[key] for key in demo.TRAINING_KEYS)
