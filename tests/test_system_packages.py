"""``make test`` installs what the system lacks, or leaves out the tests that need it and says what brings it."""

import os
import shutil
import subprocess
import sys

import pytest
import system_packages
from small_run import REPOSITORY

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


@pytest.mark.parametrize(("ci", "counts"), [(None, "1 failed, 1 passed, 2 skipped"), ("true", "2 failed, 1 passed")])
def test_tests_that_need_what_is_missing_are_left_out_except_in_ci(bare, tmp_path, ci, counts):
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\n"
        "def test_compiles(): assert not 'optimizer offload finds no C++ compiler: install one'\n"
        "def test_swaps(): pytest.skip('needs libaio-dev')\n"
        "def test_else(): assert not 'another reason'\n"
        "def test_fine(): pass\n"
    )
    shutil.copy(REPOSITORY / "tests" / "conftest.py", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", tmp_path]
    command += ["-o", f"pythonpath={REPOSITORY / 'tests'}", file]
    environment = os.environ | ({"CI": ci} if ci else {})
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert counts in done.stdout, done.stdout + done.stderr
    assert ("2 tests left out; they need, " + BRINGS in done.stdout) == (ci is None)


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
