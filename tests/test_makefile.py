"""Without a usable Python, ``make`` prints one line: what is wrong, which versions work and what to do."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import REPOSITORY

MAKE = shutil.which("make")
INSTALLING = {"install", "demo", "check", "test", "test-long", "parity", "faults", "vllm", "records", "charts",
              "dashboard", "screenshots"}  # fmt: skip
GOALS = ("demo", "vllm")
"""Each checks the interpreter in a recipe of its own; the others depend on that of ``demo``."""
WORKING_VERSIONS = "3.11, 3.12 or 3.13"


@pytest.fixture(autouse=True)
def outside_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what a ``make`` that runs the tests exports: its flags, and the variables of its command line."""
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHON", "VENV", "STEPS", "STRATEGIES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files of a fresh clone that ``make`` needs; nothing is installed."""
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, folder)
    return folder


def interpreter(
    path: Path, *, version: tuple[int, int] | None = None, without: str | None = None, pip: bool = True
) -> Path:
    """A command that runs this Python, but reports another ``version``, or lacks the module ``without``.

    Without ``pip``, it makes environments that have none, in a fraction of the time.
    """
    pretend = "import sys; "
    if version:
        pretend += f"sys.version_info = ({version[0]}, {version[1]}, 7, 'final', 0); "
    if without:
        pretend += f"sys.modules[{without!r}] = None; "
    reported = ".".join(map(str, version or sys.version_info[:2])) + ".7"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = --version ]; then echo "Python {reported}"; exit; fi\n'
        f'if [ "$1" = -c ]; then exec {sys.executable} -c "{pretend}exec(sys.argv[1])" "$2"; fi\n'
        f'exec {sys.executable} "$@"{"" if pip else " --without-pip"}\n'
    )
    path.chmod(0o755)
    return path


def make(goal: str, *arguments: str, clone: Path, **variables: str) -> list[str]:
    """The error lines of a ``make`` that fails, without the last one, which is make's."""
    assert MAKE is not None
    done = subprocess.run(
        [MAKE, goal, *arguments],
        cwd=clone,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert sorted(path.name for path in clone.iterdir()) == ["Makefile", "pyproject.toml", "requirements.txt"]
    lines = done.stderr.splitlines()
    assert lines[-1].startswith("make: *** ")
    return lines[:-1]


@pytest.mark.parametrize("goal", GOALS)
def test_no_python(clone, goal):
    (line,) = make(goal, clone=clone, PATH=str(clone / "nothing"))
    assert line == (
        f"error: python3 was not found: install Python {WORKING_VERSIONS} "
        "(Debian: apt-get install python3 python3-venv)"
    )


@pytest.mark.parametrize("goal", GOALS)
def test_a_name_that_is_not_a_python(clone, goal):
    (line,) = make(goal, "PYTHON=python3.99", clone=clone)
    assert line.startswith(f"error: python3.99 was not found: install Python {WORKING_VERSIONS}")
    assert make(goal, clone=clone, PYTHON="python3.99") == [line]


@pytest.mark.parametrize("version", [(3, 9), (3, 10), (3, 14), (2, 7), (4, 0)])
def test_a_version_that_does_not_work(clone, tmp_path, version):
    python = interpreter(tmp_path / "python", version=version)
    (line,) = make("demo", f"PYTHON={python}", clone=clone)
    assert line == (
        f"error: Python {version[0]}.{version[1]}.7 is not supported: install Python {WORKING_VERSIONS}, or name one: "
        "make demo PYTHON=python3.12"
    )


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_no_venv(clone, tmp_path, goal, module):
    python = interpreter(tmp_path / "python", without=module, version=(3, 12))
    (line,) = make(goal, f"PYTHON={python}", clone=clone)
    assert line == (
        f"error: {python} cannot make virtual environments: install its venv module "
        "(Debian: apt-get install python3-venv)"
    )


@pytest.mark.parametrize(("version", "pip"), [((3, 11), True), ((3, 13), False)])
def test_a_version_that_works_is_used(clone, tmp_path, version, pip):
    """The environment is made. The next step fails: it installs a package that does not exist."""
    python = interpreter(tmp_path / "python", version=version, pip=pip)
    (clone / "requirements.txt").write_text("./there-is-no-such-package\n")
    command = [MAKE, "demo", f"PYTHON={python}"]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is not supported" not in done.stderr
    assert (clone / ".venv" / "bin" / "python").exists()
    assert not (clone / ".venv" / "bin" / ".installed").exists()


def test_the_makefile_names_the_versions_of_the_package():
    text = (REPOSITORY / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.11,<3.14"' in text
    assert f"VERSIONS := {WORKING_VERSIONS}\n" in (REPOSITORY / "Makefile").read_text()


def test_help_is_the_default(clone):
    # Under `make test` an inner make would print its folder.
    command = [MAKE, "--no-print-directory"]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=True)
    goals = {line.split()[1] for line in done.stdout.splitlines()}
    assert goals == {*INSTALLING, "size", "test-pythons"}


def test_every_goal_checks_the_interpreter_first(clone):
    """All but ``vllm`` lead to the environment's file."""
    command = [MAKE, "--print-data-base", "--dry-run", "help"]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=True)
    rules = dict(re.findall(r"^([\w./-]+): (.*)$", done.stdout, flags=re.MULTILINE))

    def needs(goal: str) -> set[str]:
        named = set(rules.get(goal, "").split())
        return named.union(*map(needs, named))

    assert [goal for goal in sorted(INSTALLING - {"vllm"}) if ".venv/bin/.installed" not in needs(goal)] == []


def test_other_pythons_are_found_or_skipped(clone, tmp_path):
    """In PATH or among pyenv's versions; a command that has the name but runs no Python is skipped."""
    shim = tmp_path / "bin" / "python3.12"
    shim.parent.mkdir()
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2; exit 127\n")
    shim.chmod(0o755)
    interpreter(tmp_path / "pyenv" / "versions" / "3.13.7" / "bin" / "python", version=(3, 13))
    environment = os.environ | {"PATH": f"{shim.parent}:/usr/bin:/bin", "PYENV_ROOT": str(tmp_path / "pyenv")}
    command = [MAKE, "--dry-run", "test-pythons"]  # make still runs lines that start another make
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, check=True)
    assert "\nPython 3.12 is not installed here: nothing is tested with it\n" in done.stdout
    assert (
        ".venv-3.13/bin/python -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder --without-processes"
        in done.stdout
    )
    assert ".venv-3.13/bin/python src/demo.py --steps 6 --into .venv-3.13/demo" in done.stdout
    assert ".venv-3.12/bin" not in done.stdout
