"""Files, JSON files, locks, and small helpers of the common room."""

import errno
import fcntl
import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import ANY

import pytest

from dsgpt.common.command_line import POSITIVE, choice, flag, part, read_options, require_flags, value
from dsgpt.common.errors import Problems, UserError
from dsgpt.common.files import Lock, NoLocksError, write_atomic, write_json_atomic
from dsgpt.common.json_files import (
    MAX_DEPTH,
    Finite,
    JsonError,
    Positive,
    parse_as,
    parse_json,
    read_bytes,
    read_object,
)
from dsgpt.common.text import counted, divisors, divisors_around, largest_divisor, machine_words, multiples_around

# Files are replaced whole or not at all.


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
        (b"{", "Expecting property name"),
        (b"[" * 200_000, f"nested more than {MAX_DEPTH} deep"),
        (b'{"a":' * 200_000, f"nested more than {MAX_DEPTH} deep"),
        (b"NaN", "NaN is not a JSON number"),
        (b"-Infinity", "-Infinity is not a JSON number"),
        (b"[1e999]", "1e999 is too large"),
        (b"9" * 5000, "a whole number in it has more than 4,300 digits"),
        (b'"\xff"', "not UTF-8 text (byte 1)"),
        ("{}".encode("utf-16"), "it is UTF-16 text, not UTF-8"),
        ("{}".encode("utf-16-le"), "it is UTF-16-LE text, not UTF-8"),
        (b'{"a": 1, "a": 2}', 'the key "a" is given twice'),
        (b'["\\ud800"]', "half of a surrogate pair"),
    ],
    ids=lambda value: value[:12] if isinstance(value, bytes) else "",
)
def test_invalid_json_is_an_error_of_one_line(data, message):
    with pytest.raises(JsonError) as caught:
        parse_json(data)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


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


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[]", "Input should be an object, not []"),
        (b"{}", "layers: Field required"),
        (b'{"layers": 0}', "layers: Input should be greater than or equal to 1, not 0"),
        (b'{"layers": true}', "layers: Input should be a valid integer, not True"),
        (b'{"layers": "1"}', "layers: Input should be a valid integer, not '1'"),
        (b'{"layers": 1, "sizes": [1, 2.5]}', "sizes.1: Input should be a valid integer"),
        (b'{"layers": 1, "extra": 2}', "extra: Unexpected keyword argument"),
        (b'{"layers": 1, "rate": "' + b"x" * 10_000 + b'"}', "rate: Input should be a valid number, not 'xxx"),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_named_with_its_place(data, message):
    with pytest.raises(JsonError) as caught:
        parse_as(data, Shape)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 200


def test_many_faults_are_counted():
    with pytest.raises(JsonError, match=r"; and 997 more$"):
        parse_as(b'{"layers": 1, "sizes": [' + b",".join([b'"a"'] * 1000) + b"]}", Shape)


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
            read_bytes(tmp_path / name, max_bytes=10)
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
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with Lock.of_file(tmp_path / "lock") as lock, pytest.raises(OSError) as refused:
        lock.take()
    assert (type(refused.value), refused.value.errno) == (kind, number)


# Divisors and multiples next to a number, against counting.


@pytest.mark.parametrize("number", [*range(1, 50), 97, 360, 4096])
def test_divisors_are_those_that_counting_finds(number):
    expected = [d for d in range(1, number + 1) if number % d == 0]
    assert divisors(number) == expected
    assert largest_divisor(number, at_most=8) == max(d for d in expected if d <= 8)


def test_neighbours_in_words():
    assert [divisors_around(12, wanted) for wanted in (5, 8, 13)] == ["4 or 6", "6 or 12", "12"]
    assert [counted(number, "file") for number in (0, 1, 2000)] == ["0 files", "1 file", "2,000 files"]
    assert [multiples_around(number, 4) for number in (2, 5, 11)] == ["4", "4 or 8", "8 or 12"]


# The command line of every script: all mistakes are noted, and words are read as argparse reads them.


@dataclass(frozen=True, kw_only=True)
class Asked:
    place: str | None = flag(str, "PLACE", "where", name="place", nargs="?")
    text: str | None = flag(str, "TEXT", "what")
    share: float | None = flag(value(float, accepts=lambda share: share < 1, must_be="a share"), "X", "how much")
    many: tuple[str, ...] = flag(str, "X", "several", default=(), nargs="+")
    kind: str = flag(choice(("one", "two")), "KIND", "which", default="one", name="--sort", needs="a kind")


def read(*words: str) -> tuple[Asked, Problems]:
    return read_options(Asked, words, elsewhere={"--size": "give --share"}, description="For a test.")


@pytest.mark.parametrize("word", ["-", "-1", "-0.5", "- a text", "--a text", "x"])
def test_words_that_argparse_reads_as_values(word):
    options, problems = read("--text", word)
    assert (options, bool(problems)) == (Asked(text=word), False)


def test_all_mistakes_are_noted_and_a_wrong_value_is_the_default(snapshot):
    words = ["here", "--text", "-x", "--many", "--sort", "tow", "--share", "1", "--texts=a", "--size", "3", "--zzz"]
    options, problems = read(*words, "--text")
    assert options == Asked(place="here")
    with pytest.raises(UserError) as caught:
        problems.raise_if_any()
    assert list(caught.value.problems) == snapshot


def test_values_are_those_of_the_fields():
    assert read("--many", "a", "b", "--sort", "two", "--share", "0.5") == (
        Asked(many=("a", "b"), kind="two", share=0.5),
        ANY,
    )


@pytest.mark.parametrize(
    ("words", "mistake"),
    [((), "--sort is missing: give a kind"), (("--sort", "tow"), "--sort must be one of one, two, not tow")],
)
def test_a_missing_flag_is_noted_unless_it_was_wrong(words, mistake):
    _, problems = read(*words)
    require_flags(replace(Asked(), kind=None), problems)
    with pytest.raises(UserError) as caught:
        problems.raise_if_any()
    assert [line.partition(" (did")[0] for line in caught.value.problems] == [mistake]


def test_a_part_of_the_options_has_its_flags_and_a_required_flag_must_be_there():
    @dataclass(frozen=True, kw_only=True)
    class Whole:
        must: int = flag(POSITIVE, "N", "needed", required=True)
        asked: Asked = part(Asked)

    with pytest.raises(UserError, match="the following arguments are required: --must; see --help"):
        read_options(Whole, [], description="For a test.")
    options, _ = read_options(Whole, ["--must", "1_000", "--text", "a"], description="For a test.")
    assert options == Whole(must=1000, asked=Asked(text="a"))


@pytest.mark.parametrize(
    ("hardware", "machine"),
    [
        ({"gpu_name": "A100", "cpu_name": "EPYC 7763", "cpu_count": 64}, "A100; EPYC 7763, 64 cores"),
        ({"gpu_name": None, "cpu_name": None, "cpu_count": 2}, "CPU, 2 cores"),
        ({"gpu_name": 5, "cpu_name": "EPYC"}, "5; EPYC"),  # of a record that another program wrote
        ({}, "not recorded"),
    ],
)
def test_a_machine_in_words(hardware, machine):
    assert machine_words(hardware) == f"{machine} (instruction sets: not recorded)"
