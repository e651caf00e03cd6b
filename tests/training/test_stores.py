"""Second copies of checkpoints, and token files: in a folder, in memory, in servers that stand in for S3 and Google."""

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_ranks import run_script
from gcp_storage_emulator.server import create_server
from moto.server import ThreadedMotoServer
from small_run import command_line, within, write_inputs
from training_runs import (
    LONG,
    SCRIPT,
    Killed,
    assert_same_training,
    checkpoints,
    damage,
    errors,
    finished,
    read_record,
    resume,
)

from dsgpt.checkpoints import second_copy, store
from dsgpt.checkpoints.second_copy import SecondCopy, checkpoints_at
from dsgpt.common.errors import EXIT_USER_ERROR
from dsgpt.data.remote import Place, open_place
from dsgpt.training.command import train as train_here
from dsgpt.training.saving import Saver


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an empty bucket of moto's S3 on 127.0.0.1."""
    server, patch = ThreadedMotoServer(ip_address="127.0.0.1", port=0), pytest.MonkeyPatch()
    server.start()
    host, port = server.get_host_and_port()
    patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        patch.setenv(name, "stand-in")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    open_place("s3://runs", flag="").files.mkdir("runs")
    yield "s3://runs"
    patch.undo()
    server.stop()


@pytest.fixture(scope="module")
def gs() -> Iterator[str]:
    """The address of an empty bucket of an emulator of Google's store on 127.0.0.1."""
    server, patch = create_server("127.0.0.1", 0, in_memory=True, default_bucket="runs"), pytest.MonkeyPatch()
    server.start()
    patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server._api._httpd.server_port}")
    patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # which would ask Google what kind of bucket it is
    yield "gs://runs"
    patch.undo()
    server.stop()


@pytest.fixture(params=["folder", "memory", "s3", "gs"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place of this test alone."""
    if request.param == "folder":
        return str(tmp_path / "second")
    return f"{'memory:/' if request.param == 'memory' else request.getfixturevalue(request.param)}/{tmp_path.name}"


def place_of(address: str) -> Place:
    return open_place(address, flag="")


def train(finished_run: Path, run_dir: Path, address: str, **flags: object) -> int:
    values = LONG | {"checkpoint_path": run_dir, "save_to": address, "no_inference": True} | flags
    return train_here(command_line(finished_run, **values))


def steps_at(address: str) -> list[int]:
    return sorted(int(name[5:]) for name in checkpoints_at(place_of(address)))


def test_a_lost_run_folder_is_resumed_from_the_second_copy(finished_run, tmp_path, address, capsys):
    run = tmp_path / "run"
    assert train(finished_run, run, address) == 0
    facts = read_record(run)["second_copy"]
    assert facts.pop("last_copy_sec") > 0
    assert facts.pop("copies") <= 4  # those that a newer one overtook are left out
    size = sum(path.stat().st_size for path in (run / "step-00000012").rglob("*") if path.name != "manifest.json")
    assert facts == {
        "address": address, "step": 12, "behind_steps": 0, "failed_copies": 0, "last_copy_bytes": size,
    }  # fmt: skip
    place = place_of(address)
    with place.files.open(place.path("training_metrics.json"), "rb") as file:
        assert json.loads(file.read()) == read_record(run)
    assert place.exists("RUN_COMPLETE.txt")

    # As if the machine had been lost after step 12 was copied as far as its manifest, with step 9 whole.
    if 9 not in steps_at(address):
        for file in sorted(path for path in (run / "step-00000009").rglob("*") if path.is_file()):
            with file.open("rb") as source:
                place.write(f"step-00000009/{file.relative_to(run / 'step-00000009')}", source)
    place.remove("step-00000012/manifest.json")
    shutil.rmtree(run)
    assert train(finished_run, run, address, resume=True) == 0
    assert f"--save_to: step-00000009 was fetched from {address}" in capsys.readouterr().out
    assert_same_training(finished_run / "run", run, loss=0.0, norm=0.0)
    assert steps_at(address)[-1] == 12


NOTED = f"""
import os, runpy
from dsgpt.checkpoints import manifest
sha256_of = manifest.sha256_of
def noted(path, *progress):
    print(f"rank {{os.environ['RANK']}} hashes {{path.parent.name}}/{{path.name}}", flush=True)
    return sha256_of(path, *progress)
manifest.sha256_of = noted
runpy.run_path("{SCRIPT}", run_name="__main__")
"""


def test_pieces_come_back_from_a_store_and_each_rank_verifies_its_own(finished_run, tmp_path, s3):
    """The folder has step 12 alone, of which a piece of rank 1 is damaged; the store has step 6."""
    run, address, script = tmp_path / "run", f"{s3}/{tmp_path.name}", tmp_path / "noted.py"
    script.write_text(NOTED)
    flags = LONG | {"run_type": "ddp", "checkpoint_path": run, "save_to": address, "save_every": 6}
    finished(run_script(script, command_line(finished_run, **flags), ranks=2))
    assert steps_at(address) == [6, 12]
    place_of(address).remove("step-00000012")
    shutil.rmtree(run / "step-00000006")
    (run / "RUN_COMPLETE.txt").unlink()
    damage(run / "step-00000012" / "optimizer-00001.safetensors")
    finished(done := run_script(script, command_line(finished_run, **flags, resume=True), ranks=2))
    assert "step-00000012 is refused: " in done.stdout
    assert f"--save_to: step-00000006 was fetched from {address}" in done.stdout
    hashed = [line.split(" hashes ") for line in done.stdout.splitlines() if " hashes " in line]
    others = ["model.json", "pieces.json", "run_state.json", "training_state.json"]
    for rank in range(2):
        own = {f"step-00000006/{kind}-0000{rank}.safetensors" for kind in ("model", "optimizer", "random")}
        assert own <= {file for who, file in hashed if who == f"rank {rank}"}
    for name in [*others, *(f"{kind}-0000{rank}.safetensors" for kind in ("model", "optimizer") for rank in (0, 1))]:
        assert [file for _, file in hashed].count(f"step-00000006/{name}") == 1
    assert_same_training(finished_run / "run", run, loss=2e-4, norm=1e-4)


def test_of_both_the_newest_undamaged_checkpoint_is_taken(finished_run, stopped, tmp_path, capsys):
    """The run folder has up to step 9, damaged; the second copy 9, and a damaged 12."""
    copy = tmp_path / "second"
    for step in (9, 12):
        shutil.copytree(finished_run / "run" / f"step-{step:08d}", copy / f"step-{step:08d}")
    for damaged in (copy / "step-00000012", stopped / "step-00000009"):
        damage(damaged / "model.safetensors")
    assert resume(stopped, finished_run, save_to=str(copy)) == 0
    printed = capsys.readouterr().out
    assert f"step-00000012 of {copy} is refused" in printed
    assert f"resuming from {stopped / 'step-00000009'}" in printed
    assert (stopped / "step-00000009.damaged").is_dir()
    assert_same_training(finished_run / "run", stopped, loss=0.0, norm=0.0)


def test_a_local_checkpoint_that_is_as_new_is_not_fetched(finished_run, stopped, tmp_path, capsys):
    shutil.copytree(stopped / "step-00000009", tmp_path / "second" / "step-00000009")
    assert resume(stopped, finished_run, save_to=str(tmp_path / "second")) == 0
    assert "was fetched" not in capsys.readouterr().out


def test_a_file_of_the_run_is_fetched_whole_or_not_at_all(finished_run, tmp_path, monkeypatch):
    """A part of it, which a kill left, would count as this machine's own."""
    run, new, read = finished_run / "run", tmp_path / "new", Place.read_into

    def killed(place, name, target, *more):
        if name == "metrics.jsonl":
            target.write_bytes(b'{"st')
            raise Killed
        return read(place, name, target, *more)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Place, "read_into", killed)
        second_copy.fetch_newer(str(run), new, damage=lambda _: "")
    second_copy.fetch_newer(str(run), new, damage=lambda _: "")
    assert (new / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    assert sorted(path.name for path in new.iterdir()) == [
        "config.json",
        "metrics.jsonl",
        "step-00000012",
        "training_metrics.json",
    ]


def test_overwriting_removes_the_copies_of_the_run_before(finished_run, tmp_path):
    shutil.copytree(finished_run / "run" / "step-00000012", tmp_path / "second" / "step-00000015")
    assert train(finished_run, tmp_path / "run", str(tmp_path / "second"), overwrite=True, save_every=0) == 0
    assert steps_at(str(tmp_path / "second")) == [12]


def test_a_failed_copy_is_a_warning(finished_run, tmp_path, monkeypatch, capsys):
    original, fails = Place.write, ["step-00000012/model.safetensors"]

    def write(self: Place, name: str, source: object) -> None:
        if name in fails:
            raise PermissionError("the key has expired")
        original(self, name, source)

    monkeypatch.setattr(Place, "write", write)
    assert train(finished_run, tmp_path / "run", str(tmp_path / "second"), save_every=6) == 0
    assert "--save_to: step-00000012 was not copied (the key has expired); the run continues" in capsys.readouterr().out
    facts = read_record(tmp_path / "run")["second_copy"]
    assert (facts["step"], facts["behind_steps"], facts["failed_copies"]) == (6, 6, 1)
    assert steps_at(str(tmp_path / "second")) == [6]


def test_a_slow_store_neither_delays_training_nor_loses_what_it_copies(finished_run, tmp_path, monkeypatch):
    """Retention leaves step 3 while it is copied, and 12, which is next. Files are opened one at a time."""
    first, goes_on, original, opened = threading.Event(), threading.Event(), Place.write, []

    def write(self: Place, name: str, source: object) -> None:
        first.set()
        assert goes_on.wait(60)
        links = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
        opened.append(sum(run in path.parents for path in links))
        original(self, name, source)

    monkeypatch.setattr(Place, "write", write)
    run, second = tmp_path / "run", SecondCopy(str(tmp_path / "second"), run_dir=tmp_path / "run", keep=9)
    shutil.copytree(finished_run / "run", run)
    second.push(run / "step-00000003")
    assert first.wait(60)
    for step in (6, 9, 12):
        second.push(run / f"step-{step:08d}")
    assert second.facts()["behind_steps"] == 12
    (run / "step-00000012").rename(run / "step-00000013")  # stands for a later one, which is the newest
    second.push(run / "step-00000013")
    store.keep_newest(run, count=1, needed=second.needed())
    assert checkpoints(run) == [3, 13]
    (run / "step-00000013").rename(run / "step-00000012")
    second.push(run / "step-00000012")
    goes_on.set()
    second.wait()
    assert set(opened) == {1}
    store.keep_newest(run, count=1, needed=second.needed())
    assert checkpoints(run) == [12]
    assert steps_at(str(tmp_path / "second")) == [3, 12]
    for step in (3, 12):
        ours, theirs = (folder / f"step-{step:08d}" for folder in (tmp_path / "second", finished_run / "run"))
        assert {path.name: path.read_bytes() for path in ours.iterdir()} == {
            path.name: path.read_bytes() for path in theirs.iterdir()
        }


def test_how_far_the_copy_is_behind_is_recorded_when_it_ends_and_after_a_resume(
    finished_run, stopped, tmp_path, monkeypatch
):
    """The place has step 3 of a run that resumes at 9 and saves at 12; nothing but the copies writes the record."""
    shutil.copytree(stopped / "step-00000003", tmp_path / "second" / "step-00000003")
    behind, original = [], SecondCopy.facts

    def wait_for_copies(self: Saver) -> None:
        within(lambda: not original(self._second)["behind_steps"])
        poll(self)
        behind.append(read_record(stopped)["second_copy"]["behind_steps"])

    def slow_copy(self: SecondCopy, checkpoint: Path) -> int:
        behind.append(original(self)["behind_steps"])
        return copy(self, checkpoint)

    poll, copy = Saver.poll, SecondCopy._copy
    monkeypatch.setattr(Saver, "poll", wait_for_copies)
    monkeypatch.setattr(SecondCopy, "_copy", slow_copy)
    assert resume(stopped, finished_run, save_to=str(tmp_path / "second"), no_inference=True) == 0
    assert behind == [6, 0, 0, 3]
    assert read_record(stopped)["second_copy"]["behind_steps"] == 0


def test_old_copies_are_removed_unless_the_run_still_has_them(finished_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished_run / "run" / "step-00000003", run / "step-00000003")  # the best one, perhaps
    second = SecondCopy(str(tmp_path / "second"), run_dir=run, keep=1)
    for step in (3, 6, 9):
        second.push(finished_run / "run" / f"step-{step:08d}")
        while second.facts()["behind_steps"]:
            pass
    second.wait()
    assert steps_at(str(tmp_path / "second")) == [3, 9]


@pytest.mark.parametrize(
    ("place", "flags", "says"),
    [
        ("{second}", {}, "holds step-00000012 of a run already: add --resume to continue it, --overwrite to delete it"),
        ("{recipe}/second", {}, "cannot be written"),
        ("{second}", {"resume": True, "checkpoint_path": "{stopped}"}, "step-00000012 is of another run than"),
    ],
    ids=["holds a run", "not writable", "another run"],
)
def test_an_unusable_place_is_refused(finished_run, stopped, tmp_path, capsys, place, flags, says):
    other = tmp_path / "second" / "step-00000012"
    shutil.copytree(finished_run / "run" / "step-00000012", other)
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps(manifest | {"run_id": "another"}))
    names = {"second": tmp_path / "second", "recipe": finished_run / "recipe.json", "stopped": stopped}
    flags = {name: str(value).format(**names) if name == "checkpoint_path" else value for name, value in flags.items()}
    before = checkpoints(stopped)
    run = flags.pop("checkpoint_path", tmp_path / "run")
    assert train(finished_run, run, place.format(**names), **flags) == EXIT_USER_ERROR
    (line,) = errors(capsys)
    assert says in line
    assert not (tmp_path / "run").exists()
    assert checkpoints(stopped) == before


def test_an_address_is_no_run_folder(finished_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train_here(command_line(finished_run, checkpoint_path="s3://runs/mine")) == EXIT_USER_ERROR
    assert "--checkpoint_path must be a folder of this machine (--save_to copies" in errors(capsys)[0]
    assert not list(tmp_path.iterdir())


def test_names_in_a_copied_manifest_stay_inside_the_checkpoint(finished_run, tmp_path):
    copy = tmp_path / "second" / "step-00000012"
    shutil.copytree(finished_run / "run" / "step-00000012", copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["files"]["../../escaped"] = manifest["files"].pop("model.json")
    (copy / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "second" / "escaped").write_bytes((copy / "model.json").read_bytes())
    (line,) = second_copy.fetch_newer(str(tmp_path / "second"), tmp_path / "run", damage=lambda _: "")
    assert "../../escaped is outside of the checkpoint" in line
    assert not list(tmp_path.rglob("run/*"))


# Token files at addresses.


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSGPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


def test_data_at_addresses_trains_the_same_and_is_copied_once(finished_run, tmp_path, s3, cache):
    place, made = place_of(f"{s3}/{tmp_path.name}"), write_inputs(tmp_path / "made")
    (made / "train.index").write_bytes(bytes(24))
    (made / "train.sources.json").write_text('{"files": []}')
    for path in (path for path in made.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            place.write(path.relative_to(made).as_posix(), file)
    data = {"train_data_path": f"{s3}/{tmp_path.name}/train.bin", "val_data_path": f"{s3}/{tmp_path.name}/val.bin"}
    assert train_here(command_line(finished_run, **LONG | data | {"checkpoint_path": tmp_path / "run"})) == 0
    assert_same_training(finished_run / "run", tmp_path / "run", loss=0.0, norm=0.0)
    copies = sorted(cache.glob("*/*.bin"))
    assert [path.name for path in sorted(copies, key=lambda path: path.name)] == ["train.bin", "val.bin"]
    assert (tmp_path / "run" / "step-00000012" / "tokenizer" / "tokenizer.json").is_file()
    assert {path.name for path in cache.glob("*/train.*")} >= {"train.index", "train.sources.json"}
    stamps = [path.stat().st_mtime_ns for path in copies]
    place.remove("train.bin")  # the copy is enough
    changes = data | {"checkpoint_path": tmp_path / "other", "dry_run": True}
    assert train_here(command_line(finished_run, **LONG | changes)) == 0
    assert [path.stat().st_mtime_ns for path in sorted(cache.glob("*/*.bin"))] == stamps


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("train.bin", "its sidecar says"),
        ("train.json", "train.json: is missing; copy it there with the .bin"),
        ("store", "(Protocol not known: nosuch): pip install 'dsgpt[stores]'"),
    ],
)
def test_data_at_an_address_is_checked(finished_run, tmp_path, cache, capsys, damage, says):
    there = tmp_path / "there"
    there.mkdir()
    for name in ("train.bin", "train.json"):
        shutil.copy(finished_run / name, there)
    if damage == "train.bin":
        ids = (there / "train.bin").read_bytes()
        (there / "train.bin").write_bytes(ids[:-2] + b"\x07\x00")
    elif damage == "train.json":
        (there / "train.json").unlink()
    address = f"{'nosuch' if damage == 'store' else 'file'}://{there}/train.bin"
    run = {"train_data_path": address, "checkpoint_path": tmp_path / "run"}
    assert train_here(command_line(finished_run, **LONG | run)) == EXIT_USER_ERROR
    assert says in " ".join(errors(capsys))
    assert not (tmp_path / "run").exists()
    assert not list(cache.glob("*/*.bin"))
