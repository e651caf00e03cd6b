"""A forked script ends as one under a launcher does, and leaves nothing behind for the next."""

from pathlib import Path

from forked_ranks import run_script


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
