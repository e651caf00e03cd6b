"""What tests need besides Python packages. ``make test`` calls it first; see ``main``."""

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from dsgpt.benchmarks.hosts import REMOTE
from dsgpt.machine.probe import compiler, libaio_problem

WITHOUT = {
    "g++": re.compile(r"(no|needs a|No working) C\+\+ compiler|InvalidCxxCompiler|needs g\+\+"),
    "libaio-dev": re.compile(r"no libaio|needs libaio-dev"),
    "chromium": re.compile(r"Chromium is missing"),
    "slurm-wlm": re.compile(r"needs slurm-wlm"),
    "munge": re.compile(r"needs munge"),
    "openssh-server": re.compile(r"needs openssh-server"),
    "pdsh": re.compile(r"needs .*\bpdsh\b"),
    "iptables": re.compile(r"need iptables"),
    "bindfs": re.compile(r"needs bindfs"),
    "faketime": re.compile(r"needs faketime"),
    "iproute2": re.compile(r"needs iproute2"),
    "strace": re.compile(r"needs strace"),
}
"""Debian package to what a test says that fails without it, or that is skipped."""
DAEMONS = {"slurm-wlm": "slurmctld", "munge": "munged"}
"""Debian package to its daemon, which is on the PATH of root."""
FAULTS = {"iproute2": "ip"} | {name: name for name in ("iptables", "bindfs", "faketime", "strace")}
"""Debian package to its command: what makes the hosts of a test, disturbs them, and records what a run writes."""
MAY_LACK = re.compile(r"Skipped: (starts |this (kernel|system) )")
"""Reasons to leave out a test under ``CI=true``, too: ``--without-processes``, and what only another kernel has."""


def browser() -> str | None:
    """The command of Chromium or Chrome, installed by the system or by Playwright."""
    own = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright")
    found = sorted(own.glob("chromium-*/chrome-linux*/chrome"))
    return shutil.which("chromium") or shutil.which("google-chrome") or (str(found[-1]) if found else None)


@cache
def missing() -> list[str]:
    """The packages that this machine lacks."""
    found = compiler()
    lacks = {"g++": not found, "libaio-dev": not found or libaio_problem(found), "chromium": not browser()}
    lacks |= {package: not shutil.which(name) for package, name in (DAEMONS | REMOTE | FAULTS).items()}
    return [package for package in WITHOUT if lacks[package]]


def command() -> str:
    """What installs the missing packages."""
    return f"apt-get install {' '.join(missing())}"


def lacking(text: str) -> str | None:
    """The missing package for which a test failed or was skipped that says ``text``."""
    named = (package for package, words in WITHOUT.items() if words.search(text))
    return next((package for package in named if package in missing()), None)


def main() -> int:
    """Install what is missing, as root on Debian or Ubuntu. Under ``CI=true`` it is an error if something still is.

    Elsewhere the tests that need it are left out (``conftest.py``). Also says that the first tests compile for long.
    """
    if missing() and os.geteuid() == 0 and shutil.which("apt-get"):
        print(f"The tests need packages of the system that are not installed: {command()}", flush=True)
        _install([*missing()])
        missing.cache_clear()
    if missing():
        print(f"not installed: {', '.join(missing())}; as root: {command()}", file=sys.stderr, flush=True)
        if os.environ.get("CI") == "true":
            print("error: under CI=true no test may be left out", file=sys.stderr)
            return 1
    if compiler() and not _compiled():
        print("The first tests compile DeepSpeed's CPU Adam and asynchronous I/O, once: 1 to 8 minutes on two cores.")
    return 0


def _install(packages: list[str]) -> None:
    """Errors are apt's own, and what is still missing is found afterwards."""
    if "chromium" in packages and "ID=debian" not in Path("/etc/os-release").read_text().splitlines():
        packages.remove("chromium")  # Ubuntu's is a snap, which needs more than apt
        subprocess.run([sys.executable, "-m", "playwright", "install", "--with-deps", "chromium"], check=False)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
        subprocess.run(["apt-get", "-qq", *words], env=environment, check=False)


def _compiled() -> bool:
    from dsgpt.strategies.deepspeed.setup import ops_folder

    return all((ops_folder() / name / f"{name}.so").exists() for name in ("cpu_adam", "async_io"))


if __name__ == "__main__":
    sys.exit(main())
