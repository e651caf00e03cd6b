"""One rank of one training of the network suite, and what two trainings differ in."""

from pathlib import Path

from torch.linalg import vector_norm

from dsgpt.benchmarks.hosts import Hosts, be_rank_on
from dsgpt.benchmarks.launch import config_of, write_end
from dsgpt.checkpoints import store
from dsgpt.checkpoints.training_state import StateReader
from dsgpt.machine.console import logging_to_console
from dsgpt.machine.launcher import Interruption
from dsgpt.machine.topology import read_topology
from dsgpt.record.schema import STEPS_FILE, read_steps
from dsgpt.training.run import run


def train(flags: list[str], folder: Path, *, hosts: str, count: int, mbit: float | None = None) -> None:
    """Train as ``src/gpt2.py`` does with ``flags``, after this forked rank moved to its host.

    Args:
        flags: of ``src/gpt2.py``.
        folder: of the cell.
        hosts: their name.
        count: how many of them take equally many ranks.
        mbit: of each host's link, in megabits a second; None for no limit.

    Raises:
        UserError: the product refuses the combination.
    """
    those, topology = Hosts(hosts, count), read_topology()
    shaped = [those.shape(number, mbit=mbit) for number in range(count if topology.is_main else 0)]
    be_rank_on(those, per_host=topology.world_size // count)
    config = config_of(flags)
    main = config.topology.is_main
    with logging_to_console(speaks=main), Interruption(speaks=main) as interruption:
        run(config, interruption)
    write_end(folder, config.topology.rank, shaped=next(iter(shaped), {}))


def differences(run_dir: Path, other: Path) -> dict[str, float | None]:
    """The largest difference of two runs' losses, in nats per token, and of gradient norms and last weights, relative.

    That of norms is None if a run reports none.

    Raises:
        ValueError: they have other steps.
    """
    runs = [[line for line in read_steps(each / STEPS_FILE) if "loss" in line] for each in (run_dir, other)]
    pairs = list(zip(*runs, strict=True))
    norms = [(line["grad_norm"], reference["grad_norm"]) for line, reference in pairs]
    state, expected = (StateReader(store.checkpoints(each)[0]) for each in (run_dir, other))
    weights = [(state.read(name), expected.read(name)) for name in expected.shapes]
    return {
        "loss": max(abs(line["loss"] - reference["loss"]) for line, reference in pairs),
        "gradient norm": None if None in norms[0] else max(abs(one / other - 1) for one, other in norms),
        "weights": max(float(vector_norm(value - whole) / vector_norm(whole)) for value, whole in weights),
    }
