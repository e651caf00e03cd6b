"""Files are replaced whole or not at all."""

import json

import pytest

from dsgpt.common.files import write_atomic, write_json_atomic


def test_replacing_leaves_one_file(tmp_path):
    path = tmp_path / "a.json"
    write_atomic(path, b"old")
    write_json_atomic(path, {"new": [1, None]})
    assert json.loads(path.read_text()) == {"new": [1, None]}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("value", [float("nan"), {"a": [float("inf")]}, {"a": object()}])
def test_a_value_that_is_not_json_leaves_the_old_file(tmp_path, value):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises((ValueError, TypeError)):
        write_json_atomic(path, value)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_rename_leaves_nothing_beside(tmp_path):
    (tmp_path / "folder" / "full").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        write_atomic(tmp_path / "folder", b"data")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]
