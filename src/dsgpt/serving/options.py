"""What ``src/serve.py`` can be asked for, its limits, and the packages that it needs. Imports no torch."""

import ipaddress
import os
import socket
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from dsgpt.common.errors import UserError
from dsgpt.common.json_files import JsonError, read_bytes
from dsgpt.common.problems import Problems

PACKAGES = ("starlette", "uvicorn", "h11", "prometheus_client")
"""What serving imports. The extra ``serve`` of ``pyproject.toml`` installs it."""
API_KEY = "DSGPT_API_KEY"
"""The environment variable that may hold the key."""
SHORTEST_KEY = 16
_MAX_KEY_BYTES = 4096


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


def api_key_of(options: ServeOptions) -> str | None:
    """The key that requests must bring; None if they need none.

    Raises:
        UserError: a key is needed and missing, or is unusable.
    """
    source, key = API_KEY, os.environ.get(API_KEY)
    if options.api_key_file is not None:
        source = f"--api_key_file {options.api_key_file}"
        try:
            key = read_bytes(options.api_key_file, max_bytes=_MAX_KEY_BYTES).decode("ascii").strip()
        except (JsonError, UnicodeDecodeError) as error:
            raise UserError(f"{source}: is not a readable key ({error})") from error
    if key is None:
        if is_loopback(options.host):
            return None
        raise UserError(
            f"--host {options.host}: other machines can reach it, so requests need a key: put one into {API_KEY} or a "
            "file for --api_key_file, or use --host 127.0.0.1"
        )
    if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(
            f"{source}: a key has at least {SHORTEST_KEY} ASCII characters and no spaces, for example the output of "
            "openssl rand -hex 32"
        )
    return key


def check_packages(problems: Problems) -> None:
    """Refuse to serve without the packages of the extra; imports none of them."""
    if missing := [package for package in PACKAGES if find_spec(package) is None]:
        problems.add(
            f"serving needs {' and '.join(missing)}, not installed here: in the root of the repository, run "
            'python -m pip install -e ".[serve]"'
        )
