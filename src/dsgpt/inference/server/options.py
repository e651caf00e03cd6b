"""``src/serve.py``: what it can be asked for, its limits, keys, and the packages that it needs. Imports no torch."""

import ipaddress
import os
import re
import socket
import stat
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from dsgpt.common.command_line import Parser, Reader, read_words
from dsgpt.common.errors import Problems, UserError
from dsgpt.common.json_files import JsonError, read_bytes
from dsgpt.config.options import DEVICES, WHICH_CHECKPOINT

PACKAGES = ("starlette", "uvicorn", "h11", "prometheus_client")
"""What serving imports. The extra ``serve`` of ``pyproject.toml`` installs it."""
API_KEY = "DSGPT_API_KEY"
"""The environment variable that may hold the key."""
SHORTEST_KEY = 16
KEY_FORM = (
    f"a key has at least {SHORTEST_KEY} ASCII characters and no spaces, for example the output of openssl rand -hex 32"
)
_MAX_KEY_BYTES = 64 << 10
_LINE = re.compile(r"([A-Za-z0-9_.-]{1,64})\s+(\S+)(?:\s+([1-9][0-9]{0,5}))?")


@dataclass(frozen=True, kw_only=True)
class Key:
    """An API key."""

    name: str
    """In metrics and messages, which never have the key."""
    secret: str = field(repr=False)
    per_minute: int | None = None
    """The most requests for completions in any 60 seconds; None for no limit."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a server accepts."""

    batch: int
    """Sequences that are decoded together."""
    queue: int
    """Sequences that may wait for a place among them; one more is refused with 429."""
    new_tokens: int | None
    """The most tokens of a completion; None for the model's context length."""
    body_bytes: int
    """Of a request."""
    request_sec: float
    """Seconds from the arrival of a request to the end of its answer."""
    stall_sec: float
    """Seconds in which a client has to send its request, or to take a part of the answer."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of the command line."""

    checkpoint: Path
    which: str
    model_name: str | None
    """Name of the model in requests; None for the name of the folder."""
    host: str
    port: int
    """0 for any free port."""
    api_key_file: Path | None
    device: str
    limits: Limits


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach ``host``.

    Raises:
        UserError: it is not a name or an address of this machine.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {host}: is not an address of this machine; use 127.0.0.1") from error
    return all(ipaddress.ip_address(str(address[4][0]).partition("%")[0]).is_loopback for address in found)


def keys_of(options: ServeOptions) -> list[Key]:
    """The keys of which requests must bring one; empty if they need none. Warns if others may read the file of them.

    Raises:
        UserError: a key is needed and missing, one is unusable, or others may write the file.
    """
    if options.api_key_file is not None:
        return _keys_in(options.api_key_file)
    key = os.environ.get(API_KEY)
    if key is None:
        if is_loopback(options.host):
            return []
        raise UserError(
            f"--host {options.host}: other machines can reach it, so requests need a key: put one into {API_KEY} or a "
            "file for --api_key_file, or use --host 127.0.0.1"
        )
    if not _usable(key):
        raise UserError(f"{API_KEY}: {KEY_FORM}")
    return [Key(name=API_KEY, secret=key)]


def _usable(key: str) -> bool:
    return len(key) >= SHORTEST_KEY and key.isascii() and key.isprintable() and " " not in key


def _keys_in(file: Path) -> list[Key]:
    source = f"--api_key_file {file}"
    try:
        text = read_bytes(file, max_bytes=_MAX_KEY_BYTES).decode("ascii")
        mode = file.stat().st_mode
    except (JsonError, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{source}: is not a readable key ({error})") from error
    problems, keys = Problems(), list[Key]()
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        problems.add(f"{source}: other users may write it, and so choose the keys: chmod go-w {file}")
    elif mode & (stat.S_IRGRP | stat.S_IROTH):
        print(f"warning: {source}: other users may read the keys: chmod go-r {file}", file=sys.stderr, flush=True)
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    for number, line in lines:
        found = _LINE.fullmatch(line.strip() if len(lines) > 1 or " " in line.strip() else f"{API_KEY} {line.strip()}")
        place = f"{source}: line {number}" if len(lines) > 1 else source
        if found is None:
            problems.add(f"{place}: write NAME KEY or NAME KEY REQUESTS_PER_MINUTE, or a KEY alone")
        elif not _usable(found[2]):
            problems.add(f"{place}: {KEY_FORM}")
        elif any(found[1] == key.name or found[2] == key.secret for key in keys):
            problems.add(f"{place}: its name or its key is also in an earlier line")
        else:
            keys.append(Key(name=found[1], secret=found[2], per_minute=int(found[3]) if found[3] else None))
    if not lines:
        problems.add(f"{source}: {KEY_FORM}")
    problems.raise_if_any()
    return keys


def check_packages(problems: Problems) -> None:
    """Refuse to serve without the packages of the extra; imports none of them."""
    if missing := [package for package in PACKAGES if find_spec(package) is None]:
        problems.add(
            f"serving needs {' and '.join(missing)}, not installed here: in the root of the repository, run "
            '.venv/bin/python -m pip install -e ".[serve]"'
        )


# The command line.

DESCRIPTION = """\
Answer requests for completions over HTTP, as OpenAI's interface does: /v1/completions, /v1/models, /health, and
/metrics for Prometheus. Nothing that a request says is logged."""
EXAMPLES = f"""\
examples:
  .venv/bin/python src/serve.py --checkpoint checkpoint/demo-zero1
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{{"model": "demo-zero1", "prompt": "def main(", "max_tokens": 32}}'
  {API_KEY}=$(openssl rand -hex 32) .venv/bin/python src/serve.py --checkpoint checkpoint/demo-zero1 --host 0.0.0.0"""


def serve() -> int:
    """Read the flags of ``src/serve.py``, and serve until a signal."""
    reader = Reader()
    flags = read_words(_build_parser(reader), reader)
    if flags.checkpoint is None and not reader.problems.mention("--checkpoint"):
        reader.problems.add("--checkpoint is missing: give a run folder such as checkpoint/demo-zero1")
    check_packages(reader.problems)
    reader.problems.raise_if_any()
    limits = Limits(
        batch=flags.max_batch,
        queue=flags.max_queue,
        new_tokens=flags.max_tokens,
        body_bytes=flags.max_body_bytes,
        request_sec=flags.request_timeout,
        stall_sec=flags.stall_timeout,
    )
    from dsgpt.inference.server.server import serve as run_server  # noqa: PLC0415 - torch takes seconds; --help should not

    return run_server(
        ServeOptions(
            checkpoint=flags.checkpoint,
            which=flags.which,
            model_name=flags.model_name,
            host=flags.host,
            port=flags.port,
            api_key_file=flags.api_key_file,
            device=flags.device,
            limits=limits,
        )
    )


def _build_parser(reader: Reader) -> Parser:
    parser = Parser(description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="run folder, one checkpoint in it, a portable folder, or a Hugging Face folder of a GPT-2",
    )
    for flag, allowed, text in (
        ("--which", WHICH_CHECKPOINT, "checkpoint of a run: the newest, or the one with the lowest validation loss"),
        ("--device", DEVICES, "where to compute"),
    ):
        parser.add_argument(
            flag,
            type=reader.choice(flag, allowed, allowed[0]),
            default=allowed[0],
            metavar="{" + ",".join(allowed) + "}",
            help=f"{text} (default: {allowed[0]})",
        )
    parser.add_argument("--model_name", metavar="NAME", help="the model's name in requests (default: the folder's)")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default: 127.0.0.1)")
    parser.add_argument(
        "--api_key_file",
        type=Path,
        metavar="FILE",
        help="holds the key that requests must bring, or several: NAME KEY [REQUESTS_PER_MINUTE] a line (default: "
        f"{API_KEY} of the environment, if it is set)",
    )
    _add_numbers(parser, reader)
    return parser


def _add_numbers(parser: Parser, reader: Reader) -> None:
    for flag, low, default, text in (
        ("--port", 0, 8000, "0 for any free port"),
        ("--max_batch", 1, 8, "sequences decoded together"),
        ("--max_queue", 0, 64, "sequences that may wait; further ones are refused with 429"),
        ("--max_tokens", 1, None, "the most tokens of a completion"),
        ("--max_body_bytes", 1, 262_144, "the largest request"),
        ("--request_timeout", 1, 120, "seconds from a request to the end of its answer"),
        ("--stall_timeout", 1, 20, "seconds in which a client sends its request, or takes a part of the answer"),
    ):
        shown = "the model's context length" if default is None else f"{default:,}"
        parser.add_argument(
            flag, type=reader.whole(flag, low=low), default=default, metavar="N", help=f"{text} (default: {shown})"
        )
