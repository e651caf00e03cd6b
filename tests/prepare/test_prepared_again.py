"""The second run of preprocess.py on files that are not what the first one wrote."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dsgpt.common.errors import UserError
from dsgpt.data.token_file import TokenFileError


@pytest.fixture
def again(prepare_here, corpus: Path, bytes_tokenizer: Path, tmp_path: Path) -> Callable[[], None]:
    """Prepare ``out`` in the test's folder, and come back with what does the same once more."""

    def prepare() -> None:
        prepare_here("--input", corpus, "--tokenizer", bytes_tokenizer, "--output_dir", "out", cwd=tmp_path)

    prepare()
    return prepare


def test_a_file_that_changed_is_not_taken_for_prepared(again, tmp_path):
    path = tmp_path / "out" / "train.bin"
    data = path.read_bytes()
    path.write_bytes(data[2:] + data[:2])
    with pytest.raises(TokenFileError, match=r"train\.bin: its sha256 is .* make it again with .* --overwrite"):
        again()


def test_a_copy_is_hashed_once(again, tmp_path, capsys):
    os.utime(tmp_path / "out" / "val.bin", ns=(5, 5))
    again()
    said = capsys.readouterr().out
    assert "val.bin changed on disk since it was prepared (or was copied): hashed again" in said
    assert "already prepared" in said
    again()
    said = capsys.readouterr().out
    assert "hashed again" not in said
    assert "already prepared" in said


@pytest.mark.parametrize("name", ["train.json", "tokenizer/tokenizer.json"])
def test_a_file_of_another_preparation_is_told(again, tmp_path, name):
    path = tmp_path / "out" / name
    if name == "train.json":
        path.unlink()
    else:
        path.write_text("{}")
    with pytest.raises(UserError, match=r"not the file that preparation\.json describes; replace it with --overwrite"):
        again()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"identity": 5}', "[" * 200])
def test_a_record_that_is_none_is_told(again, tmp_path, text):
    (tmp_path / "out" / "preparation.json").write_text(text)
    with pytest.raises(UserError, match=r"preparation\.json: is not the record of a preparation \(.*--overwrite"):
        again()


def test_the_record_keeps_no_time_that_goes_stale(again, tmp_path):
    splits = json.loads((tmp_path / "out" / "preparation.json").read_text())["splits"]
    assert splits.keys() == {"train", "val"}
    assert not {"size", "mtime_ns"} & splits["train"].keys()
