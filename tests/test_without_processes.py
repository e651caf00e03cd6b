"""With ``--without-processes``, only tests that would start another Python are skipped."""

import shutil
import subprocess
import sys

from small_run import REPOSITORY


def test_tests_that_start_any_python_are_skipped(tmp_path):
    file = tmp_path / "test_some.py"
    file.write_text(
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
        "def test_git(): subprocess.run(['true'], check=True)\n"
    )
    shutil.copy(REPOSITORY / "tests" / "conftest.py", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", tmp_path]
    command += ["-o", f"pythonpath={REPOSITORY / 'tests'}", "--without-processes", file]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 passed, 6 skipped" in done.stdout, done.stdout + done.stderr
