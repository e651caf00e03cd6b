"""Invalid or oversized JSON gives an error of one line; a value of the wrong type is named with its place."""

import time
from dataclasses import dataclass

import pytest

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
    import os

    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * 11)
    (tmp_path / "list").write_bytes(b"[]")
    for name, message in (
        ("pipe", "not a regular file"),
        ("missing", "No such file"),
        ("large", "larger than 10 bytes"),
    ):
        with pytest.raises(JsonError, match=message):
            read_bytes(tmp_path / name, max_bytes=10)
    with pytest.raises(JsonError, match="Is a directory"):
        read_bytes(tmp_path)
    with pytest.raises(JsonError, match="object in braces"):
        read_object(tmp_path / "list")
