"""A rank of the tests in this folder, run by the suites' worker.

One launch serves many cells, each in a forked child. The first word of a cell's flags names the observation, the others
are flags of ``src/gpt2.py``.
"""

import gc
import hashlib
import resource
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import resolved, roll_back

from dsgpt.benchmarks.launch import rank_file
from dsgpt.benchmarks.parity_rank import whole_state
from dsgpt.checkpoints.training_state import KeptState, StateReader, complete_state, write_shards
from dsgpt.common.files import write_json_atomic
from dsgpt.config.recipe_blocks import DdpRecipe, Fp16, FsdpRecipe, TorchStrategies
from dsgpt.config.run_config import RunConfig
from dsgpt.formats.tensor_files import DTYPES
from dsgpt.machine.device import HostGroup, barrier, bring_up, joined
from dsgpt.machine.topology import read_topology
from dsgpt.model.gpt2 import Block, initial_value, parameter_shapes
from dsgpt.strategies.base import Strategy, build_strategy
from dsgpt.telemetry.cost import Communication, state_bytes
from dsgpt.training import command
from dsgpt.training.run import dropout_seed
from dsgpt.training.trainer import training_batches

STEPS = 2
"""Steps of an observed strategy; the first one already changes weights."""
SAVED = 2
"""The step of a run's first checkpoint."""
SMALL_FILE_BYTES = {"main": 60_000, "last": 4_000, "beside": 60_000}
"""``main``, ``beside``: less than a rank's weights take, but more than its other files. ``last``: less than a random
state takes."""


def started(config: RunConfig, strategy: Strategy) -> dict[str, Any]:
    """Which initial values differ from those that follow from seed and name alone."""
    expected = {
        name: initial_value(name, shape, config=config.model, seed=config.options.seed).to(DTYPES[config.precision])
        for name, shape in parameter_shapes(config.model).items()
    }
    state = {name: value.weight for name, value in whole_state(config, strategy).items()}
    return {
        "missing": sorted(expected.keys() ^ state.keys()),
        "wrong": [name for name, value in state.items() if not torch.equal(value, expected[name].float())],
    }


def stepped(config: RunConfig, strategy: Strategy) -> dict[str, Any]:
    """What this rank holds between steps, the dropout masks of ``STEPS`` steps, and the replicas after them."""
    held = _storage_bytes(strategy.state_tensors().parameters) // 4
    before = {name: digest(value) for name, value in strategy.replicated_weights()}
    batches = training_batches(config, first_step=0)
    with DropoutMasks() as masks:
        results = [strategy.train_step(batches, step) for step in range(1, STEPS + 1)]
    replicas = {name: digest(value) for name, value in strategy.replicated_weights()}
    return {
        "held": held,
        "masks": masks.drawn,
        "gradients": [None if result.own_gradient is None else float(result.own_gradient) for result in results],
        "losses": [(float(result.loss), float(result.own_loss)) for result in results],
        "replicas": replicas,
        "unchanged": [name for name, value in replicas.items() if value == before.get(name)],
    }


def saved_and_loaded(config: RunConfig, strategy: Strategy) -> dict[str, Any]:
    """The most that this rank holds in addition to its part while a checkpoint is written, and while it is loaded."""
    strategy.train_step(training_batches(config, first_step=0), 1)
    folder, place, kept = config.run_dir, config.topology, KeptState()
    kept_folder = folder.with_name(f"kept-{place.rank}")
    for each in (folder, kept_folder):
        each.mkdir(parents=True, exist_ok=True)
    write = partial(write_shards, rank=place.rank, ranks=place.world_size)
    with Held() as saving:
        part = write(folder, strategy.shards())
    with Held() as keeping:
        kept.keep(strategy.shards())
    with Held() as writing:
        write(kept_folder, kept.shards())
    sizes = [sum(box.numel for box in boxes) for boxes in part.boxes.values()]
    parts = HostGroup().to_main(part)
    if place.is_main:
        complete_state(folder, parts, strategy.counters(), shapes=parameter_shapes(config.model))
    barrier()
    reader = StateReader(folder)
    with Held() as loading:
        strategy.load_state(reader)
    return {
        "parts": len(parts),
        "own": sum(sizes),
        "most_while_saved": saving.most,
        "most_while_kept": keeping.most,
        "most_while_written": writing.most,
        "most_while_loaded": loading.most,
        "moments": reader.has_moments,
    }


def digest(value: Tensor) -> str:
    """A hash of the tensor's bits."""
    data = value.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class DropoutMasks(TorchDispatchMode):
    """Notes shape and digest of every dropout mask that is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[list[int], str]] = []

    def __torch_dispatch__(self, function: Any, _types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.bernoulli_.float:  # how dropout draws its mask on a CPU
            self.drawn.append((list(result.shape), digest(result)))
        return result


class Held(TorchDispatchMode):
    """Measures the most elements that new tensors hold at any moment inside the context."""

    _hidden: ClassVar[list[StorageWeakRef]] = []
    """Of the tensors that ``_tensors`` skips, because they were frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._before: set[int] = set()

    def __enter__(self) -> "Held":
        gc.collect()
        self._hidden += [StorageWeakRef(tensor.untyped_storage()) for tensor in _tensors()]
        self._before = {storage.cdata for storage in self._hidden if not storage.expired()}
        gc.freeze()  # for good: else every collection copies the memory of all that was imported
        return super().__enter__()

    def __torch_dispatch__(self, function: Any, _types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() > 1000 and not function.is_view:
            made = (one for one in _tensors() if one.untyped_storage()._cdata not in self._before)
            self.most = max(self.most, _storage_bytes(made) // 4)
        return result


def _tensors() -> Iterable[Tensor]:
    """The tensors of this process that the garbage collector knows and has not frozen."""
    known = (one for one in gc.get_objects() if type(one) in {Tensor, nn.Parameter})
    return (one for one in known if one.device.type == "cpu")


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(state_bytes({"all": tensors})["all"].values())


def _measure_while_built(held: Held) -> None:
    """Measure with ``held`` while a model is built in parts, but not while an engine is made from it."""
    from dsgpt.strategies import pytorch as fsdp
    from dsgpt.strategies.deepspeed import pipeline as pipeline_layers
    from dsgpt.strategies.deepspeed import zero

    def watched(build: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            with held:
                return build(*args, **kwargs)

        return call

    zero.build_sharded = watched(zero.build_sharded)
    fsdp.sharded_model = watched(fsdp.sharded_model)
    pipeline_layers.StageModule.__init__ = watched(pipeline_layers.StageModule.__init__)


def observed_strategy(flags: list[str], *, then: Callable[[RunConfig, Strategy], dict[str, Any]]) -> dict[str, Any]:
    """Facts of a strategy while it is built and when it starts, and those that ``then`` observes."""
    config = resolved(flags, read_topology())
    device = bring_up(config.device, local_rank=config.topology.local_rank, threads=1)
    topology = config.topology
    place = {"stage": topology.stage, "data": topology.data_rank, "sequence": topology.sequence_rank}
    with joined(topology, device):
        from dsgpt.strategies.deepspeed.setup import import_deepspeed

        import_deepspeed(device)
        held = Held()
        _measure_while_built(held)
        torch.manual_seed(dropout_seed(config))
        strategy = build_strategy(config, device)
        sizes = [shape.numel() for shape in parameter_shapes(config.model).values()]
        facts = {"place": place, "whole": sum(sizes), "largest": max(sizes), "most_while_built": held.most}
        facts |= started(config, strategy)
        facts |= then(config, strategy)
        barrier()
        strategy.close()
    return facts


FP16 = Fp16(initial_scale_power=12)
OVERFLOWS = Fp16(initial_scale_power=22, hysteresis=1)
FINE = TorchStrategies(ddp=DdpRecipe(bucket_cap_mb=0.01), fsdp=FsdpRecipe(reduce_dtype="low"))


def torch_strategy(flags: list[str]) -> dict[str, Any]:
    """What DDP or FSDP computes in fp16, beside the baseline, and in other ways that the parity suite does not have.

    The command line refuses fp16 on a CPU, where it is slow; the configuration is changed after the check. The baseline
    takes the same micro batches one after the other that the ranks take in parallel: only the order of sums differs.
    """
    topology = read_topology()

    def way(*more: str, precision: str = "fp32", compiled: bool = False, **recipe: Any) -> RunConfig:
        config = resolved([*flags, *more], read_topology({}) if more else topology)
        changed = replace(config.recipe, **{"dsgpt": TorchStrategies()} | recipe)
        return replace(config, precision=precision, recipe=changed, options=replace(config.options, compile=compiled))

    device = bring_up("cpu", local_rank=topology.local_rank, threads=1)
    alone = ("--run_type", "baseline", "--grad_accum_steps", "6")
    with joined(topology, device):
        ways = {
            "baseline": way(*alone, precision="fp16", fp16=FP16),
            "fp16": way(precision="fp16", fp16=FP16),
            "overflowing": way(precision="fp16", fp16=OVERFLOWS),
            "fp32": way(),
            "compiled": way(compiled=True, dsgpt=FINE),
            "bf16": way(precision="bf16"),
            "fine": way(precision="bf16", dsgpt=FINE),
        }
        with mock.patch("torch.compile", partial(torch.compile, backend="aot_eager")):  # parity generates code
            facts = {name: trained(config, device) for name, config in ways.items()}
    first, second = (facts[name].pop("moments") for name in ("baseline", "fp16"))
    off = max(float((second[name] - value).norm() / value.norm()) for name, value in first.items())
    return {name: fact | {"moments": None} for name, fact in facts.items()} | {"gradient": off}


def trained(config: RunConfig, device: torch.device) -> dict[str, Any]:
    """Five steps: loss, and norm or None for an overflow; the first Adam moments; the last reductions and scale."""
    strategy: Any = build_strategy(config, device)
    batches, steps, moments = training_batches(config, first_step=0), [], {}
    for step in range(1, 6):
        with Communication() as sent:
            result = strategy.train_step(batches, step)
        steps.append((float(result.loss), None if result.skipped else float(result.grad_norm)))
        if step == 1:
            alone = config.run_type == "baseline"  # in a group of others
            states = dict(strategy.shards().states) if alone else whole_state(config, strategy)
            moments = {name: state.exp_avg.clone() for name, state in states.items() if not result.skipped}
    traffic = {entry.operation: (entry.calls, entry.payload_bytes) for entry in sent.traffic}
    return {"steps": steps, "moments": moments, "traffic": traffic, "scale": strategy._scale.factor}


def in_whole_graphs(flags: list[str]) -> dict[str, Any]:
    """Two steps with ``--compile``, which fail if a block is not one graph; code is generated by no compiler.

    Also the share of the blocks' gathered weights that is alive after the last forward pass, which ZeRO-3 should free.
    """
    gathered: list[tuple[StorageWeakRef, int]] = []
    config = resolved([*flags, "--compile"], read_topology())
    device = bring_up(config.device, local_rank=config.topology.local_rank, threads=1)
    with joined(config.topology, device):
        with mock.patch("torch.compile", partial(torch.compile, fullgraph=True, backend="aot_eager")):
            strategy: Any = build_strategy(config, device)

        def note(block: nn.Module, _: Any) -> None:
            sizes = [(each.untyped_storage(), each.numel()) for each in block.parameters() if each.dim() > 1]
            gathered.extend((StorageWeakRef(storage), size) for storage, size in sizes)

        for module in strategy._engine.module.modules():
            if isinstance(module, Block):
                module.register_forward_pre_hook(note)
        batches, losses, shares = training_batches(config, first_step=0), [], [0.0]
        engine, backward = strategy._engine, strategy._engine.backward

        def backward_pass(*given: Any, **named: Any) -> Any:
            alive = sum(size for storage, size in gathered if not storage.expired())
            shares.append(alive / sum(size for _, size in gathered))
            gathered.clear()
            return backward(*given, **named)

        with mock.patch.object(engine, "backward", backward_pass):
            losses += [float(strategy.train_step(batches, step).loss) for step in (1, 2)]
        barrier()
        strategy.close()
    return {"losses": losses, "alive": shares[-1]}


def command_run(flags: list[str]) -> dict[str, Any]:
    """Run ``src/gpt2.py`` with ``flags``. Copy a new run in the state that a kill after its first save would leave."""
    command.PATIENCE_SEC = 0
    code = command.train(flags)
    run = Path(flags[flags.index("--checkpoint_path") + 1])
    if read_topology().is_main and code == 0 and "--resume" not in flags:
        roll_back(run, run.with_name("killed"), SAVED)
    return {"exit": code}


def full_disk(flags: list[str], *, of: str) -> dict[str, Any]:
    """As ``command_run``, but one rank's files are limited to less than it has to write for a checkpoint.

    Args:
        flags: of ``src/gpt2.py``.
        of: the ``main`` rank, or the ``last``, when it writes its random state, or ``beside`` when it writes its part.
    """
    topology = read_topology()
    if topology.rank == (0 if of == "main" else topology.world_size - 1):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as in a new Python; the write then fails with an error
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE_BYTES[of], SMALL_FILE_BYTES[of]))
    return command_run(flags)


OBSERVATIONS: dict[str, Callable[[list[str]], dict[str, Any]]] = {
    "start": partial(observed_strategy, then=lambda *_: {}),
    "steps": partial(observed_strategy, then=stepped),
    "checkpoint": partial(observed_strategy, then=saved_and_loaded),
    "torch": torch_strategy,
    "graphs": in_whole_graphs,
    "run": command_run,
    "full disk of main": partial(full_disk, of="main"),
    "full disk of last": partial(full_disk, of="last"),
    "full disk of beside": partial(full_disk, of="beside"),
}


def observe(words: list[str], folder: Path) -> None:
    """The call of every cell; see ``dsgpt.benchmarks.launch.Assignment``."""
    observation, *flags = words
    facts = OBSERVATIONS[observation](flags)
    write_json_atomic(rank_file(folder, read_topology().rank), {"status": "done", "time": time.time(), **facts})
