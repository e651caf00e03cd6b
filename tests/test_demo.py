"""``make demo`` again, with other steps, text or recipe: it resumes, or starts again and prints why."""

import errno
import importlib.util
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest
from small_run import REPOSITORY

from dsgpt.benchmarks.cells import Corpus
from dsgpt.common.command_line import Terminated
from dsgpt.common.errors import UserError
from dsgpt.training import run as preparation
from dsgpt.training.command import train


@pytest.fixture
def demo(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``src/demo.py``, with a small text in its data folder and a smaller model."""
    specification = importlib.util.spec_from_file_location("demo", REPOSITORY / "src" / "demo.py")
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "demo", module)
    specification.loader.exec_module(module)
    shutil.copytree(corpus.train.parent, tmp_path / "data" / "python-stdlib")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(REPOSITORY / "ds_configs", tmp_path / "ds_configs")
    shape = ["--num_layers", "1", "--num_heads", "1", "--embedding_size", "16", "--max_position_embeddings", "128"]
    monkeypatch.setattr(module, "WORK", [*module.WORK, *shape])
    return module


def baseline(demo: ModuleType, *, steps: int) -> str:
    """Train the baseline as the demo does; returns the flag that it chose."""
    words = demo.Demo(into=Path(), steps=steps, gpus=0).training("baseline", "baseline")
    decision = demo._resume_or_overwrite(words)
    assert train([*words, decision]) == 0
    record = json.loads(Path("checkpoint/demo-baseline/training_metrics.json").read_text())
    assert (record["status"], record["training_config"]["total_steps"]) == ("completed", steps)
    return decision


def test_the_same_steps_resume_and_others_start_again(demo, capsys, snapshot):
    assert baseline(demo, steps=2) == "--resume"
    assert baseline(demo, steps=2) == "--resume"
    assert "is replaced" not in capsys.readouterr().out
    for steps in (3, 1):
        assert baseline(demo, steps=steps) == "--overwrite"
        title, reason, *_ = capsys.readouterr().out.splitlines()
        assert title == snapshot(name="title")
        assert reason.startswith(f"  total steps is {steps} ")


def test_an_interrupted_run_is_resumed(demo, capsys):
    baseline(demo, steps=1)
    Path("checkpoint/demo-baseline/RUN_COMPLETE.txt").unlink()
    capsys.readouterr()
    assert baseline(demo, steps=1) == "--resume"
    assert "resuming from checkpoint/demo-baseline/step-00000001" in capsys.readouterr().out


def test_another_recipe_or_text_starts_again(demo, capsys):
    baseline(demo, steps=1)
    recipe = Path("ds_configs/sizes/demo.json")
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | {"gradient_clipping": 0.5}))
    assert baseline(demo, steps=1) == "--overwrite"
    assert "  gradient clipping is 0.5 but " in capsys.readouterr().out
    data = Path("data/python-stdlib")
    for end in ("bin", "json"):
        shutil.copy(data / f"val.{end}", data / f"train.{end}")
    assert baseline(demo, steps=1) == "--overwrite"
    assert "  train data is " in capsys.readouterr().out


def test_what_overwriting_does_not_cure_is_left_to_the_run(demo, capsys):
    folder = Path("checkpoint/demo-baseline")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"of": "somebody else"}')
    words = demo.Demo(into=Path(), steps=1, gpus=0).training("baseline", "baseline")
    assert demo._resume_or_overwrite(words) == "--resume"
    assert capsys.readouterr() == ("", "")


RUN = Path("checkpoint/demo-baseline")


def test_checkpoints_that_were_moved_stop_the_demo(demo, capsys, monkeypatch, snapshot):
    """The user may move them back; --overwrite would remove the rest of the run."""
    baseline(demo, steps=1)
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
    for steps in (2, 3):  # another length does not change this
        words = demo.Demo(into=Path(), steps=steps, gpus=0).training("baseline", "baseline")
        assert demo._resume_or_overwrite(words) == "--resume"


def test_a_damaged_checkpoint_is_not_replaced(demo, capsys):
    baseline(demo, steps=1)
    (RUN / "RUN_COMPLETE.txt").unlink()
    (RUN / "step-00000001" / "model.safetensors").write_bytes(b"")
    words = demo.Demo(into=Path(), steps=2, gpus=0).training("baseline", "baseline")
    assert demo._resume_or_overwrite(words) == "--resume"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_temporary_error_is_not_another_run(demo, monkeypatch, number):
    baseline(demo, steps=1)
    failures = [OSError(number, os.strerror(number), "somewhere")]
    plan = preparation.plan_resume

    def fail_once(*given, **named):
        if failures:
            raise failures.pop()
        return plan(*given, **named)

    monkeypatch.setattr(preparation, "plan_resume", fail_once)
    words = demo.Demo(into=Path(), steps=1, gpus=0).training("baseline", "baseline")
    assert demo._resume_or_overwrite(words) == "--resume"
    assert not failures


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_check_ends_the_demo(demo, monkeypatch, number):
    baseline(demo, steps=1)
    monkeypatch.setattr(preparation, "plan_resume", lambda *given, **named: os.kill(os.getpid(), number))
    words = demo.Demo(into=Path(), steps=1, gpus=0).training("baseline", "baseline")
    with pytest.raises(KeyboardInterrupt):
        demo._resume_or_overwrite(words)


def test_a_training_may_save_when_the_demo_is_terminated(demo, signals_of_a_script, monkeypatch):
    """The signal comes once the demo waits: under xdist, threads of pytest may take one that the demo has blocked."""
    wait = demo.subprocess.Popen.wait
    monkeypatch.setattr(demo.subprocess.Popen, "wait", lambda self: Path("waiting").touch() or wait(self))
    asked = "until [ -e waiting ]; do sleep 0.02; done; kill -TERM $PPID"
    training = f"trap 'echo saved > saved; exit 75' TERM; {asked}; sleep 60 & wait"
    with pytest.raises(Terminated):
        demo._run(["sh", "-c", training])
    assert Path("saved").read_text() == "saved\n"


def test_another_fault_in_addition_is_not_another_run(demo, capsys):
    """Other steps, and the tokenizer that the data's sidecar names is missing."""
    baseline(demo, steps=1)
    sidecar = Path("data/python-stdlib/train.json")
    values = json.loads(sidecar.read_text())
    sidecar.write_text(json.dumps(values | {"tokenizer": {"name": "tokenizer", "sha256": None}}))
    shutil.rmtree("data/python-stdlib/tokenizer", ignore_errors=True)
    capsys.readouterr()
    words = demo.Demo(into=Path(), steps=2, gpus=0).training("baseline", "baseline")
    assert demo._resume_or_overwrite(words) == "--resume"
    assert capsys.readouterr() == ("", "")


def test_further_strategies_have_the_demos_training(demo, monkeypatch):
    """ZeRO-3 has a recipe of its own, with the demo's training and the blocks of ``ds_configs/zero3.json``."""
    commands = []
    monkeypatch.setattr(demo, "_run", lambda command: commands.append(command) or 0)
    here = demo.Demo(into=Path(), steps=1, gpus=0, strategies=("ddp", "zero3"))
    titles = [title for title, _ in demo._steps(here)]
    assert titles[3:6] == [
        "train the same with ddp on 2 devices",
        "train the same with zero3 on 2 devices",
        "compare them",
    ]
    for _, step in demo._steps(here)[3:6]:
        assert step(here) == 0
    ddp, zero3, charts = commands
    assert Path(ddp[0]).name == "torchrun" and Path(zero3[0]).name == "deepspeed"
    assert (ddp[-1], zero3[-1]) == ("--resume", "--resume")
    assert [word for word in charts if "=" in word] == [
        f"{name}=checkpoint/demo-{name}" for name in ("baseline", "zero1", "ddp", "zero3")
    ]
    recipe, ours = (json.loads(Path(path).read_text()) for path in (recipe_in(zero3), "ds_configs/sizes/demo.json"))
    assert recipe["zero_optimization"]["stage"] == 3
    assert all(recipe[key] == ours[key] for key in demo.TRAINING_KEYS)


def recipe_in(words: list[str]) -> str:
    """The recipe that counts: the last one."""
    return [words[place + 1] for place, word in enumerate(words) if word == "--deepspeed_config"][-1]


def test_strategies_that_the_demo_cannot_train_are_refused_together(demo):
    with pytest.raises(UserError) as caught:
        demo.require_strategies(("zero4", "3d", "ddp"), devices=2)
    unknown, too_few = caught.value.problems
    assert unknown.startswith("--strategies zero4: unknown (did you mean zero")
    assert too_few == "--strategies 3d: needs a multiple of 8 devices, not 2"


def test_prepared_text_is_used(demo, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(demo, "_run", lambda command: started.append(command) or 0)
    here = demo.Demo(into=Path(), steps=1, gpus=0)
    assert demo._prepare(here) == 0
    assert not started and "data/python-stdlib contains prepared text" in capsys.readouterr().out
    (here.data / "preparation.json").unlink()
    assert demo._prepare(here) == 0
    assert started[0][1:] == ["data_prep/preprocess.py", "--output_dir", "data/python-stdlib"]
