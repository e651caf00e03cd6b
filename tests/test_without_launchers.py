"""With ``--without-launchers`` or ``--without-processes``, only tests that would start one are skipped."""

import shutil
import subprocess
import sys

from small_run import REPOSITORY

from dsgpt.machine.launcher import starts_launcher


def test_which_commands_start_a_launcher():
    assert starts_launcher(["/usr/bin/python", "/somewhere/bin/torchrun", "--nproc_per_node", "2"])
    assert starts_launcher(["/somewhere/bin/deepspeed", "src/gpt2.py"])
    assert starts_launcher(["python", "-u", "-m", "torch.distributed.run"])
    assert not starts_launcher(["python", "src/gpt2.py", "--deepspeed_config", "deepspeed"])


def test_tests_that_start_one_are_skipped_and_others_run(tmp_path):
    file = tmp_path / "test_some.py"
    file.write_text(
        "import subprocess, pytest\n"
        "@pytest.fixture(scope='module')\n"
        "def launched(): subprocess.run(['torchrun', '--help'], check=True)\n"
        "def test_by_fixture(launched): pass\n"
        "def test_by_fixture_again(launched): pass\n"
        "def test_by_itself(): subprocess.run(['/a/deepspeed', 'x'])\n"
        "def test_without(): subprocess.run(['true'], check=True)\n"
    )
    tests = REPOSITORY / "tests"
    shutil.copy(tests / "conftest.py", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", tmp_path]
    command += ["-o", f"pythonpath={tests}", "--without-launchers", file]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 passed, 3 skipped" in done.stdout, done.stdout + done.stderr


def test_tests_that_start_any_python_are_skipped(tmp_path):
    file = tmp_path / "test_some.py"
    file.write_text(
        "import contextlib, subprocess, sys, threading\n"
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
    assert "1 passed, 4 skipped" in done.stdout, done.stdout + done.stderr
