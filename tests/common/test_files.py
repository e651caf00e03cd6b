"""Files, JSON files, locks, and small helpers of the common room."""

import errno
import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest

from dsgpt.common.command_line import flag, read_options
from dsgpt.common.files import Lock, NoLocksError, write_atomic, write_json_atomic
from dsgpt.common.json_files import MAX_DEPTH, Finite, JsonError, Positive, parse_as, parse_json, read_object
from dsgpt.common.text import divisors, largest_divisor

# Files are replaced whole or not at all.


@pytest.mark.parametrize("value", [float("nan"), {"a": [float("inf")]}, {"a": object()}])
def test_a_file_is_replaced_whole_or_stays_if_the_value_is_not_json(tmp_path, value):
    path = tmp_path / "a.json"
    write_atomic(path, b"old")
    with pytest.raises((ValueError, TypeError)):
        write_json_atomic(path, value)
    assert path.read_text() == "old"
    write_json_atomic(path, {"new": [1, None]})
    assert json.loads(path.read_text()) == {"new": [1, None]}
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_rename_leaves_nothing_beside(tmp_path):
    (tmp_path / "folder" / "full").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        write_atomic(tmp_path / "folder", b"data")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


# Invalid or oversized JSON gives an error of one line; a value of the wrong type is named with its place.


@dataclass(frozen=True)
class Shape:
    layers: Positive
    sizes: tuple[int, ...] = ()
    rate: Finite | None = None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "Expecting value"),
        (b"[" * 200_000, f"nested more than {MAX_DEPTH} deep"),
        (b"NaN", "NaN is not a JSON number"),
        (b"[1e999]", "1e999 is too large"),
        (b"9" * 5000, "a whole number in it has more than 4,300 digits"),
        (b'"\xff"', "not UTF-8 text (byte 1)"),
        ("{}".encode("utf-16"), "it is UTF-16 text, not UTF-8"),
        (b'{"a": 1, "a": 2}', 'the key "a" is given twice'),
        (b'["\\ud800"]', "half of a surrogate pair"),
        (b"[]", "Input should be an object, not []"),
        (b'{"layers": 0}', "layers: Input should be greater than or equal to 1, not 0"),
        (b'{"layers": true}', "layers: Input should be a valid integer, not True"),
        (b'{"layers": "1"}', "layers: Input should be a valid integer, not '1'"),
        (b'{"layers": 1, "sizes": [1, 2.5]}', "sizes.1: Input should be a valid integer"),
        (b'{"layers": 1, "extra": 2}', "extra: Unexpected keyword argument"),
        (b'{"layers": 1, "rate": "' + b"x" * 10_000 + b'"}', "rate: Input should be a valid number, not 'xxx"),
        (b'{"layers": 1, "sizes": [' + b",".join([b'"a"'] * 1000) + b"]}", "; and 997 more"),
    ],
    ids=lambda value: value[:12] if isinstance(value, bytes) else "",
)
def test_invalid_json_and_values_of_another_type_are_an_error_of_one_line(data, message):
    with pytest.raises(JsonError) as caught:
        parse_as(data, Shape)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "data", [b'"' + b'\\"' * 1_000_000, b'{"' + b"[" * 1_000_000, b'{"a": "' + b"\\" * 1_000_001, b'["' * 100_000]
)
def test_no_text_takes_quadratic_time(data):
    """The search takes far less than 30 s. One that began again at every quote took minutes."""
    started = time.monotonic()
    with pytest.raises(JsonError):
        parse_json(data)
    assert time.monotonic() - started < 30


def test_brackets_in_strings_are_not_nesting():
    assert parse_json(b'["' + b"[" * 100 + b'\\"]{"]') == ["[" * 100 + '"]{']
    assert parse_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)


def test_valid_values_are_typed():
    assert parse_as(b'{"layers": 2, "sizes": [1], "rate": 3}', Shape) == Shape(layers=2, sizes=(1,), rate=3.0)
    assert parse_as(b'{"layers": 2, "more": 1}', Shape, unknown_keys=True) == Shape(layers=2)


def test_only_regular_files_within_the_limit_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * 11)
    (tmp_path / "list").write_bytes(b"[]")
    messages = {"pipe": "not a regular file", "missing": "No such file", "large": "larger than 10 bytes"}
    for name, message in (messages | {"": "Is a directory"}).items():
        with pytest.raises(JsonError, match=message):
            read_object(tmp_path / name, max_bytes=10)
    with pytest.raises(JsonError, match="object in braces"):
        read_object(tmp_path / "list")


# Locks between processes. The tests that kill runs also test that the system frees the lock of a killed process.


def test_a_lock_has_one_holder_until_it_is_released(tmp_path: Path):
    with Lock.of_file(tmp_path / "lock") as first, Lock.of_file(tmp_path / "lock") as second:
        assert first.take() and not second.take()
        first.release()
        assert second.take(wait=True)
    with Lock.of_file(tmp_path / "lock") as third:
        assert third.take()
    assert (tmp_path / "lock").exists()


def test_a_shared_lock_excludes_only_exclusive_ones(tmp_path: Path):
    with Lock.of_folder(tmp_path) as first, Lock.of_folder(tmp_path) as second, Lock.of_folder(tmp_path) as third:
        assert first.take(shared=True) and second.take(shared=True) and not third.take()


def test_links_are_followed_only_on_request(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    for link, target in (("file-link", "file"), ("folder-link", "folder")):
        (tmp_path / link).symlink_to(tmp_path / target)
    with pytest.raises(OSError) as refused:
        Lock.of_file(tmp_path / "file-link")
    assert refused.value.errno == errno.ELOOP
    assert not (tmp_path / "file").exists()
    with pytest.raises(NotADirectoryError):
        Lock.of_folder(tmp_path / "folder-link")
    with Lock.of_folder(tmp_path / "folder-link", follow_link=True) as lock:
        assert lock.take()


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOLCK, NoLocksError), (errno.EIO, OSError)])
def test_missing_locks_and_failing_ones_raise_different_errors(tmp_path: Path, monkeypatch, number, kind):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, os.strerror(number))))
    with Lock.of_file(tmp_path / "lock") as lock, pytest.raises(OSError) as refused:
        lock.take()
    assert (type(refused.value), refused.value.errno) == (kind, number)


# Divisors and multiples next to a number, against counting.


@pytest.mark.parametrize("number", [*range(1, 50), 97, 360, 4096])
def test_divisors_are_those_that_counting_finds(number):
    expected = [d for d in range(1, number + 1) if number % d == 0]
    assert divisors(number) == expected
    assert largest_divisor(number, at_most=8) == max(d for d in expected if d <= 8)


# The words of a command line are read as argparse reads them; ``tests/goldens/refusals.txt`` has the mistakes.


@dataclass(frozen=True, kw_only=True)
class Asked:
    text: str | None = flag(str, "TEXT", "what")
    many: tuple[str, ...] = flag(str, "X", "several", default=(), nargs="+")


@pytest.mark.parametrize("word", ["-", "-1", "-0.5", "- a text", "--a text", "x"])
def test_words_that_argparse_reads_as_values(word):
    options, problems = read_options(Asked, ["--text", word, "--many", "a", "b"], description="For a test.")
    assert (options, bool(problems)) == (Asked(text=word, many=("a", "b")), False)
