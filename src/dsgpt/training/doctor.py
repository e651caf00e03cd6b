"""``dsgpt doctor``: what would stop or slow a training on this machine, or on all machines of a cluster.

Alone it examines this machine. Under a launcher every rank runs it: the first rank of each machine examines its own,
rank 0 compares all of them and prints. They exchange what they find through the launcher's store, so that a broken
network between the ranks is a finding, too. Nothing here trains; what it writes into the shared folder it removes.
"""

import contextlib
import errno
import json
import math
import os
import resource
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

from dsgpt.common.command_line import NUMBER, POSITIVE, choice, flag, read_options, switch, whole
from dsgpt.common.errors import EXIT_DONE, UserError
from dsgpt.common.files import json_text, sha256_of, write_json_atomic
from dsgpt.common.json_files import read_object
from dsgpt.common.text import UNKNOWN, counted
from dsgpt.config.compatibility import KNOWN_BAD, TESTED, nvme_paths
from dsgpt.config.options import positive, shape_overrides
from dsgpt.config.recipe import Recipe, read_recipe
from dsgpt.data.data_set import open_data
from dsgpt.machine.probe import compiler, direct_io_problem, has_cuda_toolkit, libaio_problem, may_lock
from dsgpt.machine.topology import Topology, read_topology
from dsgpt.model.config import PRESETS, GPT2Config, shape_problems
from dsgpt.planner.formulas import model_state
from dsgpt.planner.rates import Network, read_calibration
from dsgpt.planner.setup import FULL, Setup
from dsgpt.record.provenance import git_commit, sources_sha256

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store

EXIT_FINDINGS = 1
DEFAULT_PORT = 29500
"""Port of torchrun, DeepSpeed's launcher and the scripts in ``launch/``."""
MEETING_SEC = 60
"""Seconds for all ranks to come."""
PROBE_SEC = 10.0
"""Seconds in which a folder, a driver or a compiler must answer."""
ANSWER_SEC = 30.0
"""Seconds in which a machine must say what it found."""
SEEN_SEC = 5.0
"""Seconds for what one machine writes to be seen by the others; network file systems keep directories that long."""
RENAMED_SEC = 1.0
"""Seconds for which a file of the shared folder is replaced again and again while other machines read it."""
CLOCK_SEC = 1.0
"""Clocks may differ by this much: logs of machines are compared by their times, and leases end by them."""
ROUNDS, ROUND_SEC = 8, 5
"""Rounds of the measurement of the network: each machine with those 1, 2, 4, ... places after it."""
SENT_BYTES, PINGS = 32 << 20, 20
TRIAL_BYTES, SENT_SEC = 1 << 20, 0.5
"""Bytes of a trial, and seconds for which a slow network sends: the trial's speed decides how much is sent."""
SLOW_LINK = 0.5
"""A link is slow if it has less than this share of the median of all; a network, if it has less of what was stated."""
LEAST_GBPS = 1.0
"""Slowest sound network, in Gbit/s, if none was stated."""
NCCL, TCP = "NCCL", "gloo over TCP"
SHARED_MEMORY_BYTES, LOCKED_BYTES, OPEN_FILES, PROCESSES = 1 << 30, 1 << 30, 4096, 4096
SHOWN = ("python_version", "torch_version", "deepspeed_version", "dsgpt")
DATA = ("train_data_path", "val_data_path")
EXAMINE = "see that it is there, and that its mount, server or driver works"


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The command line.

    Examine this machine before a training, or a cluster: start it under the launcher of the training, on all ranks.
    Every finding is a line with its cure. Exit code 0: nothing would stop a training; 1: something would.

    Examples:
      .venv/bin/python src/doctor.py
      .venv/bin/python src/doctor.py --model_size xl --deepspeed_config ds_configs/zero2_offload.json
      torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint 10.0.0.1:29500 src/doctor.py
      srun --nodes=2 --ntasks-per-node=8 --gpu-bind=none launch/slurm/rank.sh .venv/bin/python src/doctor.py
    """

    checkpoint_path: Path = flag(Path, "DIR", default=Path("checkpoint"))
    """where runs will write; all machines must share it (default: %(default)s)"""
    train_data_path: Path | None = flag(Path, "BIN", "training data, which every machine must have")
    val_data_path: Path | None = flag(Path, "BIN", "validation data, likewise")
    verify_data: bool = switch("read the data and compare its hash, instead of the one that is noted beside it")
    model_size: str = flag(choice(tuple(PRESETS)), "SIZE", f"{', '.join(PRESETS)} (small)", default="small")
    num_layers: int | None = positive("blocks, instead of the size's")
    num_heads: int | None = positive("attention heads, instead of the size's")
    embedding_size: int | None = positive("width, instead of the size's")
    max_position_embeddings: int | None = positive("positions, instead of the size's")
    vocab_size: int | None = positive("ids, instead of the size's")
    keep_checkpoints: int = flag(POSITIVE, "N", "checkpoints that the run keeps (default: %(default)s)", default=2)
    deepspeed_config: Path | None = flag(Path, "JSON", "the recipe: what it saves and what offload needs is examined")
    all_pairs: bool = switch("measure the network between all pairs of machines, not only with some neighbours")
    network_gbps: float | None = flag(NUMBER, "X", "Gbit/s that the network between the machines should have")
    machine: Path | None = flag(Path, "JSON", "a calibration of plan.py, into which the measured network is written")
    json: bool = switch("print JSON instead of lines")
    local_rank: int | None = flag(whole(low=-1), "N", "set by some launchers")


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be."""

    where: str
    """The machine; ``all`` for something between them."""
    what: str
    cure: str
    stops: bool = True
    """Whether it would stop or spoil a training; otherwise it is a remark."""


Facts = dict[str, Any]
"""Facts about one machine, as JSON; None for what it could not find out."""


def main() -> int:
    """Examine, print, and return the exit code; under a launcher end this process with it."""
    options, problems = read_options(DoctorOptions, prog="doctor.py")
    topology, started = read_topology(local_rank_flag=options.local_rank), time.perf_counter()
    shape = PRESETS[options.model_size].as_dict() | shape_overrides(options)
    problems.add(*shape_problems(shape))
    problems.raise_if_any()
    recipe = read_recipe(options.deepspeed_config, problems) if options.deepspeed_config else None
    if topology.is_main and options.machine is not None:
        if topology.world_size == topology.local_world_size:
            problems.add("--machine is for the network between machines: start this under a launcher, on all of them")
        read_calibration(options.machine)
        if "calibration" in read_object(options.machine):
            what = "is a record that holds a calibration: name a file of --calibrate"
            problems.add(f"--machine {options.machine}: {what}")
    if topology.is_main:  # elsewhere a mistake in the recipe is a finding
        problems.raise_if_any()
    code, findings, links = EXIT_DONE, list[Finding](), list[Facts]()
    if topology.world_size == 1:
        machines = [machine_facts(options, recipe)]
    else:
        machines, findings, links = _examine_together(options, recipe, topology)
    if topology.is_main:
        keep, on_gpus = options.keep_checkpoints, bool(machines[0]["gpus"])
        needed = needed_bytes(GPT2Config(**shape), recipe, topology, keep_checkpoints=keep, on_gpus=on_gpus)
        findings += [each for facts in machines for each in findings_of_machine(facts, recipe, needed)]
        findings += [*findings_of_cluster(machines), *findings_of_links(links, options.network_gbps)]
        if options.machine is not None and links:
            network = Network(
                timestamp_utc=datetime.now(UTC).isoformat(timespec="seconds"),
                machines=len(machines),
                transport=links[0]["transport"],
                bytes_per_sec=min(link["bytes_per_sec"] for link in links),
                latency_sec=max(link["latency_sec"] for link in links),
            )
            write_json_atomic(options.machine, read_object(options.machine) | {"network": asdict(network)})
        _print(machines, links, findings, seconds=time.perf_counter() - started, as_json=options.json)
        code = EXIT_FINDINGS if any(each.stops for each in findings) else EXIT_DONE
    if topology.world_size > 1:
        from dsgpt.machine.launcher import exit_rank  # noqa: PLC0415 - imports torch

        exit_rank(code)  # also where a probe still waits
    return code


def _print(
    machines: Sequence[Facts], links: Sequence[Facts], findings: Sequence[Finding], *, seconds: float, as_json: bool
) -> None:
    if as_json:
        shown = {"machines": machines, "links": links, "findings": [asdict(each) for each in findings]}
        print(json_text(shown | {"seconds": round(seconds, 2)}), end="")
        return
    for facts in machines:
        gpus, versions = facts["gpus"], facts["versions"] or {}
        devices = f"{len(gpus)} x {gpus[0]['name']}" if gpus else f"{facts['cpus']} CPUs"
        about = ", ".join(f"{name.partition('_')[0]} {versions.get(name, UNKNOWN)}" for name in SHOWN)
        print(f"{facts['host']}: {devices}, {about}")
    for link in links:
        speed, latency = link["bytes_per_sec"] * 8 / 1e9, link["latency_sec"] * 1e6
        print(f"{link['from']} to {link['to']}: {speed:.2f} Gbit/s, {latency:.0f} us, with {link['transport']}")
    for each in findings:
        print(f"{'finding' if each.stops else 'remark'}: {each.where}: {each.what}: {each.cure}")
    stopping = sum(each.stops for each in findings)
    print(f"{counted(len(machines), 'machine')}, {counted(stopping, 'finding')}, {seconds:.1f} s")


# One machine.


def machine_facts(options: DoctorOptions, recipe: Recipe | None) -> Facts:
    """Facts that a machine finds without the others; a probe that does not answer is one of its problems."""
    from dsgpt.machine.device import software_versions  # noqa: PLC0415 - torch takes seconds

    command, rdma = compiler(), Path("/sys/class/infiniband")
    swaps = nvme_paths(recipe, options.checkpoint_path) if recipe else {}
    folders = {"checkpoints": options.checkpoint_path} | swaps
    files = {name: path for name in DATA if (path := getattr(options, name))}
    probes: dict[str, tuple[object, Callable[[], Any]]] = {
        "versions": ("a package or git", lambda: software_versions() | _own_versions()),
        "gpus": ("the driver of the GPUs", _gpus),
        "shared_memory_bytes": ("/dev/shm", lambda: shutil.disk_usage("/dev/shm").free),
        "libaio": ("the compiler", lambda: libaio_problem(command) if command else "finds no compiler"),
        "recipe": (options.deepspeed_config, lambda: options.deepspeed_config and sha256_of(options.deepspeed_config)),
        **{name: (folder, partial(_folder_facts, folder, swaps=name in swaps)) for name, folder in folders.items()},
        **{name: (path, partial(_data_facts, path)) for name, path in files.items()},
    }
    found, problems = _answers(probes, PROBE_SEC)
    for name, path in files.items():
        if options.verify_data and found[name]:  # reading takes as long as it takes
            found[name] = _data_facts(path, verify=True)
    return {
        "host": socket.gethostname(),
        "cpus": len(os.sched_getaffinity(0)),
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "processes": _limit(resource.RLIMIT_NPROC),
        "locks_memory": may_lock(LOCKED_BYTES),
        "rdma": rdma.is_dir() and any(rdma.iterdir()),
        "compiler": " ".join(command) or None,
        "ninja": shutil.which("ninja") is not None,
        "cuda_toolkit": has_cuda_toolkit(),
        "port_taken": "MASTER_PORT" not in os.environ and _is_taken(DEFAULT_PORT),
        **dict.fromkeys(DATA),
        **found,
        "folders": {name: found[name] for name in folders},
        "problems": problems,
    }


def _answers(
    probes: Mapping[str, tuple[object, Callable[[], Any]]], seconds: float
) -> tuple[dict[str, Any], list[str]]:
    """Answers of probes, by name, and a line for each that fails or does not answer in time. All run at once.

    Args:
        probes: by name, what is asked, and how.
        seconds: for all of them.
    """
    found: dict[str, Any] = dict.fromkeys(probes)
    problems = {name: f"{asked} does not answer within {seconds:g} s" for name, (asked, _) in probes.items()}

    def ask(name: str) -> None:
        asked, probe = probes[name]
        try:
            found[name] = probe()
            del problems[name]
        except Exception as error:  # noqa: BLE001 - whatever a driver or a file system raises: others wait for this rank
            problems[name] = f"{asked} fails: {error}"

    threads = [threading.Thread(target=ask, args=[name], daemon=True) for name in probes]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(found), list(problems.values())


def _own_versions() -> Facts:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    own = {"dsgpt": sources_sha256()[:12], "dsgpt_commit": git_commit() or UNKNOWN}
    on_gpus = torch.version.cuda and dist.is_nccl_available()
    nccl: Any = torch.cuda.nccl
    return own | {"nccl": ".".join(map(str, nccl.version())) if on_gpus else None}


def _gpus() -> list[Facts]:
    """The GPUs that a training would see, as their driver describes them."""
    import torch  # noqa: PLC0415

    from dsgpt.machine.device import cuda_devices  # noqa: PLC0415
    from dsgpt.telemetry.monitor import open_gpus  # noqa: PLC0415

    uuids = [f"GPU-{torch.cuda.get_device_properties(number).uuid}" for number in range(cuda_devices())]
    gpus = open_gpus(uuids) if uuids else None
    if uuids and gpus is None:
        raise RuntimeError("its management library (NVML) does not start, or does not know them")
    return [gpus.health(uuid) for uuid in gpus.uuids] if gpus else []


def _folder_facts(folder: Path, *, swaps: bool) -> Facts:
    place = folder
    while not place.exists():  # what a run would create
        place = place.absolute().parent
    facts: Facts = {"path": str(folder), "place": str(place.absolute()), "disk": place.stat().st_dev}
    facts |= {"free_bytes": shutil.disk_usage(place).free, "writable": os.access(place, os.W_OK)}
    return facts | {"problem": direct_io_problem(place) if swaps and facts["writable"] else ""}


def _limit(which: int) -> int | None:
    """A limit of this process; None if there is none."""
    limit, _ = resource.getrlimit(which)
    return None if limit == resource.RLIM_INFINITY else limit


def _is_taken(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()  # with SO_REUSEADDR, as the launchers' store
    except OSError:
        return True
    return False


def _data_facts(path: Path, *, verify: bool = False) -> Facts:
    facts: Facts = {"path": str(path), "problem": None, "sha256": None, "size": None}
    try:
        data = open_data(path, flag="data")
        facts["size"] = sum(file.size_bytes for file in data.files)
        hashes = {file.path: file.verified_sha256() if verify else file.sidecar.sha256 for file in data.files}
        facts["sha256"] = data.sha256(lambda file: hashes[file.path], mixed=True)
        facts["problem"] = None if verify else next(filter(None, (file.doubt() for file in data.files)), None)
    except (UserError, OSError) as error:
        facts["problem"] = str(error)
    return facts


def needed_bytes(
    model: GPT2Config, recipe: Recipe | None, topology: Topology, *, keep_checkpoints: int, on_gpus: bool
) -> dict[str, int]:
    """Bytes that a machine's folders must have room for, by their names in its facts.

    Besides the checkpoints that are kept there are the best one and the one that is being written.
    """
    moments, needed = 2, dict[str, int]()
    if recipe is not None:
        setup = Setup(
            run_type="ddp" if recipe.zero_plus_plus else "optimized",  # it has no formula, and does not swap
            model=model,
            recipe=recipe,
            world_size=topology.world_size,
            precision=recipe.precision or ("bf16" if on_gpus else "fp32"),
            micro_batch_size=1,
            gradient_accumulation_steps=1,
            seq_length=model.block_size,
        )
        moments = setup.moments
        away = model_state(setup).off_device if recipe.nvme_blocks else {}
        swapped = {"offload_optimizer": ("optimizer", "master"), "offload_param": ("parameters",)}
        for block in recipe.nvme_blocks:
            needed[block] = topology.local_world_size * sum(away.get(name, 0) for name in swapped[block])
    return needed | {"checkpoints": FULL * (1 + moments) * model.parameter_count() * (keep_checkpoints + 2)}


def findings_of_machine(  # noqa: PLR0912 - one for each
    facts: Facts, recipe: Recipe | None, needed: Mapping[str, int]
) -> Iterator[Finding]:
    """Yields the faults of one machine."""
    host = facts["host"]
    for problem in facts["problems"]:
        yield Finding(host, problem, EXAMINE)
    folders = {name: folder for name, folder in facts["folders"].items() if folder}
    for folder in folders.values():
        if not folder["writable"]:
            yield Finding(host, f"{folder['path']} cannot be written", "name a folder that can")
        if folder["problem"]:
            yield Finding(host, folder["problem"], "name a folder on a local drive as nvme_path")
    for disk in dict.fromkeys(folder["disk"] for folder in folders.values()):
        held = {name: folder for name, folder in folders.items() if folder["disk"] == disk}
        size, free = sum(needed.get(name, 0) for name in held), min(folder["free_bytes"] for folder in held.values())
        if free < size:
            paths = " and ".join(dict.fromkeys(folder["path"] for folder in held.values()))
            what = "checkpoints" if [*held] == ["checkpoints"] else "checkpoints and swapped tensors"
            free_of = f"{free / 1e9:.1f} GB are free at {paths}, and {what} take {size / 1e9:.1f} GB"
            yield Finding(host, free_of, "free space, or lower --keep_checkpoints")
    if (shared := facts["shared_memory_bytes"]) is not None and shared < SHARED_MEMORY_BYTES:
        what = f"/dev/shm has {shared / 1e6:.0f} MB free, NCCL and data workers need more"
        yield Finding(host, what, "give the container more (docker run --shm-size=8g)")
    for name, least, letter in (("open_files", OPEN_FILES, "n"), ("processes", PROCESSES, "u")):
        if facts[name] is not None and facts[name] < least:
            what = "a process may open {} files" if letter == "n" else "a user may have {} processes and threads"
            yield Finding(host, what.format(facts[name]), f"raise the limit: ulimit -{letter} {least}")
    if not facts["locks_memory"] and (facts["rdma"] or (recipe and recipe.nvme_blocks)):
        what = f"{'InfiniBand' if facts['rdma'] else 'offload to NVMe'} needs memory that a process may not lock"
        yield Finding(host, what, "raise the limit: ulimit -l unlimited (docker run --ulimit memlock=-1)")
    for name in DATA:
        if facts[name] and facts[name]["problem"]:
            yield Finding(host, facts[name]["problem"], "prepare it here, or mount the folder that has it")
    if facts["port_taken"]:
        what = f"port {DEFAULT_PORT}, at which launchers let ranks meet, is in use"
        yield Finding(host, what, "end what uses it, or name another (--master_port)", stops=False)
    for number, gpu in enumerate(facts["gpus"] or ()):
        yield from _findings_of_gpu(gpu, host, f"GPU {number}")
    installed = (facts["versions"] or {}).get("deepspeed_version")
    for fault in KNOWN_BAD if installed else ():
        concerns = recipe is None or recipe.zero_stage in fault.stages
        if concerns and SpecifierSet(fault.releases).contains(str(installed), prereleases=True):
            stages = ", ".join(map(str, fault.stages))
            when = " with ".join(filter(None, [f"ZeRO {stages}", fault.needs, fault.precision.replace("any", "")]))
            what = f"DeepSpeed {installed} trains wrong ({when}): {fault.effect}"
            yield Finding(host, what, f"install {TESTED} (make install)")
    if recipe is None or recipe.offload_optimizer == "none":
        return
    for what, (has, cure) in {  # what DeepSpeed would compile
        "a C++ compiler": (facts["compiler"], "install one (Debian: apt-get install g++)"),
        "ninja": (facts["ninja"], "install it (pip install ninja)"),
        "the CUDA toolkit": (facts["cuda_toolkit"] or not facts["gpus"], "install it: a driver does not bring nvcc"),
        "asynchronous I/O": (not recipe.nvme_blocks or not facts["libaio"], str(facts["libaio"])),
    }.items():
        if not has:
            yield Finding(host, f"{recipe.path} offloads, which needs {what}", cure)


def _findings_of_gpu(gpu: Facts, host: str, name: str) -> Iterator[Finding]:
    if gpu["uncorrected_errors"]:
        what = f"{name} has {gpu['uncorrected_errors']} uncorrected memory errors since the driver started"
        yield Finding(host, what, "reset it (nvidia-smi --gpu-reset), and replace it if they return")
    if gpu["repair_failed"]:
        yield Finding(host, f"{name} could not replace a broken row of its memory", "replace the GPU")
    elif gpu["repair_pending"]:
        what = f"{name} has broken memory that it replaces when it is reset"
        yield Finding(host, what, "reset it (nvidia-smi --gpu-reset)")
    if gpu["ecc"] is False:
        what = f"{name} corrects no memory errors: ECC is off"
        yield Finding(host, what, "switch it on (nvidia-smi --ecc-config=1, then a reset)", stops=False)
    if gpu["replaced"]:
        what = f"{name} has replaced {counted(gpu['replaced'], 'piece')} of its memory, pages or rows"
        yield Finding(host, what, "watch it, and replace it when they become many", stops=False)
    if (gpu["used_bytes"] or 0) > (gpu["memory_bytes"] or 0) / 10:
        what = f"{name} has {gpu['used_bytes'] / 1e9:.1f} GB in use"
        yield Finding(host, what, "nvidia-smi names the processes: end them, or use other GPUs")


# All machines.


def findings_of_cluster(machines: Sequence[Facts]) -> Iterator[Finding]:
    """Yields the differences between machines that must not be."""
    versions = [facts["versions"] or {} for facts in machines]
    compared = {name: [each.get(name, UNKNOWN) for each in versions] for name in versions[0]}
    kinds = ("name", "driver", "ecc")
    compared["GPUs"] = [[[gpu[kind] for kind in kinds] for gpu in facts["gpus"] or ()] for facts in machines]
    compared["recipes"] = [(facts["recipe"] or UNKNOWN)[:12] for facts in machines]
    cures = {"GPUs": "use machines of one kind", "recipes": "copy one of them to all"}
    for what, values in compared.items():
        known = [value for value in values if value != UNKNOWN]
        if any(value != known[0] for value in known):
            shown = "; ".join(f"{facts['host']} {value}" for facts, value in zip(machines, values, strict=True))
            cure = cures.get(what, "install the same everywhere (make install)")
            yield Finding("all", f"{what} differ: {shown}", cure)
    for name in DATA:
        files = [facts[name] for facts in machines if facts[name] and not facts[name]["problem"]]
        hashes = {file["sha256"] for file in files}
        if len({file["size"] for file in files}) > 1 or len(hashes - {None}) > 1:
            what = f"{files[0]['path']} is not the same file on every machine"
            yield Finding("all", what, "copy one of them to all")
        elif len(files) > 1 and None in hashes:
            what = f"{files[0]['path']}: no hash is noted beside it, so only sizes were compared"
            yield Finding("all", what, "compare what is in it: --verify_data", stops=False)
    for facts in machines[1:]:
        if abs(offset := facts.get("clock_offset_sec", 0.0)) > CLOCK_SEC:
            what = f"its clock is {offset:+.1f} s off that of {machines[0]['host']}"
            yield Finding(facts["host"], what, "synchronise it (chrony, ntp)")


def findings_of_links(links: Sequence[Facts], stated_gbps: float | None) -> Iterator[Finding]:
    """Links that are much slower than the others, and a network that is slow as a whole."""
    speeds = sorted(link["bytes_per_sec"] * 8 / 1e9 for link in links)
    usual = speeds[len(speeds) // 2] if speeds else math.inf
    for link in links:
        if (speed := link["bytes_per_sec"] * 8 / 1e9) < SLOW_LINK * usual:
            what = f"{speed:.2f} Gbit/s to {link['to']}, others have {usual:.2f}"
            yield Finding(link["from"], what, "examine its cable, its interface and its place")
    if usual < (SLOW_LINK * stated_gbps if stated_gbps else LEAST_GBPS):
        expected = f"{stated_gbps:g} were stated" if stated_gbps else f"the least of use is {LEAST_GBPS:g}"
        what = f"the network has {usual:.2f} Gbit/s with {links[0]['transport']}, {expected}"
        cure = "choose the fast interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); NCCL_DEBUG=INFO shows NCCL's choice"
        yield Finding("all", what, cure)


@dataclass(frozen=True, kw_only=True)
class _Meeting:
    """Exchange of the ranks' facts through the store, between all ranks and between the first ranks of the machines."""

    store: "Store"
    rank: int
    places: list[tuple[str, int]]
    """Host and local rank of each rank."""
    on_gpus: bool
    """Whether each rank has a GPU of its own, and NCCL."""

    @property
    def leaders(self) -> list[int]:
        """The first rank of each machine."""
        return [rank for rank, (_, local) in enumerate(self.places) if local == 0]

    @property
    def hosts(self) -> list[str]:
        """The name of each machine."""
        return [host for host, local in self.places if local == 0]

    def gathered(self, key: str, value: Any, *, seconds: float = ANSWER_SEC) -> list[Any]:
        """The value of each machine; None of one that does not answer in time."""
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        names = [f"{key}/{leader}" for leader in self.leaders]
        with contextlib.suppress(RuntimeError):
            self.store.wait(names, timedelta(seconds=seconds))
        return [json.loads(self.store.get(name)) if self.store.check([name]) else None for name in names]


def _examine_together(
    options: DoctorOptions, recipe: Recipe | None, topology: Topology
) -> tuple[list[Facts], list[Finding], list[Facts]]:
    """The facts of all machines, what is wrong between them, and the links; complete on rank 0.

    Raises:
        UserError: some ranks do not come; the line names them.
    """
    import torch.distributed as dist  # noqa: PLC0415 - torch takes seconds

    from dsgpt.machine.device import cuda_devices  # noqa: PLC0415
    from dsgpt.machine.peers import open_store  # noqa: PLC0415

    store = dist.PrefixStore("doctor", open_store(topology, seconds=MEETING_SEC))  # type: ignore[attr-defined]
    own_gpu = topology.local_rank < cuda_devices() and dist.is_nccl_available()
    store.set(f"place/{topology.rank}", json.dumps([socket.gethostname(), topology.local_rank, own_gpu]))
    names = [f"place/{rank}" for rank in range(topology.world_size)]
    try:
        store.wait(names, timedelta(seconds=MEETING_SEC))
    except RuntimeError as error:
        missing = ", ".join(name.removeprefix("place/") for name in names if not store.check([name]))
        raise UserError(f"within {MEETING_SEC} s these ranks did not come: {missing}; are they started?") from error
    came = [json.loads(place) for place in store.multi_get(names)]
    places, on_gpus = [(host, local) for host, local, _ in came], all(gpu for _, _, gpu in came)
    meeting = _Meeting(store=store, rank=topology.rank, places=places, on_gpus=on_gpus)
    machines, findings = list[Facts](), list[Finding]()
    if topology.local_rank == 0:
        patience = timedelta(days=1).total_seconds() if options.verify_data else ANSWER_SEC
        own = machine_facts(options, recipe)
        found = meeting.gathered("facts", own, seconds=patience)
        meeting.gathered("ready", True)  # all go on at the same moment
        clocks = meeting.gathered("clock", time.time())
        for host, facts, clock in zip(meeting.hosts, found, clocks, strict=True):
            if facts is None or clock is None:
                cure = "log in: is it overloaded, does a mount or a driver hang?"
                findings.append(Finding(host, f"does not answer within {patience:g} s", cure))
            else:
                machines.append(facts | {"clock_offset_sec": clock - (clocks[0] or clock)})
        folder = own["folders"]["checkpoints"] or {"place": options.checkpoint_path}
        findings += _shared_folder(Path(folder["place"]), meeting)
    count = len(meeting.leaders)
    distances = range(1, count) if options.all_pairs else [2**power for power in range(ROUNDS) if 2**power < count]
    asked = {"links": ("the network between the machines", partial(_links, meeting, distances))}
    links, problems = _answers(asked, ROUND_SEC * (2 + len(distances))) if count > 1 else ({"links": []}, [])
    cure = "open all ports between them (firewall, security group), or choose the interface (GLOO_SOCKET_IFNAME)"
    findings += [Finding("all", problem.splitlines()[0], cure) for problem in problems]
    return machines, findings, links["links"] or []


def _shared_folder(folder: Path, meeting: _Meeting) -> list[Finding]:
    """Whether every machine sees, at once, what another one writes and replaces there."""
    token = meeting.gathered("token", uuid.uuid4().hex)[0]
    marks = [folder / f".doctor-{token}-{leader}" for leader in meeting.leaders]
    own = folder / f".doctor-{token}-{meeting.rank}"

    def write() -> str:
        own.with_suffix(".partial").write_text(own.name)
        own.with_suffix(".partial").replace(own)
        return ""

    def see() -> str:
        wrote = [(host, mark) for host, mark, why in zip(meeting.hosts, marks, problems, strict=True) if why == ""]
        end = time.monotonic() + SEEN_SEC
        while (unseen := [host for host, mark in wrote if not mark.exists()]) and time.monotonic() < end:
            time.sleep(0.05)
        words = f"{folder} does not show what {', '.join(unseen)} wrote there: it is not one shared folder"
        return words if unseen else ""

    def follow() -> str:
        """The first machine replaces its file, the others read it."""
        lost, end = 0, time.monotonic() + RENAMED_SEC
        while time.monotonic() < end:
            if own == marks[0]:
                write()
                continue
            try:
                lost += marks[0].read_text() != marks[0].name
            except OSError as error:  # NFS may have removed the old file while it is read: that is no loss
                lost += error.errno == errno.ENOENT
        words = f"{folder}: a file was missing {lost} times while {meeting.hosts[0]} renamed another over it"
        return words if lost else ""

    problem, problems = "", list[str | None]()
    for name, step in {"written": write, "seen": see, "replaced": follow}.items():
        if not problem:
            found, late = _answers({name: (folder, step)}, PROBE_SEC + SEEN_SEC)
            problem = found[name] or "".join(late)
        problems = meeting.gathered(name, problem)
    _answers({"": (folder, partial(own.unlink, missing_ok=True))}, PROBE_SEC)
    cure = "mount one folder on all machines, which renames files atomically, and name it with --checkpoint_path"
    return [Finding(host, why, cure) for host, why in zip(meeting.hosts, problems, strict=True) if why]


def _links(meeting: _Meeting, distances: Sequence[int]) -> list[Facts]:
    """Bandwidth and latency from each machine to those that many places after it, with the backend of a training.

    In each round all ranks of all machines send at once. Ranks that are not in the order of their machines leave it to
    the first one of each.
    """
    import torch  # noqa: PLC0415 - it takes seconds
    import torch.distributed as dist  # noqa: PLC0415

    from dsgpt.machine.device import gather_objects  # noqa: PLC0415

    if meeting.on_gpus:
        torch.cuda.set_device(meeting.places[meeting.rank][1])
    backend, timeout = "cpu:gloo,cuda:nccl" if meeting.on_gpus else "gloo", timedelta(seconds=ANSWER_SEC)
    hosts, machines, ranks = meeting.hosts, len(meeting.hosts), len(meeting.places)
    dist.init_process_group(backend, store=meeting.store, rank=meeting.rank, world_size=ranks, timeout=timeout)
    dist.all_reduce(torch.zeros(1, device="cuda" if meeting.on_gpus else "cpu"))  # NCCL connects all ranks here
    width = ranks // machines
    if meeting.places != [(host, local) for host in hosts for local in range(width)]:
        width = 1
    crews = [range(leader, leader + width) for leader in meeting.leaders]
    links = []
    for distance in distances:
        ends: tuple[int, int] | None = None
        for place, crew in enumerate(crews):
            if meeting.rank in crew:
                local = crew.index(meeting.rank)
                ends = crews[(place + distance) % machines][local], crews[place - distance][local]
        figures = gather_objects(_exchange(ends, on_gpus=meeting.on_gpus))
        for place, crew in enumerate(crews):
            to = (place + distance) % machines
            seconds = max(figures[rank]["received_sec"] for rank in crews[to])
            if meeting.on_gpus:  # NCCL ends sending and receiving together: a slow link shows at both of its ends
                seconds = min(seconds, max(figures[rank]["received_sec"] for rank in crew))
            link = {"from": hosts[place], "to": hosts[to], "transport": NCCL if meeting.on_gpus else TCP}
            rate = width * figures[crew[0]]["bytes"] / seconds
            latency = max(figures[rank]["latency_sec"] for rank in crews[to])
            links.append(link | {"bytes_per_sec": rate, "latency_sec": latency})
    return links


def _exchange(ends: tuple[int, int] | None, *, on_gpus: bool) -> dict[str, float]:
    """Bytes that this rank gets from the second of ``ends`` while it sends as many to the first, and how long it takes.

    Collective; a rank without ``ends`` only keeps time with the others.
    """
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    from dsgpt.machine.device import gather_objects  # noqa: PLC0415

    def received_sec(out: "Tensor", into: "Tensor") -> float:
        """Seconds from a common start until the second of ``ends`` has sent ``into``, while the first is sent ``out``.

        With NCCL, until both is done.
        """
        dist.all_reduce(torch.zeros(1))
        if ends is None:
            return 0.0
        started = time.perf_counter()
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, out, ends[0]), dist.P2POp(dist.irecv, into, ends[1])])
        works[-1].wait()
        if on_gpus:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        works[0].wait()
        return seconds

    def times(size: int, count: int) -> list[float]:
        out, into = torch.zeros(2, size // 4, device="cuda" if on_gpus else "cpu")
        return sorted(received_sec(out, into) for _ in range(count))

    times(4, 2)  # connects
    latency = times(4, PINGS)[PINGS // 2]
    trial = max(gather_objects(times(TRIAL_BYTES, 1)[0]))
    size = min(SENT_BYTES, max(TRIAL_BYTES, int(TRIAL_BYTES * SENT_SEC / trial) // 4 * 4))
    return {"bytes": size, "received_sec": times(size, 2)[0], "latency_sec": latency}
