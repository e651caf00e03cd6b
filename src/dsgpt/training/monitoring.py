"""Which rank samples which GPUs: one rank of each machine samples those of all its ranks."""

import torch

from dsgpt.config.run_config import RunConfig
from dsgpt.runtime.process_group import gather_objects
from dsgpt.telemetry.environment import host_name
from dsgpt.telemetry.gpus import open_gpus
from dsgpt.telemetry.monitor import Monitor, hardware_file


def open_monitor(config: RunConfig, device: torch.device) -> Monitor:
    """The monitor of this rank, which samples nothing on all ranks but the first of each machine; collective.

    It samples nothing on a CPU either, with ``--monitor_every 0``, and where there is no driver to ask.
    """
    every, topology = config.options.monitor_every, config.topology
    if device.type != "cuda" or not every:
        return Monitor()
    own = (host_name(), topology.local_rank, f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    ranks: list[tuple[str, int, str]] = gather_objects(own)
    uuids, node = gpus_to_sample(ranks, rank=topology.rank)
    return Monitor(open_gpus(uuids), path=config.run_dir / hardware_file(node), every=every) if uuids else Monitor()


def gpus_to_sample(ranks: list[tuple[str, int, str]], *, rank: int) -> tuple[list[str], int]:
    """The GPUs that ``rank`` samples, none for most ranks, and the number of its machine.

    Two machines may have the same name. Then each is given the GPUs of both, and finds only its own.

    Args:
        ranks: host, local rank and GPU of each rank.
        rank: the rank.
    """
    host, local_rank, _ = ranks[rank]
    if local_rank != 0:
        return [], 0
    node = sum(other == 0 for _, other, _ in ranks[:rank])
    return [uuid for other, _, uuid in ranks if other == host], node
