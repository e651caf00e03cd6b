"""Opening a tokenizer reads regular files of known names in its folder, whatever its settings name."""

import json
import shutil
from pathlib import Path

import pytest
from small_run import VOCABULARY, write_tokenizer
from tokenizers import Tokenizer, models

from dsgpt.common.errors import UserError
from dsgpt.formats.tokenizer_files import copy_tokenizer, fault_of, open_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "mine")
    return tmp_path / "mine"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A vocabulary outside the folder."""
    Tokenizer(models.WordLevel(vocab={"<unk>": 0, "stolen": 1}, unk_token="<unk>")).save(str(tmp_path / "other.json"))
    return tmp_path / "other.json"


def set_keys(file: Path, **values: object) -> None:
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(old | values))


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        open_tokenizer(folder, what="here")
    (line,) = caught.value.problems
    assert line == f"here: {fault_of(folder)}", "training and converting call fault_of alone: they would accept it"
    return line


@pytest.mark.parametrize("linked", [False, True])
def test_another_version_of_the_vocabulary_is_refused(folder, other, snapshot, linked):
    set_keys(folder / "tokenizer_config.json", fast_tokenizer_files=["tokenizer.json", "tokenizer.4.0.0.json"])
    version = folder / "tokenizer.4.0.0.json"
    version.symlink_to(other) if linked else shutil.copy(other, version)
    assert refusal(folder) == snapshot


@pytest.mark.parametrize("key", ["tokenizer_file", "vocab_file", "vocab"])
def test_a_file_that_the_special_tokens_name_is_refused(folder, other, key):
    set_keys(folder / "special_tokens_map.json", **{key: str(other)})
    assert f"its special_tokens_map.json names other files to open ({key})" in refusal(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("init_inputs", ["FILE"]),
        ("vocab_file", "FILE"),
        ("vocab", "FILE"),
        ("merges", "FILE"),
        ("gguf_file", "FILE"),
        ("sp_model_kwargs", {"model_file": "FILE"}),
    ],
)
def test_a_file_that_the_settings_name_is_refused(folder, other, key, value):
    set_keys(folder / "tokenizer_config.json", **{key: json.loads(json.dumps(value).replace("FILE", str(other)))})
    name = "model_file" if key == "sp_model_kwargs" else key
    assert f"its tokenizer_config.json names other files to open ({name})" in refusal(folder)


def test_another_version_of_the_configuration_is_refused(folder, tmp_path):
    set_keys(folder / "config.json", model_type="gpt2", configuration_files=["config.4.0.0.json"])
    shutil.copy(folder / "config.json", folder / "config.4.0.0.json")
    assert "its config.json names other files to open (configuration_files)" in refusal(folder)


def test_entries_that_the_library_writes_or_ignores_are_allowed(folder, other):
    """Settings of earlier versions contain paths of the author's machine, which the library does not open."""
    set_keys(
        folder / "tokenizer_config.json",
        tokenizer_file=str(other), special_tokens_map_file="/gone/map.json", vocab_file=None, init_inputs=[],
    )  # fmt: skip
    tokenizer = open_tokenizer(folder, what="here")
    assert len(tokenizer) == VOCABULARY and tokenizer.name_or_path == str(folder)


def test_files_of_unknown_names_are_not_opened(folder, tmp_path):
    """The library looks for templates in a subfolder, and would follow links there."""
    secret = tmp_path / "secret"
    secret.write_text("of somebody else")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "mine.jinja").symlink_to(secret)
    assert not open_tokenizer(folder, what="here").chat_template


def test_an_error_names_the_folder(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError) as caught:
        open_tokenizer(folder, what="here")
    (line,) = caught.value.problems
    assert line.startswith("here: is not a readable tokenizer folder") and "/tokenizer-" not in line


def test_a_copy_opens_as_the_original_does(folder, tmp_path):
    copy_tokenizer(folder, tmp_path / "copy")
    original, copy = (open_tokenizer(path, what="here") for path in (folder, tmp_path / "copy"))
    assert copy.get_vocab() == original.get_vocab()
    original.save_pretrained(tmp_path / "saved")
    assert str(tmp_path) not in (tmp_path / "saved" / "tokenizer_config.json").read_text()
