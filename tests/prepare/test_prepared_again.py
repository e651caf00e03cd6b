"""preprocess.py a second time, after the files of the first run were changed."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dsgpt.common.errors import UserError
from dsgpt.data.token_file import TokenFileError


@pytest.fixture
def again(prepare_here, corpus: Path, bytes_tokenizer: Path, tmp_path: Path) -> Callable[[], None]:
    """Prepare ``out`` in the test's folder; returns a function that prepares it again."""

    def prepare() -> None:
        prepare_here("--input", corpus, "--tokenizer", bytes_tokenizer, "--output_dir", "out", cwd=tmp_path)

    prepare()
    return prepare


def test_a_changed_file_is_refused(again, tmp_path):
    path = tmp_path / "out" / "train.bin"
    data = path.read_bytes()
    path.write_bytes(data[2:] + data[:2])
    with pytest.raises(TokenFileError, match=r"train\.bin: its sha256 is .* make it again with .* --overwrite"):
        again()


def test_a_copy_is_hashed_once(again, tmp_path, capsys, snapshot):
    os.utime(tmp_path / "out" / "val.bin", ns=(5, 5))
    again()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "val.bin changed" in line] == snapshot
    assert "already prepared:" in lines
    again()
    output = capsys.readouterr().out
    assert "hashed again" not in output
    assert "already prepared" in output


@pytest.mark.parametrize("name", ["train.json", "tokenizer/tokenizer.json"])
def test_a_file_of_another_preparation_is_refused(again, tmp_path, name):
    path = tmp_path / "out" / name
    if name == "train.json":
        path.unlink()
    else:
        path.write_text("{}")
    with pytest.raises(UserError, match=r"not the file that preparation\.json describes; replace it with --overwrite"):
        again()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"identity": 5}', "[" * 200])
def test_an_invalid_record_is_refused(again, tmp_path, text):
    (tmp_path / "out" / "preparation.json").write_text(text)
    with pytest.raises(UserError, match=r"preparation\.json: is not the record of a preparation \(.*--overwrite"):
        again()


def test_the_record_contains_no_size_or_time_of_files(again, tmp_path):
    splits = json.loads((tmp_path / "out" / "preparation.json").read_text())["splits"]
    assert splits.keys() == {"train", "val"}
    assert not {"size", "mtime_ns"} & splits["train"].keys()
