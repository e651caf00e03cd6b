"""Seeded damage to files: to their bytes, and to the values of JSON that stays JSON."""

import copy
import io
import json
import random
import zipfile
from typing import Any

ODD_VALUES: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2**63,
    10**30,
    10**400,
    1e308,
    -0.5,
    0.5,
    "",
    "a",
    "1",
    "../../outside",
    "/etc/hostname",
    "\0",
    "\u202e\n",
    "x" * 300,
    "x" * 5000,
    "\u00e9" * 200,
    [],
    {},
    [[]],
    [None],
    {"": {}},
    ["a", 1, None],
    {"type": []},
]
RAW_TEXTS = [
    b"",
    b" ",
    b"null",
    b"[]",
    b"{}",
    b'"text"',
    b"NaN",
    b"[" * 200_000,
    b'{"a":' * 5000 + b"1" + b"}" * 5000,
    b"\xff\xfe{\0}\0",
    b"\xef\xbb\xbf{}",
    b'{"step": 1e999}',
    b'["\\ud800"]',
    b"\x80\x04}q\x00.",  # a pickle
    b"9" * 10_000,
    b"x" * 300,
    b"\xff" * 190,
]


def mangle_bytes(data: bytes, chance: random.Random) -> bytes:
    """``data`` with one thing wrong with its bytes."""
    place, end = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    ways = [
        lambda: data[:place],
        lambda: data[:place] + bytes([chance.randrange(256)]) + data[place + 1 :],
        lambda: data[:place] + data[end:],
        lambda: data[:end] + data[place:],
        lambda: data[:place] + chance.randbytes(chance.randrange(1, 9)) + data[place:],
        lambda: data[:place] + chance.choice((b"[", b"{", b'"', b",", b":", b"\\", b"\0")) + data[place:],
        lambda: chance.choice(RAW_TEXTS),
    ]
    return chance.choice(ways)()


def mangle_json(data: bytes, chance: random.Random) -> bytes:
    """``data`` with one to three values or keys changed; still JSON."""
    value = json.loads(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        value = _changed(value, chance)
    return json.dumps(value).encode()


def mangle_inside(data: bytes, chance: random.Random, *, keys: tuple[str, ...]) -> bytes:
    """``data`` with one place below one of the top-level ``keys`` changed; still JSON."""
    value = json.loads(data)
    key = chance.choice(keys)
    return json.dumps(value | {key: _changed(value[key], chance)}).encode()


def _changed(value: Any, chance: random.Random) -> Any:
    """``value`` with one place in it changed, chosen by descending at random."""
    value = copy.copy(value)
    if not value or not isinstance(value, dict | list) or chance.random() < 0.05:
        return copy.deepcopy(chance.choice(ODD_VALUES))
    key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
    way = chance.random()
    if way < 0.15:
        del value[key]
    elif way < 0.25 and isinstance(value, dict):
        value[chance.choice(("", "unknown", "x" * 300, str(key).upper()))] = value[key]
    elif way < 0.3 and isinstance(value, list):
        value += [value[key]] * chance.choice((1, 50))
    else:
        value[key] = _changed(value[key], chance)
    return value


def mangle_lines(data: bytes, chance: random.Random) -> bytes:
    """JSON lines with one line mangled, lost or doubled."""
    lines = data.splitlines(keepends=True)
    place = chance.randrange(len(lines))
    ways = [
        lambda: [],
        lambda: [lines[place]] * 2,
        lambda: [mangle_json(lines[place], chance) + b"\n"],
        lambda: [mangle_bytes(lines[place], chance)],
    ]
    return b"".join([*lines[:place], *chance.choice(ways)(), *lines[place + 1 :]])


def mangle_safetensors(data: bytes, chance: random.Random) -> bytes:
    """A safetensors file with its header (a length and JSON) mangled, or its bytes."""
    size = int.from_bytes(data[:8], "little")
    if chance.random() < 0.3:
        return mangle_bytes(data, chance)
    header = mangle_json(data[8 : 8 + size], chance)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def flip_bits(data: bytes, chance: random.Random) -> bytes:
    """``data`` with one to three bits flipped, mostly in its first half kilobyte, where opcodes of a pickle are."""
    flipped = bytearray(data)
    for _ in range(chance.randrange(1, 4)):
        flipped[chance.randrange(len(data) if chance.random() < 0.1 else min(len(data), 512))] ^= 1 << chance.randrange(
            8
        )
    return bytes(flipped)


def mangle_torch(data: bytes, chance: random.Random) -> bytes:
    """A file of ``torch.save``: a zip archive with a mangled pickle or byte order; before torch 1.6, only pickles."""
    if chance.random() < 0.2:
        return mangle_bytes(data, chance)
    if not zipfile.is_zipfile(io.BytesIO(data)):
        return flip_bits(data, chance)
    mangled = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(mangled, "w") as after:
        for name in before.namelist():
            part = before.read(name)
            if name.endswith("/data.pkl"):
                part = chance.choice((flip_bits, flip_bits, flip_bits, mangle_bytes))(part, chance)
            if name.endswith("/byteorder") and chance.random() < 0.1:
                part = chance.choice((b"big", b"odd", b"", b"\xff"))
            after.writestr(name, part)
    return mangled.getvalue()
