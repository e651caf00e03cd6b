"""What the tests stand on: which may be left out, and forked scripts; and what `make` refuses."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forked_ranks import run_script
from small_run import REPOSITORY

# Tests that are left out because the system lacks a package.


BRINGS = (
    "as root: apt-get install g++ libaio-dev chromium slurm-wlm munge openssh-server pdsh iptables bindfs faketime"
    " iproute2"
)


@pytest.mark.parametrize(
    ("ci", "counts"), [("", "1 failed, 1 passed, 3 skipped"), ("true", "4 failed, 1 passed in")], ids=["here", "ci"]
)
def test_tests_that_need_what_is_missing_are_left_out_except_in_ci(tmp_path, ci, counts):
    """Where no command is found."""
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_compiles(): assert not 'optimizer offload finds no C++ compiler: install one'\n"
        "def test_swaps(): pytest.skip('needs libaio-dev')\n"
        "def test_host(): pytest.skip('only root can make network namespaces')\n"
        "def test_else(): assert not 'another reason'\n"
        "def test_fine(): pass\n"
    )
    shutil.copy(REPOSITORY / "tests" / "conftest.py", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", tmp_path]
    command += ["-o", f"pythonpath={REPOSITORY / 'tests'}", tmp_path / "test_some.py"]
    bare = {"PATH": str(tmp_path), "PLAYWRIGHT_BROWSERS_PATH": str(tmp_path), "CXX": "", "CI": ci}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | bare)
    assert counts in done.stdout, done.stdout + done.stderr
    assert ("2 tests left out; they need, " + BRINGS in done.stdout) == (not ci)


# A forked script ends as one under a launcher does: else no test would see that it failed.


def test_the_first_failure_is_the_exit_code_and_ends_the_other_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1': raise SystemExit(3)\ntime.sleep(600)\n")
    assert run_script(script, [], ranks=2).returncode == 3
    script.write_text("print('before')\nraise KeyError('x')\n")
    done = run_script(script, [])
    assert (done.returncode, done.stdout) == (1, "before\n") and done.stderr.endswith("KeyError: 'x'\n")


# Without a usable Python, `make` prints one line: what is wrong, which versions work and what to do.

MAKE = shutil.which("make")
INSTALLING = {"install", "demo", "check", "test", "test-slow", "test-long", "parity", "faults", "vllm", "records",
              "charts", "dashboard", "screenshots"}  # fmt: skip
WORKING_VERSIONS = "3.11, 3.12 or 3.13"


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a fresh clone that ``make`` needs; nothing is installed. No ``make`` runs around it."""
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHON", "VENV", "STEPS", "STRATEGIES"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, folder)
    return folder


def interpreter(path: Path, *, version: tuple[int, int], without: str = "") -> Path:
    """A command that runs this Python, but reports another ``version``, or lacks a module."""
    pretend = f"import sys; sys.version_info = ({version[0]}, {version[1]}, 7, 'final', 0); "
    pretend += f"sys.modules[{without!r}] = None; " if without else ""
    path.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = --version ]; then echo "Python {version[0]}.{version[1]}.7"; exit; fi\n'
        f'if [ "$1" = -c ]; then exec {sys.executable} -c "{pretend}exec(sys.argv[1])" "$2"; fi\n'
    )
    path.chmod(0o755)
    return path


NO_PYTHON = f"was not found: install Python {WORKING_VERSIONS} (Debian: apt-get install python3 python3-venv)"
NO_VENV = "cannot make virtual environments: install its venv module (Debian: apt-get install python3-venv)"
UNSUPPORTED = f"is not supported: install Python {WORKING_VERSIONS}, or name one: make demo PYTHON=python3.12"


@pytest.mark.parametrize(
    ("goal", "python", "error"),
    [
        *((goal, "python3.99", f"error: python3.99 {NO_PYTHON}") for goal in ("demo", "vllm")),
        ("demo", {"version": (3, 10)}, f"error: Python 3.10.7 {UNSUPPORTED}"),
        ("demo", {"version": (3, 14)}, f"error: Python 3.14.7 {UNSUPPORTED}"),
        ("vllm", {"version": (3, 12), "without": "venv"}, f"error: PYTHON {NO_VENV}"),
        ("demo", {"version": (3, 12), "without": "ensurepip"}, f"error: PYTHON {NO_VENV}"),
    ],
)
def test_make_refuses_in_one_line(clone, tmp_path, goal, python, error):
    """``demo`` and ``vllm`` check the interpreter in recipes of their own; the others depend on that of ``demo``."""
    given = python if isinstance(python, str) else str(interpreter(tmp_path / "python", **python))
    done = subprocess.run([MAKE, goal, f"PYTHON={given}"], cwd=clone, capture_output=True, text=True, check=False)
    first, last = done.stderr.splitlines()
    assert (done.returncode, done.stdout, first) == (2, "", error.replace("PYTHON ", f"{given} ", 1))
    assert last.startswith("make: *** ")
    assert sorted(path.name for path in clone.iterdir()) == ["Makefile", "pyproject.toml", "requirements.txt"]


def test_package_makefile_and_workflow_name_the_same_versions():
    assert 'requires-python = ">=3.11,<3.14"' in (REPOSITORY / "pyproject.toml").read_text()
    assert f"VERSIONS := {WORKING_VERSIONS}\n" in (REPOSITORY / "Makefile").read_text()
    workflow = (REPOSITORY / ".github" / "workflows" / "ci.yml").read_text()
    assert re.findall(r"^ +(3\.\d+)$", workflow, flags=re.MULTILINE) == ["3.13", "3.12", "3.11"]
    assert re.findall(r"- run: (\S+)", workflow) == [".ci/run"]


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("true", 2)])
def test_other_pythons_are_found_and_only_ci_fails_without_one(clone, tmp_path, ci, code):
    """In PATH or among pyenv's versions. A command that has the name but runs no Python is none."""
    (shim := tmp_path / "bin" / "python3.12").parent.mkdir()
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    (pyenv := tmp_path / "pyenv" / "versions" / "3.13.7" / "bin").mkdir(parents=True)
    interpreter(pyenv / "python", version=(3, 13))
    variables = {"PATH": f"{shim.parent}:/usr/bin:/bin", "PYENV_ROOT": str(tmp_path / "pyenv"), "CI": ci}
    command = [MAKE, "--dry-run", "--keep-going", "test-pythons"]  # make still runs lines that start another make
    done = subprocess.run(command, cwd=clone, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "Python 3.12 is not installed" in (done.stderr if ci else done.stdout)
    assert ".venv-3.13/bin/python src/demo.py --steps 20 --into .venv-3.13/demo" in done.stdout
    assert ".venv-3.12/bin" not in done.stdout


def test_help_is_the_default_and_every_goal_checks_the_interpreter_first(clone):
    """All but ``vllm`` lead to the environment's file. Under `make test` an inner make would print its folder."""
    command = [MAKE, "--no-print-directory", "--print-data-base"]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=True)
    assert set(re.findall(r"^make ([\w-]+)", done.stdout, flags=re.MULTILINE)) == {*INSTALLING, "size", "test-pythons"}
    rules = dict(re.findall(r"^([\w./-]+): (.*)$", done.stdout, flags=re.MULTILINE))

    def needs(goal: str) -> set[str]:
        named = set(rules.get(goal, "").split())
        return named.union(*map(needs, named))

    assert [goal for goal in sorted(INSTALLING - {"vllm"}) if ".venv/bin/.installed" not in needs(goal)] == []
