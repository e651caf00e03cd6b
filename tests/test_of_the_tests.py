"""What the tests stand on: how they are shared among processes, left out, given packages, and run as forked ranks."""

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
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options, *files]
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


BRINGS = "as root: apt-get install g++ libaio-dev chromium"


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
        "-qq install --yes --no-install-recommends g++ libaio-dev",
    ]
    out, err = capsys.readouterr()
    assert "not installed: apt-get install g++ libaio-dev\n" in out
    assert "not installed: g++, libaio-dev; as root: apt-get install g++ libaio-dev" in err


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
