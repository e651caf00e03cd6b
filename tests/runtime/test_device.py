"""Whether each process of a machine has a GPU. The tests need none."""

import pytest

from dsgpt.machine import device
from dsgpt.machine.topology import Topology

TASK = {"SLURM_GPUS_PER_TASK": "1", "SLURM_NTASKS": "16", "SLURM_PROCID": "11"}


@pytest.mark.parametrize(
    ("gpus", "environment", "fits"),
    [
        (8, {}, True),
        (4, {}, False),
        (1, {}, False),
        (1, TASK, True),
        (2, TASK, False),
        (1, TASK | {"SLURM_GPUS_PER_TASK": "2"}, False),
        (1, TASK | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, False),
    ],
    ids=["enough", "too few", "one", "one per task", "two seen", "two per task", "a launcher inside each task"],
)
def test_each_process_needs_a_gpu(monkeypatch, snapshot, gpus, environment, fits):
    monkeypatch.setattr(device, "cuda_devices", lambda: gpus)
    topology = Topology(rank=11, local_rank=3, world_size=16, local_world_size=8, launcher="launcher")
    problem = device.gpu_problem(topology, environment)
    assert bool(problem) != fits
    assert problem == snapshot


@pytest.mark.parametrize(
    ("flags", "sets"),
    [
        ("fpu sse2 avx2 avx512f avx512_bf16 amx_bf16 amx_tile", "AVX2, AVX512, AVX512 bf16, AMX, AMX bf16"),
        ("fpu sse2 avx2", "AVX2"),
        ("fp asimd sve i8mm bf16", "NEON, SVE, bf16, i8mm"),
        ("fpu sse2", "none that matters"),
        (None, None),
    ],
)
def test_instruction_sets_are_those_of_the_kernels_flags(flags, sets):
    assert device.instruction_sets(flags) == sets


@pytest.mark.parametrize(("visible", "index"), [(1, 0), (8, 3)])
def test_the_only_visible_gpu_has_index_0(monkeypatch, visible, index):
    chosen = []
    monkeypatch.setattr(device, "cuda_devices", lambda: visible)
    monkeypatch.setattr(device.torch.cuda, "set_device", chosen.append)
    assert device.bring_up("cuda", local_rank=3, threads=None).index == index
    assert [one.index for one in chosen] == [index]
