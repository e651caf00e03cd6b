"""``make demo`` again, with other steps, text or recipe: it goes on, or starts anew and says why."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from small_run import REPOSITORY
from training_runs import Corpus

from dsgpt.main import train


@pytest.fixture
def demo(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``src/demo.py``, with little text where it looks for it, and a smaller model."""
    specification = importlib.util.spec_from_file_location("demo", REPOSITORY / "src" / "demo.py")
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "demo", module)
    specification.loader.exec_module(module)
    shutil.copytree(corpus.folder, tmp_path / "data" / "python-stdlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_configs").mkdir()
    shutil.copy(REPOSITORY / "ds_configs" / "zero1.json", tmp_path / "ds_configs")
    shape = ["--num_layers", "1", "--num_heads", "1", "--embedding_size", "16", "--max_position_embeddings", "128"]
    monkeypatch.setattr(module, "WORK", [*module.WORK, *shape])
    return module


def baseline(demo: ModuleType, *, steps: int) -> str:
    """Train it, as the demo decides; the decision comes back."""
    words = demo.Demo(into=Path(), steps=steps, gpus=0).training("baseline", "baseline")
    decision = demo._go_on_or_anew(words)
    assert train([*words, decision]) == 0
    record = json.loads(Path("checkpoint/demo-baseline/training_metrics.json").read_text())
    assert (record["status"], record["training_config"]["total_steps"]) == ("completed", steps)
    return decision


def test_the_same_steps_go_on_and_others_start_anew(demo, capsys):
    assert baseline(demo, steps=2) == "--resume"
    assert baseline(demo, steps=2) == "--resume"
    assert "is replaced" not in capsys.readouterr().out
    for steps in (3, 1):
        assert baseline(demo, steps=steps) == "--overwrite"
        out = capsys.readouterr().out
        assert out.startswith("checkpoint/demo-baseline holds another run, which is replaced:\n  total steps is ")


def test_an_interrupted_run_goes_on(demo, capsys):
    baseline(demo, steps=1)
    Path("checkpoint/demo-baseline/RUN_COMPLETE.txt").unlink()
    capsys.readouterr()
    assert baseline(demo, steps=1) == "--resume"
    assert "resuming from checkpoint/demo-baseline/step-00000001" in capsys.readouterr().out


def test_another_recipe_or_text_starts_anew(demo, capsys):
    baseline(demo, steps=1)
    recipe = Path("ds_configs/zero1.json")
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | {"gradient_clipping": 0.5}))
    assert baseline(demo, steps=1) == "--overwrite"
    assert "  gradient clipping is 0.5 but " in capsys.readouterr().out
    data = Path("data/python-stdlib")
    for end in ("bin", "json"):
        shutil.copy(data / f"val.{end}", data / f"train.{end}")
    assert baseline(demo, steps=1) == "--overwrite"
    assert "  train data is " in capsys.readouterr().out


def test_what_starting_anew_does_not_cure_is_left_to_the_run(demo, capsys):
    folder = Path("checkpoint/demo-baseline")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"of": "somebody else"}')
    words = demo.Demo(into=Path(), steps=1, gpus=0).training("baseline", "baseline")
    assert demo._go_on_or_anew(words) == "--resume"
    assert capsys.readouterr() == ("", "")


def test_text_that_is_there_is_taken(demo, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(demo, "_run", lambda command: started.append(command) or 0)
    here = demo.Demo(into=Path(), steps=1, gpus=0)
    assert demo._prepare(here) == 0
    assert not started and "data/python-stdlib holds prepared text" in capsys.readouterr().out
    (here.data / "preparation.json").unlink()
    assert demo._prepare(here) == 0
    assert started[0][1:] == ["data_prep/preprocess.py", "--output_dir", "data/python-stdlib"]
