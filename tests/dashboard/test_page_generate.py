"""Try it: the text of the page is the text of ``src/generate.py``, and nobody's request disturbs another's."""

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch
from opened_pages import open_page

from dsgpt.common.errors import UserError
from dsgpt.dashboard.model_session import Answer, answer, checkpoints_of, in_page, path_of
from dsgpt.dashboard.runs import Kept
from dsgpt.inference import commands
from dsgpt.inference.commands import GenerateRequest as Request
from dsgpt.inference.commands import Sampling
from dsgpt.inference.generation import likeliest
from dsgpt.inference.loading import load
from dsgpt.inference.sample import Opened, Text, Writer, open_model

PROMPT = "def ma"


@pytest.fixture(scope="module")
def runs(checkpoint_with_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run; tests only read it."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(checkpoint_with_tokenizer.parent, folder / "one")
    return folder


@pytest.fixture(scope="module")
def model(runs: Path) -> Kept[Opened]:
    """The kept models of a server."""
    return Kept(2)


def request_of(runs: Path, **changes) -> Request:
    given = {"max_new_tokens": 8, "seed": 1, "device": "cpu"} | changes
    return Request(checkpoint=runs / "one" / "step-00000001", **given)


def told(runs: Path, model: Kept[Opened], *, prompt: str = PROMPT, **changes) -> Answer:
    found = Answer(name="one/step-00000001", prompt=prompt)
    answer(found, request_of(runs, **changes), model)
    return found


def written(runs: Path, *, prompt: str = PROMPT, **changes) -> Text:
    """The text of ``src/generate.py``, whose one writer reads its model itself."""
    (text,) = Writer(request_of(runs, **changes)).texts([prompt])
    return text


@pytest.mark.parametrize(
    "changes", [{}, {"seed": 2}, {"temperature": 0.0}, {"top_k": 5, "repetition_penalty": 1.3}, {"stop": ("e",)}]
)
def test_text_and_ids_are_those_of_the_script(runs, model, changes):
    expected, found = written(runs, **changes), told(runs, model, **changes)
    assert found.text == str(expected)
    assert found.ids == expected.ids
    assert found.ended == expected.ended
    assert found.tokens == len(expected.ids)


def test_the_script_prints_the_same(runs, model, monkeypatch, capsys):
    words = f"--checkpoint {runs}/one/step-00000001 --max_new_tokens 8 --seed 1 --device cpu --prompt".split()
    monkeypatch.setattr(sys, "argv", ["generate.py", *words, PROMPT])
    commands.generate()
    assert capsys.readouterr().out == f"{told(runs, model).text}\n{commands.LINE}\n"


def test_two_texts_at_once_are_what_each_is_alone(runs, model):
    alone = [told(runs, model, seed=seed).text for seed in range(6)]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda seed: told(runs, model, seed=seed).text, range(6)))
    assert together == alone
    assert len(model) == 1


def test_a_stop_keeps_the_text_so_far(runs, model):
    class Pressed(Exception):
        pass

    found, shown = Answer(name="one", prompt=PROMPT), []

    def stop() -> None:
        shown.append(found.text)
        if len(shown) == 4:  # the prompt, and three tokens
            raise Pressed

    with pytest.raises(Pressed):
        answer(found, request_of(runs), model, show=stop)
    assert shown[0] == PROMPT
    assert found.text == shown[-1]
    assert found.text.startswith(PROMPT)
    assert found.tokens == 3
    assert found.ended == "stopped"
    assert told(runs, model).text == str(written(runs))


def test_the_likeliest_ids_are_those_of_the_model(runs, model):
    opened = model.get("own", lambda: open_model(request_of(runs)))
    device = torch.device("cpu")
    plain = load(runs / "one", which="latest", device=device, precision="fp32").model
    tokenizer = opened.tokenizer
    ids = tokenizer.encode(PROMPT, add_special_tokens=False)
    with torch.inference_mode():
        expected = plain(torch.tensor([ids]))[0, -1, : plain.config.vocab_size].float().softmax(dim=0).topk(10)
    found = told(runs, model, temperature=0.0).likeliest
    assert [each.id for _, each in found] == expected.indices.tolist()
    assert [each.probability for _, each in found] == pytest.approx(expected.values.tolist(), rel=1e-4)
    assert [each.drawn for _, each in found] == [1.0] + [0.0] * 9
    drawn = likeliest(opened.decoder, ids, count=10, sampling=Sampling(temperature=1.0, top_k=2))
    assert sum(each.drawn for each in drawn) == pytest.approx(1)
    assert [each.drawn > 0 for each in drawn] == [True, True] + [False] * 8
    assert request_of(runs).top_k == 50


def test_a_prompt_that_does_not_fit_is_refused_in_the_words_of_the_page(runs, model):
    refused = told(runs, model, prompt="x " * 500).refused
    assert refused.startswith("Prompt has ")
    assert "shorten it" in refused
    assert in_page("--checkpoint a/b: holds no checkpoint") == "a/b: holds no checkpoint"


def test_a_damaged_checkpoint_is_named(runs, model, tmp_path):
    copy = shutil.copytree(runs / "one" / "step-00000001", tmp_path / "one" / "step-00000001")
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-3] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    refused = told(tmp_path, model).refused
    assert "model.safetensors" in refused
    assert "\n" not in refused
    assert told(runs, model).refused == ""


def test_a_checkpoint_without_a_tokenizer_is_refused(runs, model, tmp_path):
    copy = shutil.copytree(runs / "one" / "step-00000001", tmp_path / "one" / "step-00000001")
    shutil.rmtree(copy / "tokenizer")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["files"] = {name: facts for name, facts in manifest["files"].items() if not name.startswith("tokenizer/")}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert "has no tokenizer, because its training data had none: cannot read text" in told(tmp_path, model).refused


def test_another_version_of_a_checkpoint_is_loaded_anew(runs, tmp_path):
    copied, models = tmp_path / "one", Kept[Opened](2)
    shutil.copytree(runs / "one", copied)
    told(tmp_path, models)
    assert len(models) == 1
    manifest = copied / "step-00000001" / "manifest.json"
    again = shutil.copy2(manifest, tmp_path / "another")  # of the same size and time
    again.replace(manifest)
    told(tmp_path, models)
    assert len(models) == 2


def test_only_checkpoints_inside_the_folder_are_offered(runs, tmp_path):
    folder = tmp_path / "runs"
    shutil.copytree(runs / "one", folder / "one")
    (folder / "one" / "step-00000009").symlink_to(runs / "one" / "step-00000001")
    assert checkpoints_of(folder, ["one"]) == ["one/step-00000001"]
    assert path_of(folder, "one/step-00000001") == folder / "one" / "step-00000001"
    for name in ("../one", "one/step-00000009", "/etc", "one/step-00000007"):
        with pytest.raises(UserError):
            path_of(folder, name)


def test_few_are_kept_and_each_is_made_once():
    kept, made = Kept[str](2), []

    def make(name: str) -> str:
        made.append(name)
        return name

    for name in ("a", "b", "a", "c", "a", "b"):
        assert kept.get(name, lambda name=name: make(name)) == name
    assert made == ["a", "b", "c", "b"]
    assert len(kept) == 2


def test_one_that_cannot_be_made_is_not_kept():
    kept = Kept[str](1)

    def fail() -> str:
        raise UserError("damaged")

    with pytest.raises(UserError):
        kept.get("a", fail)
    assert len(kept) == 0
    assert kept.get("a", lambda: "repaired") == "repaired"


def test_two_that_ask_at_once_wait_for_one():
    kept, began, go, made = Kept[str](2), Event(), Event(), []

    def slow() -> str:
        made.append(1)
        began.set()
        assert go.wait(10)
        return "model"

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(kept.get, "a", slow)
        assert began.wait(10)
        second = pool.submit(kept.get, "a", slow)
        other = kept.get("b", lambda: "another")
        go.set()
        assert (first.result(), second.result(), other) == ("model", "model", "another")
    assert len(made) == 1


def test_the_page_generates_beside_each_other(runs, monkeypatch):
    page = open_page("generate", runs, monkeypatch)
    page.text_area(key="generate-prompt").set_value(PROMPT)
    page.number_input(key="generate-tokens").set_value(8)
    page.number_input(key="generate-seed").set_value(1)
    page.selectbox(key="generate-second").set_value("one/step-00000001")
    page.button[0].click().run()
    assert not page.exception
    expected = str(written(runs))
    assert [code.value for code in page.code] == [expected, expected]
    assert "8 tokens in" in page.caption[0].value
    page.text_area(key="generate-prompt").set_value("x " * 500)
    page.button[0].click().run()
    assert "shorten it" in page.error[0].value


def test_an_empty_project_says_how_to_begin(tmp_path, monkeypatch):
    page = open_page("generate", tmp_path, monkeypatch)
    assert "make demo" in page.info[0].value
