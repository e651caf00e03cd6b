"""An exported folder contains no code, no request for code, and no contents of links."""

import json
from pathlib import Path

import pytest
from convert_script import converted, refusal
from harmful_tokenizers import DEEP, bring_code, seal
from published import publish
from small_run import VOCABULARY, write_tokenizer


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("form", ["hf", "portable", "deepspeed"])
def test_code_is_not_exported(checkpoint, tmp_path, form):
    bring_code(checkpoint / "tokenizer", marker=tmp_path / "ran")
    seal(checkpoint)
    said = converted("--from", checkpoint, "--to", form, tmp_path / "out")
    assert f"tokenizer   left out: {checkpoint}/tokenizer: its tokenizer_config.json asks for its own code" in said
    assert not [name for name in names(tmp_path / "out") if name.endswith(".py") or "tokenizer" in name]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("form", ["hf", "portable"])
def test_only_known_files_are_exported(checkpoint, tmp_path, form):
    (checkpoint / "tokenizer" / "helper.py").write_text("")
    (checkpoint / "tokenizer" / "notes.txt").write_text("")
    seal(checkpoint)
    converted("--from", checkpoint, "--to", form, tmp_path / "out")
    folder = tmp_path / "out" / ("" if form == "hf" else "tokenizer")
    assert {"tokenizer.json", "tokenizer_config.json"} <= names(folder)
    assert not {"helper.py", "notes.txt"} & names(folder)


def test_a_file_that_the_manifest_does_not_name_is_refused(checkpoint, tmp_path):
    (checkpoint / "tokenizer" / "added_tokens.json").write_text("{}")
    (line,) = refusal("--from", checkpoint, "--to", "hf", tmp_path / "out")
    assert line.startswith(f"{checkpoint}/tokenizer/added_tokens.json: is not in manifest.json")


@pytest.mark.parametrize("harm", ["code", "link"])
def test_the_harmful_tokenizer_of_a_published_folder_is_left_out(tmp_path, harm):
    folder = tmp_path / "published"
    publish(folder, vocab_size=VOCABULARY)
    write_tokenizer(tmp_path / "tokenizer")
    if harm == "code":
        bring_code(tmp_path / "tokenizer", marker=tmp_path / "ran")
    for path in (tmp_path / "tokenizer").iterdir():
        if harm == "link":
            (folder / path.name).symlink_to(path)
        else:
            path.rename(folder / path.name)
    said = converted("--from", folder, "--to", "portable", tmp_path / "out")
    assert f"tokenizer   left out: {folder}: its " in said
    assert names(tmp_path / "out") == {"manifest.json", "model.json", "model.safetensors"}


@pytest.mark.parametrize(
    "text",
    [
        DEEP,
        '{"model": {"vocab": {"<|endoftext|>": "0"}}}',
        '{"model": {"vocab": {}}, "added_tokens": [{"content": "<|endoftext|>", "id": []}]}',
        '{"model": {"vocab": [["<|endoftext|>"]]}}',
        '{"model": {"vocab": {}}, "added_tokens": [{"content": ["a"], "id": 1}]}',
    ],
    ids=lambda value: value[:40],
)
def test_a_vocabulary_of_wrong_types_is_one_line(checkpoint, tmp_path, text):
    (checkpoint / "tokenizer" / "tokenizer.json").write_text(text)
    seal(checkpoint)
    (line,) = refusal("--from", checkpoint, "--to", "hf", tmp_path / "out")
    assert "tokenizer.json: is not a readable vocabulary (" in line
    assert json.loads((checkpoint / "manifest.json").read_text())["step"] == 1
