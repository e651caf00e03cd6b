"""``dsgpt doctor``: what would stop or slow a training on this machine, or on all machines of a cluster.

Alone it examines this machine. Under a launcher every rank runs it: the first rank of each machine examines its own,
rank 0 compares all of them and prints. Nothing here trains; what it writes into the shared folder it removes.
"""

import contextlib
import os
import resource
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

from dsgpt.common.command_line import POSITIVE, choice, flag, read_options, switch
from dsgpt.common.errors import EXIT_DONE, Problems, UserError
from dsgpt.common.files import json_text
from dsgpt.common.text import counted
from dsgpt.config.compatibility import KNOWN_BAD, TESTED
from dsgpt.config.recipe import read_recipe
from dsgpt.data.token_file import TokenFileError, open_token_file
from dsgpt.machine.topology import Topology, read_topology
from dsgpt.model.config import PRESETS

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import TCPStore

DESCRIPTION = """\
Examine this machine before a training, or a cluster: start it under the launcher of the training, on all ranks. Every
finding is a line with its cure. Exit code 0: nothing would stop a training; 1: something would."""
EXAMPLES = """\
examples:
  .venv/bin/python src/doctor.py
  .venv/bin/python src/doctor.py --model_size xl --deepspeed_config ds_configs/zero2_offload.json
  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint 10.0.0.1:29500 src/doctor.py
  srun --nodes=2 --ntasks-per-node=8 --gpu-bind=none launch/slurm/rank.sh .venv/bin/python src/doctor.py"""
EXIT_FINDINGS = 1
DEFAULT_PORT = 29500
"""Port of torchrun, DeepSpeed's launcher and the scripts in ``launch/``."""
MEETING_SEC = 60
"""Seconds for all ranks to come."""
SEEN_SEC = 5.0
"""Seconds for what one machine writes to be seen by the others; network file systems keep directories that long."""
CLOCK_SEC = 1.0
"""Clocks may differ by this much: logs of machines are compared by their times, and leases end by them."""
ROUNDS = 8
"""Rounds of the measurement of the network: each machine with those 1, 2, 4, ... places after it."""
SENT_BYTES, PINGS = 32 << 20, 20
SLOW_LINK = 0.5
"""A link is slow if it has less than this share of the median of all."""
SHARED_MEMORY_BYTES, OPEN_FILES = 1 << 30, 4096
BYTES_PER_PARAMETER = 12
"""Bytes per parameter in a checkpoint: weight and two moments in fp32."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The command line."""

    checkpoint_path: Path = flag(
        Path,
        "DIR",
        "where runs will write; all machines must share it (default: %(default)s)",
        default=Path("checkpoint"),
    )
    train_data_path: Path | None = flag(Path, "BIN", "training data, which every machine must have")
    val_data_path: Path | None = flag(Path, "BIN", "validation data, likewise")
    verify_data: bool = switch("read the data and compare its hash, instead of the one that is noted beside it")
    model_size: str = flag(choice(tuple(PRESETS)), "SIZE", f"{', '.join(PRESETS)} (small)", default="small")
    keep_checkpoints: int = flag(POSITIVE, "N", "checkpoints that the run keeps (default: %(default)s)", default=2)
    deepspeed_config: Path | None = flag(Path, "JSON", "the recipe: what offload needs is examined, too")
    all_pairs: bool = switch("measure the network between all pairs of machines, not only with some neighbours")
    json: bool = switch("print JSON instead of lines")


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
"""Facts about one machine, as JSON."""


def main() -> int:
    """Examine, print, and return the exit code."""
    options, problems = read_options(DoctorOptions, prog="doctor.py", description=DESCRIPTION, epilog=EXAMPLES)
    problems.raise_if_any()
    topology, started = read_topology(), time.perf_counter()
    if topology.world_size == 1:
        machines, between = [machine_facts(options)], list[Finding]()
        links: list[Facts] = []
    else:
        machines, between, links = _examine_together(options, topology)
    if not topology.is_main:
        return EXIT_DONE
    findings = [finding for facts in machines for finding in findings_of_machine(facts, options)]
    findings += [*between, *findings_of_cluster(machines), *findings_of_links(links)]
    seconds = time.perf_counter() - started
    if options.json:
        shown = {"machines": machines, "links": links, "findings": [asdict(each) for each in findings]}
        print(json_text(shown | {"seconds": round(seconds, 2)}), end="")
    else:
        for facts in machines:
            gpus, versions = facts["gpus"], facts["versions"]
            devices = f"{len(gpus)} x {gpus[0]['name']}" if gpus else f"{facts['cpus']} CPUs"
            about = f"Python {versions['python_version']}, torch {versions['torch_version']}"
            print(f"{facts['host']}: {devices}, {about}")
        for link in links:
            speed, latency = link["bytes_per_sec"] * 8 / 1e9, link["latency_sec"] * 1e6
            print(f"{link['from']} to {link['to']}: {speed:.2f} Gbit/s, {latency:.0f} us")
        for each in findings:
            print(f"{'finding' if each.stops else 'remark'}: {each.where}: {each.what}: {each.cure}")
        stopping = sum(each.stops for each in findings)
        print(f"{counted(len(machines), 'machine')}, {counted(stopping, 'finding')}, {seconds:.1f} s")
    return EXIT_FINDINGS if any(each.stops for each in findings) else EXIT_DONE


# One machine.


def machine_facts(options: DoctorOptions) -> Facts:
    """Facts that a machine finds without the others."""
    from dsgpt.machine.device import cuda_devices, software_versions  # noqa: PLC0415 - torch takes seconds
    from dsgpt.machine.probe import compiler, has_cuda_toolkit, libaio_problem  # noqa: PLC0415

    command = compiler()
    folder = options.checkpoint_path
    while not folder.exists():  # what a run would create
        folder = folder.absolute().parent
    return {
        "host": socket.gethostname(),
        "time": time.time(),
        "versions": software_versions(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": _gpus() if cuda_devices() else [],
        "free_bytes": shutil.disk_usage(folder).free,
        "writable": os.access(folder, os.W_OK),
        "shared_memory_bytes": shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "compiler": " ".join(command) or None,
        "ninja": shutil.which("ninja") is not None,
        "cuda_toolkit": has_cuda_toolkit(),
        "libaio": libaio_problem(command) if command else "finds no compiler",
        "port_taken": _is_taken(DEFAULT_PORT) if "MASTER_PORT" not in os.environ else False,
        "data": [
            _data_facts(path, verify=options.verify_data)
            for path in (options.train_data_path, options.val_data_path)
            if path
        ],
    }


def _is_taken(port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the launchers' store
        try:
            one.bind(("", port))
        except OSError:
            return True
    return False


def _data_facts(path: Path, *, verify: bool) -> Facts:
    facts: Facts = {"path": str(path), "problem": None, "sha256": None, "size": None}
    try:
        file = open_token_file(path)
        facts |= {"size": path.stat().st_size, "sha256": file.verified_sha256() if verify else file.sidecar.sha256}
        facts["problem"] = file.doubt() or None
    except (TokenFileError, OSError) as error:
        facts["problem"] = str(error)
    return facts


def _gpus() -> list[Facts]:
    """Name, memory, driver and uncorrected memory errors of every GPU, by NVIDIA's management library."""
    import pynvml  # noqa: PLC0415 - only where there is a GPU

    pynvml.nvmlInit()
    driver, gpus = pynvml.nvmlSystemGetDriverVersion(), []
    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        errors = None
        with contextlib.suppress(pynvml.NVMLError):  # without ECC
            kinds = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
            errors = pynvml.nvmlDeviceGetTotalEccErrors(gpu, *kinds)
        memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
        facts = {"name": pynvml.nvmlDeviceGetName(gpu), "driver": driver, "uncorrected_errors": errors}
        gpus.append(facts | {"memory_bytes": memory.total, "used_bytes": memory.used})
    return gpus


def findings_of_machine(facts: Facts, options: DoctorOptions) -> Iterator[Finding]:  # noqa: PLR0912 - one for each
    """Yields the faults of one machine."""
    host = facts["host"]
    parameters = PRESETS[options.model_size].parameter_count()
    needed = BYTES_PER_PARAMETER * parameters * (options.keep_checkpoints + 1)  # one is written before one is removed
    if not facts["writable"]:
        yield Finding(host, f"{options.checkpoint_path} cannot be written", "name a folder that can")
    if facts["free_bytes"] < needed:
        free = f"{facts['free_bytes'] / 1e9:.1f} GB are free at {options.checkpoint_path}"
        what = f"{free}, and checkpoints take {needed / 1e9:.1f} GB"
        yield Finding(host, what, "free space, or lower --keep_checkpoints")
    shared = facts["shared_memory_bytes"]
    if shared is not None and shared < SHARED_MEMORY_BYTES:
        what = f"/dev/shm has {shared / 1e6:.0f} MB free, NCCL and data workers need more"
        yield Finding(host, what, "give the container more (docker run --shm-size=8g)")
    if facts["open_files"] < OPEN_FILES:
        what = f"a process may open {facts['open_files']} files"
        yield Finding(host, what, f"raise the limit: ulimit -n {OPEN_FILES}")
    for problem in filter(None, (data["problem"] for data in facts["data"])):
        yield Finding(host, problem, "prepare it here, or mount the folder that has it")
    if facts["port_taken"]:
        what = f"port {DEFAULT_PORT}, at which launchers let ranks meet, is in use"
        yield Finding(host, what, "end what uses it, or name another (--master_port)", stops=False)
    for number, gpu in enumerate(facts["gpus"]):
        if gpu["uncorrected_errors"]:
            what = f"GPU {number} has {gpu['uncorrected_errors']} uncorrected memory errors since the driver started"
            yield Finding(host, what, "reset it (nvidia-smi --gpu-reset), and replace it if they return")
        if gpu["used_bytes"] > gpu["memory_bytes"] / 10:
            what = f"GPU {number} has {gpu['used_bytes'] / 1e9:.1f} GB in use"
            yield Finding(host, what, "nvidia-smi names the processes: end them, or use other GPUs")
    problems = Problems()
    recipe = read_recipe(options.deepspeed_config, problems) if options.deepspeed_config else None
    problems.raise_if_any()
    installed = facts["versions"]["deepspeed_version"]
    for fault in KNOWN_BAD if installed else ():
        concerns = recipe is None or recipe.zero_stage in fault.stages
        if concerns and SpecifierSet(fault.releases).contains(installed, prereleases=True):
            stages = ", ".join(map(str, fault.stages))
            when = " with ".join(filter(None, [f"ZeRO {stages}", fault.needs, fault.precision.replace("any", "")]))
            what = f"DeepSpeed {installed} trains wrong ({when}): {fault.effect}"
            yield Finding(host, what, f"install {TESTED} (make install)")
    if recipe is None or recipe.offload_optimizer == "none":
        return
    needs = {  # what DeepSpeed would compile
        "a C++ compiler": (facts["compiler"], "install one (Debian: apt-get install g++)"),
        "ninja": (facts["ninja"], "install it (pip install ninja)"),
        "the CUDA toolkit": (facts["cuda_toolkit"] or not facts["gpus"], "install it: a driver does not bring nvcc"),
        "asynchronous I/O": (not recipe.nvme_blocks or not facts["libaio"], str(facts["libaio"])),
    }
    for what, (has, cure) in needs.items():
        if not has:
            yield Finding(host, f"{options.deepspeed_config} offloads, which needs {what}", cure)


# All machines.


def findings_of_cluster(machines: Sequence[Facts]) -> Iterator[Finding]:
    """Yields the differences between machines that must not be."""
    compared = {name: [facts["versions"][name] for facts in machines] for name in machines[0]["versions"]}
    compared["GPUs"] = [[(gpu["name"], gpu["driver"]) for gpu in facts["gpus"]] for facts in machines]
    for what, values in compared.items():
        if any(value != values[0] for value in values):
            shown = "; ".join(f"{facts['host']} {value}" for facts, value in zip(machines, values, strict=True))
            cure = "install the same everywhere (make install)" if what != "GPUs" else "use machines of one kind"
            yield Finding("all", f"{what} differ: {shown}", cure)
    for number in range(len(machines[0]["data"])):
        hashes = {facts["data"][number]["sha256"] for facts in machines if not facts["data"][number]["problem"]}
        if len(hashes) > 1:
            path = machines[0]["data"][number]["path"]
            yield Finding("all", f"{path} is not the same file on every machine", "copy one of them to all")
    for facts in machines[1:]:
        if abs(offset := facts.get("clock_offset_sec", 0.0)) > CLOCK_SEC:
            what = f"its clock is {offset:+.1f} s off that of {machines[0]['host']}"
            yield Finding(facts["host"], what, "synchronise it (chrony, ntp)")


def findings_of_links(links: Sequence[Facts]) -> Iterator[Finding]:
    """Links that are much slower than the others."""
    speeds = sorted(link["bytes_per_sec"] for link in links)
    for link in links:
        usual = speeds[len(speeds) // 2]
        if len(links) > 2 and link["bytes_per_sec"] < SLOW_LINK * usual:
            what = f"{link['bytes_per_sec'] * 8 / 1e9:.2f} Gbit/s to {link['to']}, others have {usual * 8 / 1e9:.2f}"
            yield Finding(link["from"], what, "examine its cable, its interface and its place")


def _examine_together(options: DoctorOptions, topology: Topology) -> tuple[list[Facts], list[Finding], list[Facts]]:
    """The facts of all machines, what is wrong with their shared folder, and the links; on rank 0.

    Raises:
        UserError: some ranks do not come; the line names them.
    """
    import torch.distributed as dist  # noqa: PLC0415 - torch takes seconds
    from torch._C._distributed_c10d import PrefixStore  # noqa: PLC0415

    store = _meet(topology)
    dist.init_process_group(
        "gloo", store=PrefixStore("doctor", store), rank=topology.rank, world_size=topology.world_size
    )
    leads = topology.local_rank == 0
    leaders = _gathered(topology.rank if leads else None)
    facts = _gathered(machine_facts(options) if leads else None)
    offsets = _clock_offsets(topology, leaders)
    machines = [each | {"clock_offset_sec": offset} for each, offset in zip(facts, offsets, strict=True)]
    shared = _shared_folder(options.checkpoint_path, topology, leaders, [each["host"] for each in facts])
    links = _links(topology, leaders, [each["host"] for each in facts], all_pairs=options.all_pairs)
    dist.destroy_process_group()
    return machines, shared, links


def _meet(topology: Topology) -> "TCPStore":
    """The store in which the ranks exchange their facts; waits for all of them."""
    from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415 - torch takes seconds

    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        raise UserError("not set: MASTER_ADDR or MASTER_PORT, where the ranks meet: start them with a launcher")
    wait, agent = timedelta(seconds=MEETING_SEC), os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(address, int(port), None, topology.is_main and not agent, wait, wait_for_workers=False)
        store.set(f"doctor/{topology.rank}", socket.gethostname())
        names = [f"doctor/{rank}" for rank in range(topology.world_size)]
        deadline = time.monotonic() + MEETING_SEC
        while not store.check(names):
            if time.monotonic() > deadline:
                missing = [name.removeprefix("doctor/") for name in names if not store.check([name])]
                raise UserError(
                    f"within {MEETING_SEC} s these ranks did not come: {', '.join(missing)}; are they started?"
                )
            time.sleep(0.2)
    except RuntimeError as error:
        raise UserError(f"{address}:{port} cannot be reached: {str(error).splitlines()[0]}") from error
    return store


def _gathered(value: Any) -> list[Any]:
    """The values of all ranks that have one."""
    import torch.distributed as dist  # noqa: PLC0415

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return [each for each in values if each is not None]


def _clock_offsets(topology: Topology, leaders: Sequence[int]) -> list[float]:
    """Seconds by which the clock of each machine is ahead of the first one's, from the quickest of a few exchanges."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    offsets = [0.0]
    for leader in leaders[1:]:
        best, offset = float("inf"), torch.zeros(1, dtype=torch.float64)
        for _ in range(5):
            there = torch.zeros(1, dtype=torch.float64)
            if topology.rank == leaders[0]:
                asked = time.time()
                dist.send(there, leader)
                dist.recv(there, leader)
                answered = time.time()
                if answered - asked < best:
                    best, offset[0] = answered - asked, float(there) - (asked + answered) / 2
            elif topology.rank == leader:
                dist.recv(there, leaders[0])
                dist.send(torch.tensor([time.time()], dtype=torch.float64), leaders[0])
        offsets.append(float(offset))
    return offsets


def _shared_folder(folder: Path, topology: Topology, leaders: Sequence[int], hosts: Sequence[str]) -> list[Finding]:
    """Whether every machine sees, at once, what another one writes and renames there."""
    import torch.distributed as dist  # noqa: PLC0415

    leads = topology.rank in leaders
    token = f".doctor-{os.environ.get('MASTER_PORT')}"
    problem: str | None = None
    if leads:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{token}-{topology.rank}.partial").write_text(str(topology.rank))
            (folder / f"{token}-{topology.rank}.partial").replace(folder / f"{token}-{topology.rank}")
        except OSError as error:
            problem = f"{folder} cannot be written ({error.strerror})"
    dist.barrier()
    if leads and problem is None:
        deadline = time.monotonic() + SEEN_SEC
        missing = list(leaders)
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not (folder / f"{token}-{rank}").exists()]
            time.sleep(0.05 * bool(missing))
        if missing:
            unseen = ", ".join(hosts[leaders.index(rank)] for rank in missing)
            problem = f"{folder} does not show what {unseen} wrote there: it is not one shared folder"
    problems = _gathered((socket.gethostname(), problem) if leads else None)
    if leads:
        (folder / f"{token}-{topology.rank}").unlink(missing_ok=True)
    cure = "mount one folder on all machines, and name it with --checkpoint_path"
    return [Finding(host, what, cure) for host, what in problems if what]


def _links(topology: Topology, leaders: Sequence[int], hosts: Sequence[str], *, all_pairs: bool) -> list[Facts]:
    """Bandwidth and latency from each machine to some others, all machines at once in each round."""
    machines = len(leaders)
    distances = range(1, machines) if all_pairs else [2**power for power in range(ROUNDS) if 2**power < machines]
    own: list[Facts] = []
    place = leaders.index(topology.rank) if topology.rank in leaders else None
    for distance in distances:
        if place is not None:
            to, source = leaders[(place + distance) % machines], leaders[(place - distance) % machines]
            seconds, latency = _exchange(to, source)
            link = {"from": hosts[place], "to": hosts[leaders.index(to)]}
            own.append(link | {"bytes_per_sec": SENT_BYTES / seconds, "latency_sec": latency})
    return [link for links in _gathered(own if place is not None else None) for link in links]


def _exchange(to: int, source: int) -> tuple[float, float]:
    """Seconds to send ``SENT_BYTES`` while as many come, and the seconds of a small message."""
    import torch  # noqa: PLC0415

    small, large = torch.zeros(1), torch.zeros(SENT_BYTES // 4)
    _swap(small, torch.empty_like(small), to, source)
    times = [_swap(small, torch.empty_like(small), to, source) for _ in range(PINGS)]
    seconds = min(_swap(large, torch.empty_like(large), to, source) for _ in range(2))
    return seconds, sorted(times)[PINGS // 2]


def _swap(out: "Tensor", into: "Tensor", to: int, source: int) -> float:
    """Seconds until this rank has sent one tensor and received another."""
    import torch.distributed as dist  # noqa: PLC0415

    started = time.perf_counter()
    waits: Mapping[str, Any] = {"sent": dist.isend(out, to), "received": dist.irecv(into, source)}
    for wait in waits.values():
        wait.wait()
    return time.perf_counter() - started
