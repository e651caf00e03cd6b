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
from typing import Any

from dsgpt.common.command_line import COUNT, POSITIVE, flag, part, read_options, require_flags
from dsgpt.common.errors import Problems, UserError
from dsgpt.common.json_files import JsonError, read_bytes
from dsgpt.config.options import DEVICES
from dsgpt.inference.commands import listed, which_checkpoint

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


def _number(text: str, default: int, **more: Any) -> Any:
    return flag(POSITIVE, "N", f"{text} (default: {default:,})", default=default, **more)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a server accepts."""

    batch: int = _number("sequences decoded together", 8, name="--max_batch")
    queue: int = flag(
        COUNT,
        "N",
        "sequences that may wait; further ones are refused with 429 (default: %(default)s)",
        default=64,
        name="--max_queue",
    )
    new_tokens: int | None = flag(
        POSITIVE, "N", "the most tokens of a completion (default: the model's context length)", name="--max_tokens"
    )
    body_bytes: int = _number("the largest request", 262_144, name="--max_body_bytes")
    request_sec: float = _number("seconds from a request to the end of its answer", 120, name="--request_timeout")
    stall_sec: float = _number(
        "seconds in which a client sends its request, or takes a part of the answer", 20, name="--stall_timeout"
    )


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The command line."""

    checkpoint: Path = flag(
        Path,
        "DIR",
        "run folder, one checkpoint in it, a portable folder, or a Hugging Face folder of a GPT-2",
        needs="a run folder such as checkpoint/demo-zero1",
    )
    which: str = which_checkpoint()
    device: str = listed(DEVICES, "where to compute")
    model_name: str | None = flag(str, "NAME", "the model's name in requests (default: the folder's)")
    host: str = flag(str, "ADDRESS", "where to listen (default: %(default)s)", default="127.0.0.1")
    api_key_file: Path | None = flag(
        Path,
        "FILE",
        "holds the key that requests must bring, or several: NAME KEY [REQUESTS_PER_MINUTE] a line (default: "
        f"{API_KEY} of the environment, if it is set)",
    )
    port: int = flag(COUNT, "N", "0 for any free port (default: 8,000)", default=8000)
    limits: Limits = part(Limits)


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


# The command.

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
    options, problems = read_options(ServeOptions, description=DESCRIPTION, epilog=EXAMPLES)
    require_flags(options, problems)
    check_packages(problems)
    problems.raise_if_any()
    from dsgpt.inference.server.server import serve as run_server  # noqa: PLC0415 - torch takes seconds; --help should not

    return run_server(options)
