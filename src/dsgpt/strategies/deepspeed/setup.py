"""Preparation of every DeepSpeed engine: configuration, optimizer, extensions and swap files.

DeepSpeed ships no types, so its objects are ``Any`` in this folder. Which optimizer ``deepspeed.initialize`` returns
depends on stage and precision, and the classes share no interface. At stage 0 in fp32 it is the torch optimizer itself.

DeepSpeed's extensions in C++, compiled at first use, by one process at a time. PyTorch marks a build in progress with
a file. A killed process leaves this file behind, and every later process that needs the extension waits for it
forever. Here extensions are built in separate folders, under a lock that the operating system releases when the
process ends. So the process that holds the lock knows that such a file is left over, and removes it. It ends the
compilers that the killed process left, too.

A folder is for one instruction set and one version each of Python, PyTorch and DeepSpeed. So a complete library in it
is loaded without DeepSpeed's check of what to compile for, which takes seconds in every process. The folder may then
be read-only.

Folders for the files that DeepSpeed swaps to nvme: one for each machine of each run, removed when the run ends.
DeepSpeed names its files by rank only, so two runs under one ``nvme_path`` would write into each other's files. It
never removes them.
"""

import contextlib
import copy
import hashlib
import importlib.util
import logging
import os
import platform
import re
import secrets
import shlex
import shutil
import socket
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.cpp_extension import get_default_build_root

from dsgpt.common.errors import UserError
from dsgpt.common.files import Lock
from dsgpt.config.compatibility import nvme_paths
from dsgpt.config.recipe import DEEPSPEED_KEYS, Recipe
from dsgpt.config.run_config import RunConfig
from dsgpt.machine.device import from_main, gather_objects
from dsgpt.machine.probe import compiler
from dsgpt.machine.topology import Topology
from dsgpt.strategies.base import build_optimizer, parameter_groups

_ROOT = "TORCH_EXTENSIONS_DIR"


def load_ops(*builders: str) -> None:
    """Load the extensions of DeepSpeed's ``builders``, and compile those that are missing; DeepSpeed finds them loaded.

    Args:
        builders: names of classes of ``deepspeed.ops.op_builder``.

    Raises:
        UserError: one is missing, and the folder for compiled code cannot be written.
    """
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415 - only DeepSpeed's strategies import it
    from deepspeed.ops.op_builder.builder import OpBuilder  # noqa: PLC0415

    folder, before, original = ops_folder(), os.environ.get(_ROOT), OpBuilder.jit_load
    locks: list[Lock] = []
    # Builders load each other by this method.
    OpBuilder.jit_load = lambda builder, verbose=False: _load(builder, folder, locks) or original(builder, verbose)
    os.environ[_ROOT] = str(folder)
    try:
        for name in builders:
            get_accelerator().create_op_builder(name).load(verbose=False)
    except OSError as error:
        why = f"compiled code cannot be stored there ({error.strerror})"
        raise UserError(f"{folder}: {why}: name another folder in {_ROOT}") from error
    finally:
        for lock in locks:
            lock.release()
        OpBuilder.jit_load = original
        del os.environ[_ROOT]
        os.environ.update({} if before is None else {_ROOT: before})


def _load(builder: Any, folder: Path, locks: list[Lock]) -> ModuleType | None:
    """The extension of ``builder``, if its library in ``folder`` is complete. Else it may be compiled now.

    ``locks`` gets the lock of the folder, unless it is there. PyTorch's marker of a build in progress stays after a
    kill.
    """
    library, marker = folder / builder.name / f"{builder.name}.so", folder / builder.name / "lock"
    for _ in range(2):  # asked again: the process that had the lock may have compiled it
        if not marker.exists() and library.exists():
            return _loaded(builder, library)
        if not locks:
            folder.mkdir(parents=True, exist_ok=True)
            locks.append(Lock.of_file(folder / ".dsgpt-lock"))
            locks[0].take(wait=True)
    for process in psutil.process_iter():  # compilers of a killed process would write beside a new build
        with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
            if process.cwd() == str(library.parent) and process.environ().get(_ROOT) == str(folder):
                process.kill()
                process.wait(timeout=10)
    marker.unlink(missing_ok=True)
    if "CXX" not in os.environ and not shutil.which("c++") and (command := compiler()):
        os.environ["CXX"] = shlex.join(command)  # PyTorch looks only for c++
    what = f"compiling DeepSpeed's {builder.name}"
    print(f"{what}, once on this machine: this takes minutes", file=sys.stderr, flush=True)
    return None


def _loaded(builder: Any, library: Path) -> ModuleType:
    """Load ``library``, and register it where DeepSpeed looks for the extension of ``builder``."""
    spec = importlib.util.spec_from_file_location(builder.name, library)
    if spec is None or spec.loader is None:
        raise ImportError(f"{library}: no loader for a library of this name")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    type(builder)._loaded_ops[builder.name] = module  # the one dictionary of all builders
    return module


def ops_folder() -> Path:
    """The folder for this machine, below the one that PyTorch or the user chose, which different machines may share."""
    facts = platform.processor()  # its instruction set: DeepSpeed compiles for this processor only
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        facts = next((line for line in lines if line.startswith(("flags", "Features"))), facts)
    processor = f"{platform.machine()}-{hashlib.sha256(facts.encode()).hexdigest()[:8]}"
    python = f"py{sys.version_info.major}{sys.version_info.minor}-{processor}"
    root = Path(os.environ.get(_ROOT) or get_default_build_root())
    return root / f"dsgpt-{python}-torch-{torch.__version__}-deepspeed-{version('deepspeed')}"


# What every DeepSpeed strategy needs before its engine exists: the library, its configuration, and the optimizer.


def import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for ``device``, silence it, and attach it to the existing process group."""
    os.environ["DS_ACCELERATOR"] = device.type
    if device.type == "cuda":
        os.environ["LOCAL_RANK"] = str(device.index)  # from which DeepSpeed takes the number of the GPU
    if hide_mlflow := "mlflow" not in sys.modules:  # DeepSpeed's autotuner imports it where it is installed, for 2 s
        sys.modules["mlflow"] = None  # type: ignore[assignment]
    import deepspeed  # noqa: PLC0415 - reads DS_ACCELERATOR when imported
    import deepspeed.ops  # noqa: PLC0415

    if hide_mlflow:
        del sys.modules["mlflow"]

    _import_muon_uncompiled()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed 0.19.8 calls a collective by a name that torch 2.13 deprecates; users cannot change that.
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.", category=FutureWarning)
    # The shared-memory all-reduce for CPU is compiled at first use, which needs a compiler and 25 s; gloo works too.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "nccl" if device.type == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    return deepspeed


def _import_muon_uncompiled() -> None:
    """Import Muon, which no recipe may name, without compiling it.

    Every ZeRO engine imports it to check whether its optimizer is Muon. Its kernels are decorated with
    ``torch.compile``, which imports all of Inductor at that moment: 628 modules, about 2 s in every rank.
    """
    from deepspeed.runtime import compiler  # noqa: PLC0415

    compiled = compiler.compile
    compiler.compile = lambda: compiler.dummy_decorator
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401, PLC0415
    finally:
        compiler.compile = compiled


def engine_config(config: RunConfig) -> dict[str, Any]:
    """The JSON that DeepSpeed gets: the recipe's DeepSpeed keys, and resolved values for everything else."""
    recipe, batch = config.recipe, config.batch
    ds_config = {key: copy.deepcopy(recipe.raw[key]) for key in DEEPSPEED_KEYS if key in recipe.raw}
    ds_config.update(
        train_batch_size=batch.global_batch_size,
        train_micro_batch_size_per_gpu=batch.micro_batch_size,
        gradient_accumulation_steps=batch.gradient_accumulation_steps,
        gradient_clipping=recipe.gradient_clipping,
        zero_allow_untested_optimizer=True,  # SGD, which the parity tests compare with plain PyTorch
        steps_per_print=None,
    )
    if config.options.exact or (config.topology.sizes.pipeline > 1 and recipe.zero_stage == 0):
        ds_config["gradient_clipping"] = 0.0  # this package clips, ``PipelineParallel`` by the norm of all stages
    if config.precision == "bf16":
        ds_config["bf16"] = {**recipe.raw.get("bf16", {}), "enabled": True}
    elif config.precision == "fp16":
        ds_config["fp16"] = {"enabled": True, "loss_scale": 1}  # fixed; ``_set_loss_scale`` replaces it
    if config.precision != "fp32" and recipe.zero_stage > 0:
        ds_config["data_types"] = {"grad_accum_dtype": "fp32"}
    if config.topology.sizes.tensor > 1 and config.topology.sizes.pipeline == 1:
        # The layers of blocks that AutoTP has to split, as ``state.SPLIT`` says.
        layers = [
            {"patterns": [r".*\.attn\.qkv\.weight$"], "partition_type": "column", "shape": [3, -1]},
            {"patterns": [r".*\.mlp\.fc\.weight$"], "partition_type": "column"},
            {"patterns": [r".*\.proj\.weight$"], "partition_type": "row"},
        ]
        partition = {"use_default_specs": False, "layer_specs": layers}
        ds_config["tensor_parallel"] = {"autotp_size": config.topology.sizes.tensor, "partition_config": partition}
    if recipe.offload_optimizer != "none" and not recipe.uses_deepspeed_adam:
        ds_config["zero_force_ds_cpu_optimizer"] = False
    if recipe.zero_stage > 0:
        # DeepSpeed's default at stage 3 is true, which has had races on GPUs. Parity has not been shown there.
        ds_config["zero_optimization"].setdefault("overlap_comm", False)
        bucket = recipe.zero_optimization.bucket_elements(config.model.padded_parameter_count())
        ds_config["zero_optimization"]["reduce_bucket_size"] = bucket
    if recipe.zero_stage == 1 and config.topology.world_size == 1:
        # A single rank sends nothing, so its gradients need not be copied to a bucket first.
        ds_config["zero_optimization"].setdefault("contiguous_gradients", False)
    elif recipe.zero_stage == 1 and recipe.zero_optimization.use_multi_rank_bucket_allreduce:
        # DeepSpeed all-reduces whole buckets here either way. So it does it in place, without cutting and copying them.
        ds_config["zero_optimization"].setdefault("reduce_scatter", False)
    for name, folder in nvme_paths(recipe, config.run_dir).items():
        block = ds_config["zero_optimization"][name]
        block["nvme_path"] = str(folder)
        if name == "offload_param":  # by default five pinned buffers of 100 million elements; larger parts fail
            block.setdefault("buffer_size", -(-config.model.largest_parameter() // config.topology.world_size))
        else:
            block["buffer_count"] = recipe.zero_optimization.offload_optimizer.swap_buffers
    return ds_config


def build_deepspeed_optimizer(parameters: dict[str, nn.Parameter], config: RunConfig) -> torch.optim.Optimizer:
    """The recipe's optimizer over ``parameters`` (canonical name to parameter), for ``deepspeed.initialize``."""
    recipe = config.recipe
    groups = parameter_groups(parameters, recipe.optimizer)
    if not recipe.uses_deepspeed_adam:
        # The stages of a pipeline have the tied embedding at different places of their flat buffers. All must round
        # its update alike.
        alike = config.options.exact or recipe.pipeline.stages > 1
        return build_optimizer(groups, recipe.optimizer, fused=not alike)
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: PLC0415

    load_ops("CPUAdamBuilder")
    optimizer = recipe.optimizer
    adam: torch.optim.Optimizer = DeepSpeedCPUAdam(
        groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, adamw_mode=True
    )
    return adam


def repeat_counting(optimizer: Any, *, steps: int) -> None:
    """Advance the counter inside DeepSpeed's CPU Adam to that of a loaded checkpoint; leave other optimizers alone.

    It keeps beta^t as a product that it multiplies by beta in each step, in C++ (``cpu_adam.h``, ``IncrementStep``). A
    new process would compute the power instead, which rounds differently: a resumed run would not be the same bit for
    bit.

    Args:
        optimizer: from ``deepspeed.initialize``.
        steps: the number of steps that the checkpoint's optimizer has taken.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: PLC0415

    adam = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(adam, DeepSpeedCPUAdam):
        return
    group, nothing = adam.param_groups[0], torch.empty(0)
    for step in range(1, steps + 1):
        adam.ds_opt_adam.adam_update(
            adam.opt_id, step, 0.0, *group["betas"], group["eps"], 0.0, True, nothing, nothing, nothing, nothing
        )


def _own_prefix() -> str:
    """The beginning of the names of this host's folders. The dot ends the host's name, in which dots are replaced."""
    return f"nvme-swap-{re.sub(r'[^A-Za-z0-9_-]', '_', socket.gethostname())}."


class SwapSpace:
    """The folders of this machine, which its first rank makes, locks and removes.

    The operating system releases the locks when the process ends, however it ends. So the next run on this host under
    the same path removes the folders of killed runs. Folders of other hosts stay, because a file system that hosts
    share may show a host only its own locks (Lustre with ``localflock``, NFS with ``local_lock``).
    """

    def __init__(self, engine_config: dict[str, Any], recipe: Recipe, topology: Topology) -> None:
        """Make the folders, and put their paths into ``engine_config``; collective.

        Raises:
            UserError: on every rank, if one of the folders cannot be made.
        """
        blocks = [engine_config["zero_optimization"][name] for name in recipe.nvme_blocks]
        name = f"{_own_prefix()}{from_main(secrets.token_hex(4))}-{topology.rank - topology.local_rank}"
        self._locks: dict[Path, Lock] = {}
        problem = ""
        for base in {Path(block["nvme_path"]) for block in blocks if topology.local_rank == 0}:
            try:
                for folder in base.glob(f"{_own_prefix()}*"):
                    # An OSError means that the folder belongs to another user, is a link, or has been removed.
                    with contextlib.suppress(OSError), Lock.of_folder(folder) as lock:
                        if lock.take():  # otherwise another run holds it; another run may remove it at the same time
                            shutil.rmtree(folder, ignore_errors=True)
                self._locks[base / name] = _make(base / name)
            except OSError as error:
                place, reason = error.filename or base, error.strerror or error
                problem = f"nvme_path {place}: cannot be used ({reason}): name another folder"
                break
        if problems := sorted(set(filter(None, gather_objects(problem)))):
            self.close()
            raise UserError(*problems)
        for block in blocks:
            block["nvme_path"] = str(Path(block["nvme_path"]) / name)

    def close(self) -> None:
        """Remove the folders and everything in them; call it when no rank needs them any more.

        After an error, other ranks may still write there; the next run removes what they leave.
        """
        while self._locks:
            folder, lock = self._locks.popitem()
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()


def _make(folder: Path) -> Lock:
    """Make and lock ``folder``; no other process ever sees it without its lock."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    hidden = folder.with_name(f".{folder.name}")
    hidden.mkdir()
    with contextlib.ExitStack() as undo:
        undo.callback(hidden.rmdir)
        lock = undo.enter_context(Lock.of_folder(hidden))
        lock.take(shared=True, wait=True)
        hidden.rename(folder)
        undo.pop_all()
    return lock


def estimated_bytes(*, stage: int, elements: int, largest: int, ranks: int, offload: bool) -> int:
    """Bytes on the device of a rank, by ``estimate_zero2_model_states_mem_needs`` or that of stage 3.

    They are of model state in fp16 or bf16 with Adam, whatever the run's precision and batch are.

    Args:
        stage: 2 or 3.
        elements: of all parameters.
        largest: elements of the largest layer.
        ranks: on one machine.
        offload: whether optimizer state, and at stage 3 weights, are in host memory.
    """
    from deepspeed.runtime.zero import stage3, stage_1_and_2  # noqa: PLC0415

    machine = {"num_gpus_per_node": ranks, "cpu_offload": offload}
    if stage == 2:
        return int(stage_1_and_2.estimate_zero2_model_states_mem_needs(elements, **machine)[1])
    needs = stage3.estimate_zero3_model_states_mem_needs
    return int(needs(elements, largest, cpu_offload_params=offload, **machine)[1])
