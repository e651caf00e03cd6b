"""``dsgpt doctor``: this machine, two that are not fit together, and every finding by made-up facts."""

import json
import os
import re
import shlex
import shutil
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked_ranks import run_script
from planner_records import RECORD
from small_run import REPOSITORY, TOKENS, random_ids, write_data, write_recipe, write_tokens
from stand_in_nvml import StandInNvml

from dsgpt.benchmarks.hosts import Hosts
from dsgpt.common.files import sha256_of
from dsgpt.config.recipe import sound_recipe
from dsgpt.machine import device
from dsgpt.machine.topology import Topology
from dsgpt.model.config import PRESETS
from dsgpt.planner.rates import read_calibration
from dsgpt.training import doctor
from dsgpt.training.doctor import DoctorOptions, findings_of_cluster, findings_of_machine

HOSTS = 4
DOCTOR = REPOSITORY / "src" / "doctor.py"
GPU = {"name": "A100", "driver": "580", "memory_bytes": 80e9, "used_bytes": 1e9, "uncorrected_errors": 0, "ecc": True}
GPU |= {"replaced": 0, "repair_pending": False, "repair_failed": False}
FOLDER = {"path": "checkpoint", "disk": 1, "free_bytes": 1e12, "writable": True, "problem": ""}
DATA = {"path": "train.bin", "problem": None, "sha256": "1", "size": 2}
HEALTHY: dict[str, Any] = {
    "host": "a",
    "versions": {"python_version": "3.11.7", "torch_version": "2.13.0", "deepspeed_version": "0.19.8", "dsgpt": "1f"},
    "cpus": 64,
    "gpus": [GPU, GPU],
    "folders": {"checkpoints": FOLDER},
    "shared_memory_bytes": 8e9,
    "open_files": 65536,
    "processes": None,
    "locks_memory": True,
    "rdma": False,
    "compiler": "g++",
    "ninja": True,
    "cuda_toolkit": True,
    "libaio": "",
    "port_taken": False,
    "recipe": "2e",
    "train_data_path": DATA,
    "val_data_path": None,
    "problems": [],
}
OPTIONS = DoctorOptions()
OFFLOAD = sound_recipe(REPOSITORY / "ds_configs" / "zero3_nvme.json")
NEEDED = {"checkpoints": 6_000_000_000, "offload_optimizer": 0, "offload_param": 0}


def versions(**changed: str) -> dict[str, Any]:
    return {"versions": HEALTHY["versions"] | changed}


def folders(name: str = "checkpoints", **changed: object) -> dict[str, Any]:
    return {"folders": {name: FOLDER | changed}}


def test_healthy_machines_have_no_findings():
    assert [each for recipe in (None, OFFLOAD) for each in findings_of_machine(HEALTHY, recipe, NEEDED)] == []
    assert list(findings_of_cluster([HEALTHY, HEALTHY | {"host": "b"}])) == []


@pytest.mark.parametrize(
    ("recipe", "change", "what"),
    [
        (None, folders(writable=False), "checkpoint cannot be written"),
        (None, folders(free_bytes=4e9), "4.0 GB are free at checkpoint, and checkpoints take 6.0 GB"),
        (None, {"shared_memory_bytes": 64 << 20}, "/dev/shm has 67 MB free"),
        (None, {"open_files": 1024}, "a process may open 1024 files"),
        (None, {"processes": 100}, "a user may have 100 processes and threads"),
        (None, {"locks_memory": False, "rdma": True}, "InfiniBand needs memory that a process may not lock"),
        (OFFLOAD, {"locks_memory": False}, "offload to NVMe needs memory that a process may not lock"),
        (None, {"gpus": [GPU, GPU | {"uncorrected_errors": 3}]}, "GPU 1 has 3 uncorrected memory errors"),
        (None, {"gpus": [GPU | {"used_bytes": 20e9}]}, "GPU 0 has 20.0 GB in use"),
        (None, {"gpus": [GPU | {"ecc": False}]}, "GPU 0 corrects no memory errors: ECC is off"),
        (None, {"gpus": [GPU | {"replaced": 2}]}, "GPU 0 has replaced 2 pieces of its memory"),
        (None, {"gpus": [GPU | {"repair_pending": True}]}, "GPU 0 has broken memory that it replaces when it is reset"),
        (None, {"gpus": [GPU | {"repair_failed": True}]}, "GPU 0 could not replace a broken row"),
        (None, {"train_data_path": {"problem": "train.bin: cannot be read"}}, "train.bin: cannot be read"),
        (None, {"port_taken": True}, "port 29500, at which launchers let ranks meet, is in use"),
        (None, {"problems": ["/data does not answer within 5 s"]}, "/data does not answer within 5 s"),
        (OFFLOAD, versions(deepspeed_version="0.18.2"), "DeepSpeed 0.18.2 trains wrong (ZeRO 0, 1, 2, 3 with"),
        (OFFLOAD, {"compiler": None}, "needs a C++ compiler"),
        (OFFLOAD, {"ninja": False}, "needs ninja"),
        (OFFLOAD, {"cuda_toolkit": False}, "needs the CUDA toolkit"),
        (OFFLOAD, {"libaio": "finds no libaio"}, "needs asynchronous I/O"),
        (OFFLOAD, folders("offload_param", problem="files in /nvme cannot"), "files in /nvme cannot"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_each_finding_of_a_machine(recipe, change, what):
    (finding,) = findings_of_machine(HEALTHY | change, recipe, NEEDED)
    assert finding.where == "a"
    assert what in finding.what
    assert finding.cure


def test_only_the_gpus_that_a_training_would_see_are_examined(monkeypatch):
    """As with CUDA_VISIBLE_DEVICES=1: PyTorch's GPU 0 is the second one of the driver."""
    monkeypatch.setitem(sys.modules, "pynvml", StandInNvml())
    monkeypatch.setattr(device, "cuda_devices", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1"))
    (gpu,) = doctor._gpus()
    assert gpu == {
        **{"name": "A100", "driver": "580", "memory_bytes": 80_000, "used_bytes": 10_001, "ecc": False},
        **{"uncorrected_errors": 11, "replaced": 8, "repair_pending": True},
        "repair_failed": False,
    }


def test_room_is_needed_for_what_this_recipe_saves_and_swaps(tmp_path):
    """Kept are the checkpoints of ``--keep_checkpoints``, the best one, and the one that is written."""
    small = PRESETS["small"]
    parameters = small.parameter_count()
    machine = Topology(rank=0, local_rank=0, world_size=4, local_world_size=2, launcher="torchrun")
    sgd = sound_recipe(write_recipe(tmp_path / "sgd.json", optimizer={"type": "SGD", "params": {"lr": 0.1}}))
    needs = partial(doctor.needed_bytes, small, topology=machine, on_gpus=True)
    assert needs(None, keep_checkpoints=2) == {"checkpoints": 4 * 12 * parameters}
    assert needs(sgd, keep_checkpoints=5) == {"checkpoints": 7 * 4 * parameters}
    swapped = needs(OFFLOAD, keep_checkpoints=2)
    assert swapped["offload_optimizer"] == pytest.approx(12 * parameters / 2, rel=0.02)
    assert swapped["offload_param"] == pytest.approx(2 * parameters / 2, rel=0.02)
    disks = {name: FOLDER | {"free_bytes": 7e9} for name in ("checkpoints", "offload_optimizer")}
    assert list(findings_of_machine(HEALTHY | {"folders": disks}, OFFLOAD, NEEDED)) == []
    (finding,) = findings_of_machine(HEALTHY | {"folders": disks}, OFFLOAD, NEEDED | {"offload_optimizer": 2 * 10**9})
    assert "checkpoints and swapped tensors take 8.0 GB" in finding.what


def test_a_probe_that_hangs_or_fails_is_a_problem_and_the_others_answer(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "PROBE_SEC", 2.0)
    monkeypatch.setattr(doctor, "_folder_facts", lambda *_, **__: threading.Event().wait())
    monkeypatch.setattr(doctor, "_gpus", lambda: StandInNvml(driver=False).nvmlInit())
    facts = doctor.machine_facts(replace(OPTIONS, checkpoint_path=tmp_path), None)
    expected = {f"{tmp_path} does not answer within 2 s", "the driver of the GPUs fails: no driver"}
    assert expected <= set(facts["problems"])  # on a busy machine the compiler may be late, too
    assert facts["shared_memory_bytes"] > 0
    assert list(findings_of_cluster([HEALTHY, HEALTHY | {"gpus": None, "versions": None}]))


def test_a_port_in_use_is_seen(monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with socket.socket() as one:
        one.bind(("", 0))
        one.listen()
        monkeypatch.setattr(doctor, "DEFAULT_PORT", one.getsockname()[1])
        assert doctor.machine_facts(OPTIONS, None)["port_taken"]
    assert not doctor.machine_facts(OPTIONS, None)["port_taken"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (versions(torch_version="2.12"), "torch_version differ: a 2.13.0; b 2.12"),
        (versions(dsgpt="2e"), "dsgpt differ: a 1f; b 2e"),
        ({"gpus": [GPU, GPU | {"driver": "570"}]}, "GPUs differ"),
        ({"recipe": "3f"}, "recipes differ: a 2e; b 3f"),
        ({"train_data_path": DATA | {"sha256": "2"}}, "train.bin is not the same file on every machine"),
        ({"train_data_path": DATA | {"sha256": None, "size": 3}}, "train.bin is not the same file on every machine"),
        ({"train_data_path": DATA | {"sha256": None}}, "train.bin: no hash is noted beside it, so only sizes"),
        ({"clock_offset_sec": -3600.0}, "its clock is -3600.0 s off that of a"),
    ],
)
def test_each_finding_between_machines(change, what):
    (finding,) = findings_of_cluster([HEALTHY, HEALTHY | {"host": "b"} | change])
    assert what in finding.what


@pytest.mark.parametrize(
    ("gbps", "stated", "findings"),
    [
        ({"a": 72, "c": 32, "d": 80}, None, [("c", "32.00 Gbit/s to b, others have 72.00")]),
        ({"a": 72, "c": 32}, None, [("c", "32.00 Gbit/s to b, others have 72.00")]),
        ({"a": 0.5, "c": 0.5}, None, [("all", "the network has 0.50 Gbit/s with gloo, the least of use is 1")]),
        ({"a": 40, "c": 40}, 100, [("all", "the network has 40.00 Gbit/s with gloo, 100 were stated")]),
        ({"a": 0.5, "c": 0.5}, 0.8, []),
        ({}, 100, []),
    ],
)
def test_links_that_are_slower_than_the_others_or_than_stated_are_findings(gbps, stated, findings):
    links = [
        {"from": one, "to": "b", "bytes_per_sec": gbit / 8 * 1e9, "transport": "gloo"} for one, gbit in gbps.items()
    ]
    assert [(each.where, each.what) for each in doctor.findings_of_links(links, stated)] == findings


@pytest.mark.parametrize("beside", ["a sidecar that is older", "no sidecar"])
def test_data_that_was_read_is_not_doubted(tmp_path, beside):
    """Its sidecar does not know the time of the copy until the data are read."""
    path = write_data(tmp_path) / "train.bin"
    os.utime(path, (1, 1))
    if beside == "no sidecar":
        path.with_suffix(".json").unlink()
    facts = doctor._data_facts(path)
    assert facts["problem"] if facts["sha256"] else facts["problem"] is None
    assert doctor._data_facts(path, verify=True) == facts | {"problem": None, "sha256": sha256_of(path)}


def test_this_machine_is_examined(tmp_path):
    folder = write_data(tmp_path)
    words = ["--train_data_path", folder / "train.bin", "--checkpoint_path", tmp_path / "new" / "run", "--json"]
    done = run_script(DOCTOR, [*words, "--verify_data", "--model_size", "demo"], cwd=tmp_path)
    examined = json.loads(done.stdout)
    assert done.returncode == (1 if examined["findings"] else 0)
    (machine,) = examined["machines"]
    assert machine["versions"]["torch_version"]
    assert machine["train_data_path"]["problem"] is None
    assert not [problem for problem in machine["problems"] if "fails" in problem]
    assert not (tmp_path / "new").exists()
    assert examined["seconds"] < 20


APART = """
import json, os, pathlib, runpy, sys, time
from dsgpt.training import doctor
script, hosts, flags = sys.argv[1:]
rank = int(os.environ["RANK"])
os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
doctor.SEEN_SEC, words = 0.5, json.loads(flags)[rank]
if hosts:
    from dsgpt.benchmarks.hosts import Hosts, be_rank_on
    be_rank_on(Hosts(hosts, 0), per_host=1)


def not_at_once(path, to):
    to.unlink(missing_ok=True)
    time.sleep(0.001)
    os.rename(path, to)


if words[0] == "not at once":
    pathlib.Path.replace = not_at_once
sys.argv = [script, *words[words[0] == "not at once" :]]
runpy.run_path(script, run_name="__main__")
"""
"""The doctor of a rank that is alone on its machine, with flags of its own; on one of ``hosts``, if they are named.

``not at once`` is a file system that renames over a file in two steps.
"""


def together(folder: Path, *flags: list[str], hosts: Hosts | None = None) -> dict[str, Any]:
    """What the doctor finds on as many machines as there are lists of flags; each is a process here."""
    (folder / "apart.py").write_text(APART)
    words = [str(DOCTOR), hosts.name if hosts else "", json.dumps([[*each, "--json"] for each in flags])]
    environment = hosts.variables() if hosts else None
    done = run_script(folder / "apart.py", words, ranks=len(flags), cwd=folder, environment=environment)
    examined: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == any(finding["stops"] for finding in examined["findings"]), done.stderr
    return examined


def test_machines_that_share_nothing_are_told_so_and_nothing_is_left(tmp_path):
    one, other = write_data(tmp_path / "one"), write_data(tmp_path / "other")
    own = (one, "train", REPOSITORY / "ds_configs" / "zero1.json"), (other, "val", "missing.json")
    flags = [
        f"--checkpoint_path {folder}/new/runs --train_data_path {folder}/{name}.bin --deepspeed_config {recipe}".split()
        for folder, name, recipe in own
    ]
    examined = together(tmp_path, *flags)
    found = " ".join(finding["what"] for finding in examined["findings"])
    assert found.count("it is not one shared folder") == 2
    assert "train.bin is not the same file on every machine" in found
    assert "missing.json fails: [Errno 2] No such file or directory" in found
    assert len(examined["links"]) == 2
    assert all(link["bytes_per_sec"] > 1e6 and 0 < link["latency_sec"] < 1 for link in examined["links"])
    assert {link["transport"] for link in examined["links"]} == {"gloo over TCP"}
    assert abs(examined["machines"][1]["clock_offset_sec"]) < 0.5
    assert not [*one.glob("new"), *other.glob("new"), *one.glob(".doctor*"), *other.glob(".doctor*")]


@pytest.mark.parametrize("atomic", [True, False])
def test_machines_that_share_a_folder_and_data_are_healthy_together(tmp_path, atomic):
    """Except where a reader misses a file that is renamed over another."""
    data = write_data(tmp_path / "data") / "train.bin"
    words = ["--checkpoint_path", str(tmp_path / "runs"), "--train_data_path", str(data)]
    examined = together(tmp_path, [*(() if atomic else ["not at once"]), *words], words)
    found = [what for each in examined["findings"] if tmp_path.name in (what := each["what"])]
    assert [re.sub(r"\d+ times", "N times", what.rpartition("/")[2]) for what in found] == (
        []
        if atomic
        else [f"{tmp_path.name}: a file was missing N times while {socket.gethostname()} renamed another over it"]
    )
    assert not [*tmp_path.glob("runs"), *tmp_path.glob(".doctor*")]


def test_a_slow_host_is_told_from_those_that_wait_for_it_and_is_written_into_the_calibration(hosts, tmp_path):
    """A host that receives late sends in time: its own links to others are not slow."""
    calibration = tmp_path / "calibration.json"
    calibration.write_text(json.dumps(RECORD))
    hosts.shape(1, mbit=40)
    words = ["--checkpoint_path", str(tmp_path), "--all_pairs"]
    examined = together(tmp_path, [*words, "--machine", str(calibration)], words, words, words, hosts=hosts)
    slow = {
        (each["where"], to[1])
        for each in examined["findings"]
        if (to := re.search(r"Gbit/s to (.*), others have", each["what"]))
    }
    links = [(link["from"], link["to"]) for link in examined["links"]]
    assert len(links) == 12
    assert slow == {link for link in links if hosts.host(1) in link}
    network = read_calibration(calibration).network
    assert 1e6 < network.bytes_per_sec < 1.3 * 40e6 / 8  # a busy machine sends less than the link lets through
    assert (network.machines, network.transport) == (4, "gloo over TCP")


def started_on(hosts: Hosts, folder: Path, commands: Sequence[Sequence[object]], **variables: str) -> str:
    """What the doctor prints that is started by a command on each host; the first ones of them take part."""
    logs = [folder / f"{number}.log" for number in range(len(commands))]
    ranks = [
        hosts.start(number, *command, log=logs[number], cwd=folder, variables=variables | {"RANK": str(number)})
        for number, command in enumerate(commands)
    ]
    codes = [rank.wait(timeout=240) for rank in ranks]
    printed = "".join(log.read_text() for log in logs)
    assert set(codes) <= {0, 1}, printed
    return printed


def assert_two_machines_are_examined(printed: str, hosts: Sequence[str]) -> None:
    for one, other in (hosts, hosts[::-1]):
        link = rf"^{one} to {other}: \d+\.\d\d Gbit/s, \d+ us, with gloo over TCP$"
        assert re.search(link, printed, re.MULTILINE), printed
    assert re.search(r"^2 machines, \d+ findings?, ", printed, re.MULTILINE)
    assert not re.search(r"differ|not one shared folder|not the same|missing|fails", printed), printed


def test_the_doctor_under_slurm(slurm, tmp_path):
    script = REPOSITORY / "launch" / "slurm" / "rank.sh"
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", script, sys.executable, DOCTOR]
    command = shlex.join([*map(str, srun), "--checkpoint_path", str(tmp_path)])
    printed = slurm("sh", "-c", f"{command} || [ $? = 1 ]", MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    assert_two_machines_are_examined(printed, [socket.gethostname()] * 2)


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_the_doctor_under_launchers_on_two_hosts(hosts, tmp_path, launcher):
    """DeepSpeed's launcher gives every script ``--local_rank``."""
    hosts.shape(1)
    (tmp_path / "hosts").write_text("".join(f"{hosts.address(number)} slots=1\n" for number in range(2)))
    meeting = f"--nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint {hosts.address(0)}:29500"
    own = f"--hostfile hosts --no_ssh --master_addr {hosts.address(0)} --master_port 29500 --node_rank"
    commands = [
        [Path(sys.executable).with_name(launcher), *words.split(), DOCTOR, "--checkpoint_path", tmp_path]
        for words in ([meeting] * 2 if launcher == "torchrun" else [f"{own} 0", f"{own} 1"])
    ]
    assert_two_machines_are_examined(started_on(hosts, tmp_path, commands), [hosts.host(0), hosts.host(1)])


@pytest.mark.long
def test_the_page_shows_what_the_doctor_prints_of_a_healthy_and_of_a_broken_cluster(hosts, tmp_path, request):
    """On the page, figures are of the day on which ``--snapshot-update`` wrote it."""
    if not shutil.which("faketime"):
        pytest.skip("needs faketime")
    hosts.shape(1)
    shared, local = write_data(tmp_path / "shared"), write_data(tmp_path / "local")
    write_tokens(local / "train.bin", random_ids(TOKENS, seed=2))
    meeting = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    meeting |= {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29500"}
    page = REPOSITORY / "docs" / "clusters.md"
    shown = page.read_text(encoding="utf-8")
    for title, folder, clock in (
        ("healthy", shared, []),
        ("broken", local, ["faketime", "--exclude-monotonic", "-f", "+1h"]),
    ):
        words = [
            [sys.executable, DOCTOR, "--checkpoint_path", at / "runs", "--train_data_path", at / "train.bin"]
            for at in (shared, folder)
        ]
        (own := tmp_path / title).mkdir()
        printed = started_on(hosts, own, [words[0], [*clock, *words[1]]], **meeting)
        printed = "".join(line for line in printed.splitlines(keepends=True) if not line.startswith("[W"))  # PyTorch's
        for name, place in {hosts.name: "node", str(shared): "/shared", str(local): "/local"}.items():
            printed = printed.replace(name, place)
        block = re.search(rf"```text title={title}\n(.*?)```", shown, re.DOTALL)
        if request.config.getoption("update_snapshots"):
            page.write_text(page.read_text().replace(block[0], f"```text title={title}\n{printed}```"))
        else:
            assert without_figures(block[1]) == without_figures(printed)


def without_figures(text: str) -> list[str]:
    """Lines, without what depends on the machine and the day: figures, and findings about limits of this machine."""
    lines = [
        line for line in text.splitlines() if not re.search("/dev/shm|ulimit|are free at|interface and its place", line)
    ]
    return [re.sub(r"[0-9a-f]{12}|[-+]?\d[\d.]*( findings?)?", "#", line) for line in lines]
