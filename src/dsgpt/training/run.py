"""One run in one process, from its checks to the trainer."""

import contextlib
import functools
import json
import logging
import os
import re
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dsgpt.checkpoints import store
from dsgpt.checkpoints.manifest import Goodput, RunState, read_run_state
from dsgpt.checkpoints.second_copy import check_place, clear_place, fetch_newer
from dsgpt.checkpoints.training_state import StateReader, load_random_state
from dsgpt.common.errors import LostRank, OutOfMemory, Problems, SaveError, UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.common.json_files import JsonError, clipped
from dsgpt.common.text import counted
from dsgpt.config.run_config import RunConfig
from dsgpt.data.addresses import changed_sources
from dsgpt.machine.console import LogFile, Progress
from dsgpt.machine.device import TIMEOUT, HostGroup, barrier, bring_up, from_main, gather_objects, joined
from dsgpt.machine.launcher import Interruption
from dsgpt.machine.peers import SLOW_STEPS, Peers
from dsgpt.machine.spot import spot_watch
from dsgpt.machine.topology import Topology
from dsgpt.model.gpt2 import parameter_shapes
from dsgpt.planner.formulas import worst_peak
from dsgpt.record.schema import RECORD_FILE, STEPS_FILE, drop_steps_after, later_schema, log_file
from dsgpt.strategies.base import Strategy, build_strategy
from dsgpt.telemetry.cost import peak_bytes
from dsgpt.training import run_description, run_folder
from dsgpt.training.budget import TrainingPlan, notify, read_plan
from dsgpt.training.command import complain_of
from dsgpt.training.journal import Journal, open_sinks
from dsgpt.training.saving import Saver
from dsgpt.training.status import PATIENCE_SEC, RunLock, is_guarded, refuse_if_locked
from dsgpt.training.trackers import open_trackers
from dsgpt.training.trainer import Trainer

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

# What the main rank does before training: it checks the data and the run folder, then opens the folder.


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Results of the main rank's checks; the other ranks receive them."""

    start: run_folder.ResumePoint
    hashes: dict[str, str | None]
    """sha256 of the data and of published weights; see ``run_description.data_hashes``."""
    settings: dict[str, Any]
    """Settings that a resumed run must match."""
    contents: list[str]
    """Contents of the run folder before the run."""
    earlier: run_folder.EarlierRecord
    """The record of the run to resume."""
    plan: TrainingPlan | None
    """The plan of ``--plan``."""
    goodput: Goodput
    """Goodput of the earlier processes of the run."""
    messages: tuple[str, ...]
    """Lines for the user."""


def _earlier_record(run_dir: Path) -> tuple[run_folder.EarlierRecord, str]:
    """The record of the run to resume, and a message if it cannot be read or is of a later version."""
    try:
        earlier = run_folder.read_earlier_record(run_dir) or run_folder.EarlierRecord()
        doubt = later_schema(earlier.schema_version)
        return earlier, f"{run_dir / RECORD_FILE} {doubt}" if doubt else ""
    except JsonError as error:
        doubt = f"{run_dir / RECORD_FILE} is damaged ({error}): its list of earlier saves is lost"
        return run_folder.EarlierRecord(), doubt


def prepare(config: RunConfig, lock: RunLock, peers: Peers) -> Prepared:
    """Check what only one rank should read: the contents of the data and the run folder.

    The other ranks help to verify its checkpoints; see ``_train``.

    Locks the run folder if a run was started in it before, and renames back a checkpoint that was being replaced. A
    dry run only checks the lock. The sidecar of a data file that was hashed may get a new stamp. Nothing else changes.

    Raises:
        UserError: lists the mistakes, one line each.
    """
    problems, run_dir, save_to = Problems(), config.run_dir, config.options.save_to
    fetched: list[str] = []

    @functools.cache
    def damage(checkpoint: str) -> str:
        found = peers.share(checkpoint, functools.partial(run_folder.damage_in, config))
        if len(found) > 1 and any(found):  # of a file that is damaged a rank may see another sign, or not the folder
            return run_folder.damage_in(config, checkpoint)
        return found[0]

    if config.options.dry_run:
        refuse_if_locked(run_dir)
    elif is_guarded(run_dir) or store.replaced(run_dir):
        lock.take()
        if os.access(run_dir, os.W_OK):  # else ``holds_run_to_resume`` refuses it
            store.put_back(run_dir)
    if save_to and config.options.resume and not config.options.dry_run and not store.was_overwritten(run_dir):
        run_folder.make_run_folder(run_dir)
        lock.take()
        fetched = fetch_newer(save_to, run_dir, damage=damage)
        damage.cache_clear()  # a damaged checkpoint may have been replaced
    resumes = run_folder.holds_run_to_resume(config, problems)
    problems.add(*filter(None, [run_description.data_tokenizer(config.train.files[0])[1]]))
    problems.raise_if_any()
    hashes = run_description.data_hashes(config)
    hashes["initial weights"] = run_description.initial_weights_hash(config)
    settings, start = run_description.settings_to_match(config, hashes=hashes), run_folder.ResumePoint()
    if resumes:
        start = run_folder.plan_resume(config, settings=settings, problems=problems, damage=damage)
    if save_to:
        begins = start.checkpoint is None and not config.options.overwrite and not store.was_overwritten(run_dir)
        check_place(save_to, begins=begins, writes=not config.options.dry_run)
    earlier, doubt, goodput = run_folder.EarlierRecord(), "", Goodput()
    if resumes and (run_dir / RECORD_FILE).exists():
        earlier, doubt = _earlier_record(run_dir)
        before, wall_sec = earlier.goodput or Goodput.unknown(), earlier.summary.total_wall_time_sec
        kept_step = read_run_state(start.checkpoint).step if start.checkpoint else 0
        goodput = before.after_loss(run_dir / STEPS_FILE, kept_step=kept_step, wall_sec=wall_sec)
    plan, unlike = read_plan(config, problems), ""
    if plan is not None and plan.machine.devices != config.topology.world_size:
        unlike = f"plan        was made for {counted(plan.machine.devices, 'device')}: steps are not compared with it"
    unchecked = run_description.check_tokenizer(config, problems)
    files = [*config.val.files, *config.train.files]  # those that were prepared together have the same sources
    warnings = {
        line.removeprefix(str(file.path)): f"warning: {line}" for file in files if (line := changed_sources(file))
    }
    problems.raise_if_any()
    return Prepared(
        start=start,
        hashes=hashes,
        settings=settings,
        contents=run_folder.contents(run_dir),
        earlier=earlier,
        plan=plan,
        goodput=goodput,
        messages=(*filter(None, (unchecked, doubt, unlike)), *warnings.values(), *fetched, *start.messages),
    )


def open_run_folder(config: RunConfig, prepared: Prepared, *, lock: RunLock, log: LogFile) -> dict[str, Any]:
    """Lock the run folder, clear it and start its files, on the main rank while the others wait; collective.

    Args:
        config: the run.
        prepared: from ``prepare``.
        lock: of the folder.
        log: the log file to open in it.

    Returns:
        The description of the run, for its record; empty on other ranks.

    Raises:
        UserError: on every rank, if the main rank cannot lock or make the folder, or another process changed it.
    """
    description: dict[str, Any] = {}
    problems: tuple[str, ...] = ()
    start, run_dir, topology = prepared.start, config.run_dir, config.topology
    if topology.is_main:
        try:
            run_folder.make_run_folder(run_dir)
            lock.take()
            if run_folder.contents(run_dir) != prepared.contents:
                raise UserError(f"--checkpoint_path {run_dir}: another process changed it: repeat the command")
            if config.options.save_to and start.checkpoint is None:
                clear_place(config.options.save_to)  # first: a resume must not bring back what was overwritten here
            run_folder.clear_run_folder(run_dir, start)
            description = run_description.describe_run(config, start, hashes=prepared.hashes)
            if not run_folder.is_ours(run_dir / run_folder.CONFIG_FILE):  # a resumed run keeps its own
                options = {name: str(at) if isinstance(at, Path) else at for name, at in asdict(config.options).items()}
                repeated = ("command_line", "git_commit", "env", "data", "training_config", "deepspeed_config")
                written = {"options": options, **{name: description[name] for name in repeated}}
                write_json_atomic(run_dir / run_folder.CONFIG_FILE, written)
            log.open(run_dir / log_file(0))
        except UserError as error:
            problems = error.problems
    if problems := from_main(problems):
        raise UserError(*problems)
    require_shared(run_dir, topology)
    if topology.machine:
        log.setFormatter(logging.Formatter(f"rank {topology.rank} on {socket.gethostname()}: %(message)s"))
        log.open(run_dir / log_file(topology.machine))
        from_step = f"from {start.checkpoint.name}" if start.checkpoint is not None else "from the beginning"
        log.add(f"{datetime.now(UTC).isoformat(timespec='seconds')}: process {os.getpid()} trains {from_step}")
    return description


def require_same_work(config: RunConfig, prepared: Prepared | None, store: "Store") -> None:
    """Compare what the first ranks of all machines were given, on rank 0. One machine needs no check.

    Args:
        config: of this rank.
        prepared: of rank 0, else None.
        store: at which the ranks have met.

    Raises:
        UserError: on rank 0, if a machine has other flags, another recipe, other data or other code; or this machine's
            data are not what their sidecar says.
    """
    topology, own = config.topology, dict[str, str]()
    if topology.local_world_size == topology.world_size:
        return
    if topology.local_rank == 0:
        hashes = prepared.hashes if prepared else run_description.data_hashes(config)
        own = run_description.facts_to_match(config, hashes=hashes)
    store.set(f"facts/{topology.rank}", json.dumps([socket.gethostname(), own]))
    for rank in range(1, topology.world_size) if topology.is_main else ():
        store.wait([f"facts/{rank}"], TIMEOUT)  # it may hash its data
        host, facts = json.loads(store.get(f"facts/{rank}"))
        if facts and (differs := [name for name in own | facts if own.get(name) != facts.get(name)]):
            first, more = differs[0], "".join(f", {name}" for name in differs[1:3])
            raise UserError(
                f"{host} does not train what {socket.gethostname()} does: {first} is {clipped(facts.get(first))}, not "
                f"{clipped(own.get(first))}{more and f' (also differ: {more[2:]})'}: start all machines with the same "
                "code, flags, recipe and data"
            )


LEAVE_SEC = 10.0
"""Seconds for the record of a run that ends without its main thread."""
SEEN_SEC = 10.0
"""Seconds for what rank 0 writes to be seen by other machines; network file systems keep directories that long."""


def require_shared(folder: Path, topology: Topology) -> None:
    """Check that every machine sees what rank 0 writes in ``folder``; collective. One machine needs no check.

    Raises:
        UserError: on every rank, with a line for each machine that does not.
    """
    if topology.local_world_size == topology.world_size:
        return
    mark = folder / from_main(f".seen-by-all-{uuid.uuid4().hex}")
    if topology.is_main:
        mark.touch()
    barrier()
    problem = None
    if topology.local_rank == 0:
        deadline = time.monotonic() + SEEN_SEC
        while not mark.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        if not mark.exists():
            what = f"{socket.gethostname()} does not see what rank 0 writes there"
            problem = f"--checkpoint_path {folder}: {what}: name a folder that all machines share"
    problems = [line for line in gather_objects(problem) if line]
    if topology.is_main:
        mark.unlink(missing_ok=True)
    if problems:
        raise UserError(*problems)


# One run in one process: its checks, its device and process group, its strategy, and the trainer.


def run(config: RunConfig, interruption: Interruption) -> None:
    """Train as ``config`` says, or stop after the plan with ``--dry_run``.

    Raises:
        UserError: the data or the run folder cannot be used.
        NonFiniteError: a loss, a gradient norm or a weight became NaN or infinite.
        OutOfMemory: the memory of a GPU ran out.
        SaveError: a checkpoint could not be written.
        Interrupted: the run was asked to stop.
    """
    patience = PATIENCE_SEC if config.options.resume else 0
    peers = Peers(config.topology, stall_timeout=config.options.stall_timeout)
    with LogFile() as log, RunLock(config.run_dir, patience_sec=patience) as lock, peers:
        if not config.options.dry_run:
            peers.on_lost_rank = functools.partial(_end_after_lost_rank, config, None, log)
            peers.join()
            if config.topology.is_spare:
                peers.stand_by()
                return
            Progress.heard = peers.note_own_progress
        try:
            prepared = prepare(config, lock, peers) if config.topology.is_main else None
            if peers.store is not None:
                require_same_work(config, prepared, peers.store)
        except UserError as error:
            peers.refuse(error.problems)
            raise
        messages = prepared.messages if prepared and config.options.dry_run else ()
        for line in (*run_description.plan_lines(config), *messages):
            logger.info(line)
        if config.options.dry_run:
            logger.info("dry run: everything checked, nothing started")
        else:
            with peers.explained(), out_of_memory_explained(config):
                _train(config, prepared, interruption, peers, lock=lock, log=log)


def _end_after_lost_rank(config: RunConfig, journal: Journal | None, log: LogFile, lost: LostRank) -> None:
    """Called by the watch thread when the main thread is blocked by a lost rank.

    Writes the record, runs `--on_event` and prints the error.
    """
    if config.topology.is_main and journal is not None and journal.record.status == "running":
        writes = threading.Thread(target=journal.end_early, args=["failed"], daemon=True)
        writes.start()
        writes.join(LEAVE_SEC)  # the disk may be what everything waits for
        notify(config, "failed")
    log.add_error(lost)
    complain_of(lost)


def _train(
    config: RunConfig, own: Prepared | None, interruption: Interruption, peers: Peers, *, lock: RunLock, log: LogFile
) -> None:
    device = bring_up(config.device, local_rank=config.topology.local_rank, threads=config.threads_per_device)
    peers.help(functools.partial(run_folder.damage_in, config))
    alone = config.run_type == "baseline"
    with contextlib.nullcontext() if alone else joined(config.topology, device, store=peers.store):
        prepared: Prepared = from_main(own)
        for line in prepared.messages:
            logger.info(line)
        if prepared.start.finished:
            return
        # Building may still fail on the recipe, so it comes before the run writes its first file.
        spot = spot_watch(config.options.spot_notice, config.topology)
        with spot, contextlib.closing(_build(config, prepared.start, device=device)) as strategy:
            ranks = HostGroup()
            description = open_run_folder(config, prepared, lock=lock, log=log)
            state = _load_checkpoint(config, prepared.start, strategy, device=device)
            done, steps_file = state.step if state else 0, config.run_dir / STEPS_FILE
            if prepared.start.checkpoint is not None:
                if config.topology.is_main:
                    saved = read_run_state(prepared.start.checkpoint).val_loss
                    if damaged := drop_steps_after(steps_file, done, val_loss=saved):
                        lines = f"{len(damaged)}, the first was line {damaged[0]}"
                        logger.warning(f"{steps_file}: damaged lines dropped: {lines}")
                barrier()
            journal = Journal(
                config,
                device=device,
                description=description,
                sinks=open_sinks(config, done=done, trackers=open_trackers(config, description=description, done=done)),
                ranks=ranks,
                plan=prepared.plan,
                goodput=prepared.goodput,
                done=done,
            )
            if state is not None:
                journal.resume(state, steps_file, earlier=prepared.earlier)
            peers.on_lost_rank = functools.partial(_end_after_lost_rank, config, journal, log)
            peers.on_slow_rank = lambda rank, status, usual: logger.warning(
                f"rank {rank} on {status.host} is slow: it computes and reads data for {status.own_sec:.3g} s a step, "
                f"its peers for {usual:.3g} s (medians of {SLOW_STEPS} steps)"
            )
            about = {  # the fields of every checkpoint's manifest about the run
                "strategy": config.strategy_name,
                "topology": asdict(config.topology),
                "device": config.device,
                "versions": description.get("env"),
                "precision": config.precision,
                "run_id": description.get("run_id"),
                "fixed": prepared.settings,
            }
            Trainer(
                config=config,
                device=device,
                strategy=strategy,
                journal=journal,
                saver=Saver(config=config, device=device, strategy=strategy, journal=journal, about=about, ranks=ranks),
                interruption=interruption,
                ranks=ranks,
                peers=peers,
                done=done,
            ).run()


def _build(config: RunConfig, start: run_folder.ResumePoint, *, device: torch.device) -> Strategy:
    torch.manual_seed(dropout_seed(config))
    # A resume needs only the checkpoint: the source of the initial weights may no longer exist.
    return build_strategy(replace(config, init_from=None) if start.checkpoint else config, device)


def dropout_seed(config: RunConfig, *, step: int = 0) -> int:
    """The seed of this rank's dropout masks.

    Ranks that compute different activations draw different masks. Tensor peers share activations and masks.

    Args:
        config: the run.
        step: of the checkpoint, if its random streams cannot be continued: a resumed run must not repeat the masks of
            the first steps.
    """
    stream = config.topology.rank // config.topology.sizes.tensor
    return (config.options.seed * 1_000_003 + step * 1_000_000_007 + stream) % 2**63  # torch accepts these seeds


def _load_checkpoint(
    config: RunConfig, start: run_folder.ResumePoint, strategy: Strategy, *, device: torch.device
) -> RunState | None:
    """Load the checkpoint, if any, into ``strategy`` and the random streams; returns the state of the run."""
    if start.checkpoint is None:
        return None
    state = read_run_state(start.checkpoint)
    reader = StateReader(start.checkpoint)
    reader.require_shapes(parameter_shapes(config.model))
    speaks, count = config.topology.is_main, len(reader.shapes)
    progress = Progress(total=count, what="loading the checkpoint", unit="tensor", lines=speaks)
    reader.heard = progress.advance
    with contextlib.closing(progress):
        strategy.load_state(reader)
    if start.same_ranks:
        load_random_state(start.checkpoint, rank=config.topology.rank, device=device)
    else:
        torch.manual_seed(dropout_seed(config, step=state.step))
    if start.validates_anew:  # losses on another validation set are not comparable
        return replace(state, best_val_loss=None, last_val_loss=None, last_val_step=None)
    return state


# Out of memory in one line: when, how much, what was predicted, and the next setting that fits.

NO_MEMORY = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|Failed to CUDA \w+ \d+ bytes")
"""Matches messages of CUDA (``torch.AcceleratorError``), cuBLAS and NCCL (``DistBackendError``).

Only PyTorch's own allocator raises ``torch.OutOfMemoryError``."""
MOMENTS = {
    "joined": "at the start",
    "_build": "at the start",
    "_load_checkpoint": "while the checkpoint was loaded",
    "save": "in a save",
    "_validate": "in a validation",
    "measure_inference": "in the inference figure",
    "backward": "in the backward pass",
    "step": "in the optimizer step",
    "_clip_and_step": "in the optimizer step",
}
"""The moment of an error, by the first of these functions that its traceback has; else the forward pass."""
SAFE = 0.9
"""A setting is said to fit if it needs at most this share of the memory, or of what the failed one was to need."""


@contextlib.contextmanager
def out_of_memory_explained(config: RunConfig) -> Iterator[None]:
    """Raises ``OutOfMemory`` if the memory of this rank's device runs out inside."""
    try:
        yield
    except RuntimeError as error:
        first: BaseException | None = error
        while first and not (isinstance(first, torch.OutOfMemoryError) or NO_MEMORY.search(str(first))):
            first = first.__cause__ or first.__context__
        if first is None or isinstance(error, SaveError):
            raise
        functions = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        moment = next((MOMENTS[name] for name in MOMENTS if name in functions), "in the forward pass")
        asked = re.search(r"Tried to allocate ([\d.]+ \wiB)|Failed to CUDA \w+ (\d+ bytes)", str(first))
        peak, predicted = peak_bytes(config.device), run_description.predicted_peak_memory(config)
        facts = [
            f"tried to allocate {asked[1] or asked[2]}" if asked else "",
            f"{peak / 1e9:.3g} GB at the peak so far" if peak is not None else "",
            f"{predicted['worst']['total'] / 1e9:.3g} GB were predicted for a step" if predicted else "",
        ]
        raise OutOfMemory(
            f"rank {config.topology.rank} is out of memory {moment}: {', '.join(filter(None, facts))}; "
            f"{_next_setting(config, start=moment == MOMENTS['_build']) if predicted else 'see ds_configs/README.md'}"
        ) from error


def _next_setting(config: RunConfig, *, start: bool) -> str:
    """The least change that fits by the formulas: of micro batch, activation checkpointing, then ZeRO's stage."""
    setup = run_description.setup_of(config)
    limit = SAFE * worst_peak(setup, device=config.device)[1].total
    if config.device == "cuda":
        limit = min(limit, SAFE * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    stages = [setup.recipe.zero_stage]
    if setup.run_type == "optimized" and setup.sizes.ranks_per_copy == 1 and setup.world_size > 1:
        stages += range(stages[0] + 1, 4)
    for stage in stages[start:]:
        recipe = replace(setup.recipe, zero_optimization=replace(setup.recipe.zero_optimization, stage=stage))
        in_recipe = f"zero_optimization.stage {stage} in the recipe, " if stage > stages[0] else ""
        for flags, candidate in replace(setup, recipe=recipe).arrangements():
            smaller = candidate.micro_batch_size <= setup.micro_batch_size
            if smaller and worst_peak(candidate, device=config.device)[1].total <= limit:
                return f"this fits by the formulas: {in_recipe}{' '.join(flags)}"
    return "nothing smaller fits by the formulas: take more GPUs, or offload (src/plan.py --recommend)"
