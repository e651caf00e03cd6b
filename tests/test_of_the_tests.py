"""What the tests stand on: how they are shared, left out, given packages and forked; and what `make` refuses."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import system_packages
from forked_ranks import run_script
from scheduling import ONE_PROCESS, TESTS, group_of
from small_run import REPOSITORY

# Tests that share launches run in one of the two processes of ``make test``; else both would start the launches.


def test_a_file_stays_in_one_process():
    options = (REPOSITORY / "Makefile").read_text().split("-m pytest ", 1)[1].splitlines()[0].split()
    files = ["tests/common/test_dependencies.py", "tests/common/test_files.py", "tests/test_flags_page.py"]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--without-processes", *options, *files]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    processes = defaultdict(set)
    for process, file in re.findall(r"^\[(gw\d)\].* PASSED (\S+\.py)::", done.stdout, flags=re.MULTILINE):
        processes[file].add(process)
    assert sorted(processes) == sorted(files)
    assert all(len(found) == 1 for found in processes.values()), processes
    assert len(set.union(*processes.values())) == 2


def test_tests_that_share_launches_are_one_group():
    """The scheduler searches the text of the files; it must find those whose tests take the fixture."""
    for folder, fixture in ONE_PROCESS.items():
        files = sorted((TESTS / folder).glob("test_*.py"))
        sharing = [file.name for file in files if group_of(file) == folder]
        assert sharing == [file.name for file in files if _takes(file, fixture)]
        assert sharing


def _takes(file: Path, fixture: str) -> bool:
    """Whether a test of ``file`` has ``fixture`` among its arguments."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return any(argument.arg == fixture for test in tests for argument in test.args.args)


# Tests that are left out: with ``--without-processes``, or because the system lacks a package.


def run_tests(folder: Path, text: str, *options: str, **variables: str) -> str:
    """What pytest prints for one file of tests with this suite's ``conftest.py``."""
    (folder / "test_some.py").write_text(text)
    shutil.copy(TESTS / "conftest.py", folder)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", folder]
    command += ["-o", f"pythonpath={TESTS}", *options, folder / "test_some.py"]
    environment = os.environ | variables
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    return done.stdout + done.stderr


def test_tests_that_start_any_python_are_skipped(tmp_path):
    printed = run_tests(
        tmp_path,
        "import contextlib, pytest, subprocess, sys, threading\n"
        "@pytest.fixture(scope='module')\n"
        "def launched(): subprocess.run(['torchrun', '--help'], check=True)\n"
        "def test_by_fixture(launched): pass\n"
        "def test_by_fixture_again(launched): pass\n"
        "def start(): subprocess.run([sys.executable, '-c', ''], check=True)\n"
        "def test_thread():\n"
        "    thread = threading.Thread(target=start)\n"
        "    thread.start()\n"
        "    thread.join()\n"
        "    assert False, 'the thread found nothing'\n"
        "def test_caught():\n"
        "    with contextlib.suppress(BaseException): start()\n"
        "def test_python(): subprocess.run([sys.executable, '-c', ''], check=True)\n"
        "def test_launcher(): subprocess.run(['torchrun', '--help'], check=True)\n"
        "def test_git(): subprocess.run(['true'], check=True)\n",
        "--without-processes",
    )
    assert "1 passed, 6 skipped" in printed, printed


BRINGS = "as root: apt-get install g++ libaio-dev chromium slurm-wlm munge openssh-server pdsh"


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """No command is found; ``apt-get`` is a stand-in that notes its words, where a test puts it into the folder."""
    (folder := tmp_path / "bin").mkdir()
    for name, value in {"PATH": folder, "PLAYWRIGHT_BROWSERS_PATH": folder}.items():
        monkeypatch.setenv(name, str(value))
    for name in ("CXX", "CI"):
        monkeypatch.delenv(name, raising=False)
    system_packages.missing.cache_clear()
    yield folder
    system_packages.missing.cache_clear()


@pytest.mark.parametrize(("ci", "counts"), [("", "1 failed, 1 passed, 2 skipped"), ("true", "2 failed, 1 passed")])
def test_tests_that_need_what_is_missing_are_left_out_except_in_ci(bare, tmp_path, ci, counts):
    printed = run_tests(
        tmp_path,
        "import pytest\n"
        "def test_compiles(): assert not 'optimizer offload finds no C++ compiler: install one'\n"
        "def test_swaps(): pytest.skip('needs libaio-dev')\n"
        "def test_else(): assert not 'another reason'\n"
        "def test_fine(): pass\n",
        CI=ci,
    )
    assert counts in printed, printed
    assert ("2 tests left out; they need, " + BRINGS in printed) == (not ci)


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("true", 1)])
def test_who_may_not_install_is_told_the_command(bare, monkeypatch, capsys, ci, code):
    monkeypatch.setenv("CI", ci)
    assert system_packages.main() == code
    assert BRINGS in capsys.readouterr().err


def test_root_installs_with_one_update(bare, tmp_path, monkeypatch, capsys):
    """The browser is said to be there: not every system has it as a package."""
    (bare / "apt-get").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n')
    (bare / "apt-get").chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(system_packages, "browser", lambda: "chrome")
    assert system_packages.main() == 0
    assert (tmp_path / "called").read_text().splitlines() == [
        "-qq update",
        "-qq install --yes --no-install-recommends g++ libaio-dev slurm-wlm munge openssh-server pdsh",
    ]
    out, err = capsys.readouterr()
    assert "not installed: apt-get install g++ libaio-dev slurm-wlm munge openssh-server pdsh\n" in out
    assert "not installed: g++, libaio-dev, slurm-wlm, munge, openssh-server, pdsh; as root: apt-get install g++" in err


@pytest.mark.parametrize("compiled", [False, True])
def test_the_first_compilation_is_announced_once(monkeypatch, capsys, compiled):
    monkeypatch.setattr(system_packages, "missing", list)
    monkeypatch.setattr(system_packages, "compiler", lambda: ["g++"])
    monkeypatch.setattr(system_packages, "_compiled", lambda: compiled)
    assert system_packages.main() == 0
    assert capsys.readouterr().out.startswith("The first tests compile DeepSpeed's") != compiled


# A forked script ends as one under a launcher does, and leaves nothing behind for the next.


def written(folder: Path, text: str) -> Path:
    script = folder / "script.py"
    script.write_text(text)
    return script


def test_the_first_failure_is_the_exit_code_and_ends_the_other_ranks(tmp_path):
    script = written(tmp_path, "import os, time\nif os.environ['RANK'] == '1': raise SystemExit(3)\ntime.sleep(600)\n")
    assert run_script(script, [], ranks=2).returncode == 3


def test_a_traceback_is_exit_code_1(tmp_path):
    done = run_script(written(tmp_path, "print('before')\nraise KeyError('x')\n"), [])
    assert (done.returncode, done.stdout) == (1, "before\n")
    assert done.stderr.endswith("KeyError: 'x'\n")


def test_ranks_know_their_place_and_a_single_process_has_none(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "9")
    names = "('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR')"
    script = written(tmp_path, f"import os\nprint(*(os.environ.get(name) for name in {names}))\n")
    assert run_script(script, []).stdout == "None None None None\n"
    ranks = run_script(script, [], ranks=2).stdout.splitlines()
    assert sorted(ranks) == ["0 0 2 127.0.0.1", "1 1 2 127.0.0.1"]


def test_nothing_is_left_for_the_next(tmp_path):
    """Neither variables, nor the folder, nor what a script changed in a module."""
    look = "print(os.environ.get('CHANGED'), getattr(torch, 'changed', None), os.getcwd())\n"
    change = "os.environ['CHANGED'] = torch.changed = 'yes'\nos.chdir('/')\n"
    script = written(tmp_path, f"import os, torch\n{look}{change}{look}")
    for _ in range(2):
        assert run_script(script, [], cwd=tmp_path).stdout == f"None None {tmp_path}\nyes yes /\n"


# Without a usable Python, `make` prints one line: what is wrong, which versions work and what to do.

MAKE = shutil.which("make")
INSTALLING = {"install", "demo", "check", "test", "test-hosts", "test-long", "parity", "faults", "vllm", "records",
              "charts", "dashboard", "screenshots"}  # fmt: skip
GOALS = ("demo", "vllm")
"""Each checks the interpreter in a recipe of its own; the others depend on that of ``demo``."""
WORKING_VERSIONS = "3.11, 3.12 or 3.13"


@pytest.fixture
def outside_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what a ``make`` that runs the tests exports: its flags, and the variables of its command line."""
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHON", "VENV", "STEPS", "STRATEGIES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def clone(tmp_path: Path, outside_make: None) -> Path:
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


NOT_FOUND = f"was not found: install Python {WORKING_VERSIONS} (Debian: apt-get install python3 python3-venv)"
NO_VENV = "cannot make virtual environments: install its venv module (Debian: apt-get install python3-venv)"
UNSUPPORTED = f"is not supported: install Python {WORKING_VERSIONS}, or name one: make demo PYTHON=python3.12"


@pytest.mark.parametrize("goal", GOALS)
def test_no_python(clone, goal):
    assert make(goal, clone=clone, PATH=str(clone / "nothing")) == [f"error: python3 {NOT_FOUND}"]
    for given in (make(goal, "PYTHON=python3.99", clone=clone), make(goal, clone=clone, PYTHON="python3.99")):
        assert given == [f"error: python3.99 {NOT_FOUND}"]


@pytest.mark.parametrize("version", [(3, 9), (3, 10), (3, 14), (2, 7), (4, 0)])
def test_a_version_that_does_not_work(clone, tmp_path, version):
    python = interpreter(tmp_path / "python", version=version)
    shown = f"Python {version[0]}.{version[1]}.7"
    assert make("demo", f"PYTHON={python}", clone=clone) == [f"error: {shown} {UNSUPPORTED}"]


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_no_venv(clone, tmp_path, goal, module):
    python = interpreter(tmp_path / "python", without=module, version=(3, 12))
    assert make(goal, f"PYTHON={python}", clone=clone) == [f"error: {python} {NO_VENV}"]


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
