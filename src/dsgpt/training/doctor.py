"""``dsgpt doctor``: what would stop or slow a training on this machine, or on all machines of a cluster.

Alone it examines this machine. Under a launcher every rank runs it: the first rank of each machine examines its own,
rank 0 compares all of them and prints. Nothing here trains; what it writes into the shared folder it removes.
"""

import contextlib
import math
import os
import resource
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

from dsgpt.common.command_line import NUMBER, POSITIVE, choice, flag, read_options, switch
from dsgpt.common.errors import EXIT_DONE, Problems, UserError
from dsgpt.common.files import json_text, write_json_atomic
from dsgpt.common.json_files import read_object
from dsgpt.common.text import counted
from dsgpt.config.compatibility import KNOWN_BAD, TESTED
from dsgpt.config.recipe import read_recipe
from dsgpt.data.token_file import TokenFileError, open_token_file
from dsgpt.machine.topology import Topology, read_topology
from dsgpt.model.config import PRESETS
from dsgpt.planner.rates import Network, read_calibration

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
TRIAL_BYTES, SENT_SEC = 1 << 20, 0.5
"""Bytes of a trial, and seconds for which a slow network sends: the trial's speed decides how much is sent."""
SLOW_LINK = 0.5
"""A link is slow if it has less than this share of the median of all; a network, if it has less of what was stated."""
LEAST_GBPS = 1.0
"""Slowest sound network, in Gbit/s, if none was stated."""
NCCL, TCP = "NCCL", "gloo over TCP"
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
    network_gbps: float | None = flag(NUMBER, "X", "Gbit/s that the network between the machines should have")
    machine: Path | None = flag(Path, "JSON", "a calibration of plan.py, into which the measured network is written")
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
    topology, started = read_topology(), time.perf_counter()
    if options.machine is not None and topology.is_main:
        if topology.world_size == topology.local_world_size:
            problems.add("--machine is for the network between machines: start this under a launcher, on all of them")
        read_calibration(options.machine)
        if "calibration" in read_object(options.machine):
            problems.add(
                f"--machine {options.machine}: is a record that holds a calibration: name a file of --calibrate"
            )
    problems.raise_if_any()
    if topology.world_size == 1:
        machines, between = [machine_facts(options)], list[Finding]()
        links: list[Facts] = []
    else:
        machines, between, links = _examine_together(options, topology)
    if not topology.is_main:
        return EXIT_DONE
    findings = [finding for facts in machines for finding in findings_of_machine(facts, options)]
    findings += [*between, *findings_of_cluster(machines), *findings_of_links(links, options.network_gbps)]
    if options.machine is not None:
        network = Network(
            timestamp_utc=datetime.now(UTC).isoformat(timespec="seconds"),
            machines=len(machines),
            transport=links[0]["transport"],
            bytes_per_sec=min(link["bytes_per_sec"] for link in links),
            latency_sec=max(link["latency_sec"] for link in links),
        )
        write_json_atomic(options.machine, read_object(options.machine) | {"network": asdict(network)})
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
            print(f"{link['from']} to {link['to']}: {speed:.2f} Gbit/s, {latency:.0f} us, with {link['transport']}")
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


def findings_of_links(links: Sequence[Facts], stated_gbps: float | None) -> Iterator[Finding]:
    """Links that are much slower than the others, and a network that is slow as a whole."""
    speeds = sorted(link["bytes_per_sec"] * 8 / 1e9 for link in links)
    usual = speeds[len(speeds) // 2] if speeds else math.inf
    for link in links:
        speed = link["bytes_per_sec"] * 8 / 1e9
        if speed < SLOW_LINK * usual:
            what = f"{speed:.2f} Gbit/s to {link['to']}, others have {usual:.2f}"
            yield Finding(link["from"], what, "examine its cable, its interface and its place")
    if usual < (SLOW_LINK * stated_gbps if stated_gbps else LEAST_GBPS):
        expected = f"{stated_gbps:g} were stated" if stated_gbps else f"the least of use is {LEAST_GBPS:g}"
        what = f"the network has {usual:.2f} Gbit/s with {links[0]['transport']}, {expected}"
        cure = "choose the fast interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); NCCL_DEBUG=INFO shows NCCL's choice"
        yield Finding("all", what, cure)


def _examine_together(options: DoctorOptions, topology: Topology) -> tuple[list[Facts], list[Finding], list[Facts]]:
    """The facts of all machines, what is wrong with their shared folder, and the links; on rank 0.

    Raises:
        UserError: some ranks do not come; the line names them.
    """
    import torch  # noqa: PLC0415 - it takes seconds
    import torch.distributed as dist  # noqa: PLC0415
    from torch._C._distributed_c10d import PrefixStore  # noqa: PLC0415

    from dsgpt.machine.device import cuda_devices  # noqa: PLC0415

    own_gpu = topology.local_rank < cuda_devices() and dist.is_nccl_available()
    store = _meet(topology, on_gpu=own_gpu)
    on_gpus = all(store.get(f"doctor/{rank}") == b"gpu" for rank in range(topology.world_size))
    if on_gpus:
        torch.cuda.set_device(topology.local_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
        store=PrefixStore("doctor", store),
        rank=topology.rank,
        world_size=topology.world_size,
    )
    leads = topology.local_rank == 0
    leaders = _gathered(topology.rank if leads else None)
    facts = _gathered(machine_facts(options) if leads else None)
    offsets = _clock_offsets(topology, leaders)
    machines = [each | {"clock_offset_sec": offset} for each, offset in zip(facts, offsets, strict=True)]
    shared = _shared_folder(options.checkpoint_path, topology, leaders, [each["host"] for each in facts])
    links = _links(topology, [each["host"] for each in facts], all_pairs=options.all_pairs)
    dist.destroy_process_group()
    return machines, shared, links


def _meet(topology: Topology, *, on_gpu: bool) -> "TCPStore":
    """The store in which the ranks exchange their facts, and whether each has a GPU of its own; waits for all."""
    from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415 - torch takes seconds

    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        raise UserError("not set: MASTER_ADDR or MASTER_PORT, where the ranks meet: start them with a launcher")
    wait, agent = timedelta(seconds=MEETING_SEC), os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(address, int(port), None, topology.is_main and not agent, wait, wait_for_workers=False)
        store.set(f"doctor/{topology.rank}", "gpu" if on_gpu else "cpu")
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


def _links(topology: Topology, hosts: Sequence[str], *, all_pairs: bool) -> list[Facts]:
    """Bandwidth and latency from each machine to some others; in each round all ranks of all machines send at once.

    Ranks that are not in the order of their machines leave it to the first one of each.
    """
    import torch.distributed as dist  # noqa: PLC0415 - torch takes seconds

    machines, transport = len(hosts), NCCL if "nccl" in str(dist.get_backend_config()) else TCP
    places = _gathered((socket.gethostname(), topology.local_rank))
    leaders = [rank for rank, (_, local) in enumerate(places) if local == 0]
    width = len(places) // machines
    if places != [(host, local) for host in hosts for local in range(width)]:
        width = 1
    crews = [range(leader, leader + width) for leader in leaders]
    distances = range(1, machines) if all_pairs else [2**power for power in range(ROUNDS) if 2**power < machines]
    links = []
    for distance in distances:
        ends: tuple[int, int] | None = None
        for place, crew in enumerate(crews):
            if topology.rank in crew:
                there, back = crews[(place + distance) % machines], crews[place - distance]
                ends = there[crew.index(topology.rank)], back[crew.index(topology.rank)]
        figures = dict(enumerate(_gathered(_exchange(ends, on_gpu=transport == NCCL))))
        for place, crew in enumerate(crews):
            to = (place + distance) % machines
            seconds = max(figures[rank]["received_sec"] for rank in crews[to])
            if transport == NCCL:  # it ends sending and receiving together: a slow link shows at both of its ends
                seconds = min(seconds, max(figures[rank]["received_sec"] for rank in crew))
            link = {"from": hosts[place], "to": hosts[to], "transport": transport}
            rate = width * figures[crew[0]]["bytes"] / seconds
            latency = max(figures[rank]["latency_sec"] for rank in crews[to])
            links.append(link | {"bytes_per_sec": rate, "latency_sec": latency})
    return links


def _exchange(ends: tuple[int, int] | None, *, on_gpu: bool) -> dict[str, float]:
    """Bytes that this rank gets from the second of ``ends`` while it sends as many to the first, and how long it takes.

    Collective; a rank without ``ends`` only keeps time with the others.
    """
    import torch  # noqa: PLC0415

    device = "cuda" if on_gpu else "cpu"

    def best(size: int, times: int) -> list[float]:
        pair = torch.zeros(2, size // 4, device=device)
        return sorted(_received_sec(pair[0], pair[1], ends) for _ in range(times))

    best(4, 2)  # connects
    latency = best(4, PINGS)[PINGS // 2]
    trial = max(_gathered(best(TRIAL_BYTES, 1)[0]))
    size = min(SENT_BYTES, max(TRIAL_BYTES, int(TRIAL_BYTES * SENT_SEC / max(trial, 1e-6)) // 4 * 4))
    return {"bytes": size, "received_sec": best(size, 2)[0], "latency_sec": latency}


def _received_sec(out: "Tensor", into: "Tensor", ends: tuple[int, int] | None) -> float:
    """Seconds from a common start until the second of ``ends`` has sent ``into``, while the first one is sent ``out``.

    With NCCL, until both is done.
    """
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    dist.all_reduce(torch.zeros(1))
    if ends is None:
        return 0.0
    started = time.perf_counter()
    both = [dist.P2POp(dist.isend, out, ends[0]), dist.P2POp(dist.irecv, into, ends[1])]
    works = dist.batch_isend_irecv(both)
    works[-1].wait()
    if out.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    works[0].wait()
    return seconds
