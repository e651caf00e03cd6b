"""Finds ranks that died, hang or are slow, and names them with host, step and Python stack.

A thread in every rank writes the rank's phase and step to the process group's store once a second. The device and the
loop exchange nothing for it. If a rank makes no progress, or its neighbour's thread stops writing, it asks all ranks
for their Python stacks and their numbers of collective calls. Then it names the rank that the others wait for.
PyTorch's flight recorder compares the same facts after a run, and ``monitored_barrier`` at one collective.
"""

import contextlib
import itertools
import json
import math
import os
import re
import socket
import statistics
import sys
import threading
import time
import traceback
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dsgpt.common.errors import EXIT_DONE, EXIT_USER_ERROR, LostRank, SaveError, UserError
from dsgpt.machine.topology import Topology

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

JOIN_SEC = 600.0
"""Seconds in which every rank must arrive; starting a machine by hand takes a while."""
LIMITS_SEC = {"validation": 600.0} | dict.fromkeys(("start", "compilation", "record", "save", "end"), 1800.0)
"""Seconds without progress after which a phase other than a step counts as standing still.

Every byte that rank 0 hashes or fetches at the start is progress, and so is each batch of a validation. The first step
of a process compiles."""
TIMES_STEP = 3
"""A step stands still at the earliest after this many times the median of recent steps."""
BEAT_SEC, BUSY_SEC = 1.0, 10.0
OBSERVED_SEC = 8.0
"""Seconds for which ranks are observed before one is named; one that gives no sign of life in them is gone."""
SLOW_STEPS, SLOW_TIMES, SLOW_SEC = 20, 1.5, 0.02
"""A rank is slow if the median work of so many steps is so many times its peers', and so many seconds more."""
FRAMES = 12
"""Innermost calls of a stack that are shown."""
BROKEN = re.compile(
    r"gloo|NCCL|nccl|Connection (closed|reset|refused)|Broken pipe|Socket closed|(?<!DataLoader )[Tt]imed out|c10d"
)
"""Matches messages of errors that another rank may have caused; a DataLoader waits for workers of this rank."""
_WAITING = re.compile(r"/torch/distributed/|/deepspeed/comm/|_engine_run_backward|/torch/cuda/")


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Phase, step and health of one rank, as the ranks read them from the store."""

    host: str
    phase: str = "start"
    step: int = 0
    """The last step that the rank began."""
    progress_count: int = 0
    """Number of times the rank noted progress; equal on all ranks that are equally far."""
    beat: int = 0
    """Number of times the rank's thread wrote to the store."""
    idle_sec: float = 0.0
    """Seconds without progress, when it last did."""
    own_sec: float | None = None
    """Median seconds per step of computing and waiting for data; None before enough steps."""
    silent: bool = False
    """Whether its thread stopped writing to the store."""
    failed: str | None = None
    """The error that the rank raised."""
    stack: tuple[str, ...] = ()
    """Python stack of its main thread, the innermost call last."""
    collectives: Mapping[str, int] = field(default_factory=dict)
    """Number of collectives called, by process group."""

    @property
    def where(self) -> str:
        """``step 7``, or another phase."""
        of_a_step = self.phase in {"step", "agreement", "compilation"}
        return f"step {self.step}" if of_a_step else f"{self.phase} after step {self.step}"

    @property
    def waits(self) -> bool:
        """Whether its innermost call waits for others, as far as its stack shows."""
        return bool(self.stack) and _WAITING.search(self.stack[-1]) is not None


def culprits(  # noqa: PLR0911 - one for each way to tell them apart
    ranks: Mapping[int, RankStatus], *, pipeline: bool = False
) -> tuple[list[int], str]:
    """The ranks that the others wait for, and what they do; all ranks if nothing tells them apart.

    Args:
        ranks: all ranks.
        pipeline: stages send to each other in the group of all ranks, so its calls cannot be compared.
    """
    alive = {rank: status for rank, status in ranks.items() if not status.silent}
    if failed := [rank for rank, status in ranks.items() if status.failed]:
        return failed, "failed"
    if silent := [rank for rank, status in ranks.items() if status.silent]:
        return silent, "gives no sign of life: it died, was stopped, or its machine is cut off"
    hangs = "hangs, and the others wait for it"
    least = min(status.progress_count for status in alive.values())
    behind = [rank for rank, status in alive.items() if status.progress_count == least]
    if len(behind) < len(alive):
        return behind, hangs
    late, ahead = set[int](), set[int]()
    for group in {name for status in alive.values() for name in status.collectives} - ({"0"} if pipeline else set()):
        calls = {rank: status.collectives[group] for rank, status in alive.items() if group in status.collectives}
        late |= {rank for rank, count in calls.items() if count < max(calls.values())}
        ahead |= {rank for rank, count in calls.items() if count > min(calls.values())}
    if late - ahead:  # who is ahead in one group and late in another waits itself
        return sorted(late - ahead), hangs
    busy = [rank for rank, status in alive.items() if status.stack and not status.waits]
    if 0 < len(busy) < len(alive):
        return busy, hangs
    places = Counter(status.stack[-1:] for status in alive.values())
    usual, count = places.most_common(1)[0]
    if len(places) > 1 and count > 1:
        return [rank for rank, status in alive.items() if status.stack[-1:] != usual], "waits where the others do not"
    return sorted(alive), "waits, and no rank is behind the others"


def verdict(ranks: Mapping[int, RankStatus], *, seconds: float, pipeline: bool) -> str:
    """Lines that name the culprits: host, rank, step, what is wrong, and Python stacks of two of them."""
    named, what = culprits(ranks, pipeline=pipeline)
    first = ranks[named[0]]
    more = f" (and {len(named) - 1} more: ranks {', '.join(map(str, named[1:9]))})" if named[1:] else ""
    why = f": {first.failed}" if first.failed else f"; seen after {seconds:.0f} s without progress"
    lines = [f"rank {named[0]} on {first.host}{more} {what}, in {first.where}{why}; continue with --resume"]
    shown: set[tuple[str, ...]] = set()
    for rank in named:
        stack = ranks[rank].stack
        if stack and stack not in shown and len(shown) < 2:
            lines += [f"rank {rank} on {ranks[rank].host}, innermost call last:", *(f"  {call}" for call in stack)]
            shown.add(stack)
    return "\n".join(lines)


def slow_ranks(ranks: Mapping[int, RankStatus], *, stages: int = 1) -> dict[int, float]:
    """Ranks whose own work takes much longer than their peers', with the median of those in seconds a step.

    Args:
        ranks: all ranks.
        stages: of a pipeline; only ranks of one stage do the same work.
    """
    slow, size = {}, max(1, len(ranks) // stages)
    known = {rank: status.own_sec for rank, status in ranks.items() if status.own_sec is not None}
    for rank, own in known.items():
        others = [other for peer, other in known.items() if peer != rank and peer // size == rank // size]
        usual = statistics.median(others or [math.inf])
        if own > max(SLOW_TIMES * usual, usual + SLOW_SEC):
            slow[rank] = usual
    return slow


def open_store(topology: Topology, *, seconds: float | None = None) -> "Store":
    """The store at which the ranks meet; rank 0 serves it unless the launcher does. It waits ``seconds``, or JOIN_SEC.

    With ``--master_port`` on one machine, PyTorch 2.13 keeps one store for all attempts of ``torchrun --max-restarts``,
    with the same keys (``static_tcp_rendezvous.py``): restarted ranks would read the addresses of dead ones. So these
    get a prefix. Launchers on several machines make a new store for each attempt.

    Raises:
        UserError: the variables do not say where the ranks meet, or nobody answers there.
    """
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise UserError(f"not set: {', '.join(missing)}, where the ranks meet: start them with a launcher")
    limit = seconds or JOIN_SEC
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    of_the_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    serves = topology.is_main and not of_the_launcher
    try:
        # All of these are documented as public; only the types do not mark them as exported.
        store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, is_master=serves, timeout=timedelta(seconds=limit), wait_for_workers=False, multi_tenant=True
        )
    except dist.DistError as error:
        if serves:
            why = str(error).splitlines()[0]
            raise UserError(f"cannot meet at {address}:{port} ({why}): give another MASTER_PORT") from error
        silent = f"rank 0 did not answer at {address}:{port} within {limit:.0f} s"
        raise UserError(f"{silent}: it did not start, or refused") from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt != "0" and of_the_launcher and os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
    return store


def meet(store: "Store", topology: Topology, *, answered: Callable[[], None] = lambda: None) -> "Store":
    """Wait until every rank that was started is there, spares included; calls ``answered`` when the store answers.

    Every rank brings a new word and counts while it waits; rank 0 answers each rank whose count grows. So a store that
    torchrun keeps over attempts, which has the words of dead ranks, is no danger.

    Returns:
        The part of the store that belongs to this meeting; ``hosts`` in it has the host of every rank.

    Raises:
        UserError: one refused to start, or some did not arrive within ``JOIN_SEC``. Says which.
    """
    word, end = uuid.uuid4().hex, time.monotonic() + JOIN_SEC
    ranks = range(topology.started)
    store.set(f"here/{topology.rank}", f"{word} {socket.gethostname()}")
    counts, arrived, busy = dict[str, int](), dict[int, list[str]](), 0
    while not store.check([f"go/{word}"]):
        answered()
        store.add(f"count/{word}", 1)
        if lines := _hear_refusal(store, topology):
            raise UserError(*lines)
        for rank in ranks if topology.is_main else ():
            if rank not in arrived and store.check([f"here/{rank}"]):
                said = store.get(f"here/{rank}").decode().split(" ", 1)
                count = store.add(f"count/{said[0]}", 0)
                if count > counts.setdefault(said[0], count):
                    arrived[rank] = said
        if len(arrived) == topology.started:
            store.set(f"{word}/hosts", json.dumps([arrived[rank][1] for rank in ranks]))
            for rank in ranks:
                store.set(f"go/{arrived[rank][0]}", word)
        elif (count := store.add("busy", 0)) > busy:  # a rank that comes later copies data, and makes progress
            busy, end = count, time.monotonic() + JOIN_SEC
        elif time.monotonic() > end:
            missing = [str(rank) for rank in ranks if rank not in arrived]
            who = f"ranks {', '.join(missing[:16])}" if topology.is_main else "some ranks"
            line = f"{who} did not arrive within {JOIN_SEC:.0f} s: look at what their machines printed"
            store.set("refused", json.dumps([uuid.uuid4().hex, line]))
        else:
            time.sleep(0.1)
    return dist.PrefixStore(store.get(f"go/{word}").decode(), store)  # type: ignore[attr-defined]


def _hear_refusal(store: "Store", topology: Topology) -> list[str]:
    """The lines of a refusal, and counts that this rank heard them; empty if there is none.

    A store that the launcher keeps over attempts may have the refusal of an earlier one, which as many ranks have
    heard as were started.
    """
    if not store.check(["refused"]):
        return []
    word, *lines = json.loads(store.get("refused"))
    return lines if store.add(f"heard/{word}", 1) <= topology.started else []


def tell_refusal(topology: Topology, lines: Sequence[str]) -> None:
    """Tell the ranks of other machines why this one does not start, once rank 0 is there; raises nothing."""
    where = f"rank {topology.rank} on {socket.gethostname()} refused: "
    with contextlib.suppress(UserError, dist.DistError, RuntimeError, ValueError):
        _refuse(open_store(topology), topology, [where + line for line in lines])


def _refuse(store: "Store", topology: Topology, lines: Sequence[str]) -> None:
    if topology.local_world_size == topology.world_size:
        return  # the launcher of one machine ends its ranks
    before = store.get("refused").decode() if store.check(["refused"]) else ""
    if not _hear_refusal(store, topology):
        store.compare_set("refused", before, json.dumps([uuid.uuid4().hex, *lines]))
        _hear_refusal(store, topology)
    key = f"heard/{json.loads(store.get('refused'))[0]}"
    end = time.monotonic() + OBSERVED_SEC
    while topology.is_main and store.add(key, 0) < topology.started and time.monotonic() < end:
        time.sleep(0.1)  # the store ends with rank 0


def say_busy(topology: Topology) -> Callable[[], object]:
    """A function to call before the meeting whenever this rank makes progress with something long, such as a copy.

    At most every ``BUSY_SEC`` it tells the ranks of other machines, which wait for this one as long as it does.
    """
    progressed = threading.Event()

    def tell() -> None:
        with contextlib.suppress(UserError, dist.DistError, RuntimeError):
            store = open_store(topology)  # rank 0 serves it while this thread lives, which is until ``join`` opens it
            while progressed.wait(JOIN_SEC):
                store.add("busy", 1)
                time.sleep(BUSY_SEC)
                progressed.clear()

    thread = threading.Thread(target=tell, name="busy", daemon=True)

    def heard() -> None:
        progressed.set()
        if not thread.ident:
            thread.start()

    return heard


class Peers(contextlib.AbstractContextManager["Peers"]):
    """Writes this rank's status to the store and watches the other ranks, in a thread that ``join`` starts.

    A context manager; its end stops the thread.

    Args:
        topology: this rank's place; a single rank has no peers, and all methods do nothing.
        stall_timeout: seconds without progress after which a step stands still.
    """

    def __init__(self, topology: Topology, *, stall_timeout: float) -> None:
        self._topology, self._stall_timeout = topology, stall_timeout
        self.store: Store | None = None
        """The store at which the ranks meet; None for a single rank."""
        self.on_slow_rank: Callable[[int, RankStatus, float], None] = lambda *_: None
        """Called in rank 0's thread with a slow rank, its status, and its peers' median seconds of work per step."""
        self.on_lost_rank: Callable[[LostRank], None] = lambda _: None
        """Called in the watch thread before it ends this process, whose main thread is blocked by a lost rank."""
        self._own = RankStatus(host=socket.gethostname())  # only the main thread changes it
        self._beats = self._shared = 0
        self._progress_at = self._store_answered_at = time.monotonic()
        self._steps: deque[float] = deque(maxlen=SLOW_STEPS)
        self._work: deque[float] = deque(maxlen=SLOW_STEPS)
        self._ended, self._broken, self._observed = threading.Event(), threading.Event(), threading.Event()
        self._lost: LostRank | None = None
        self._next_beat: tuple[int, float] = (-1, time.monotonic())
        self._patience = (-1, 0.0)
        """The ``progress_count`` at which this rank waits for one that may take longer, and its seconds for that."""
        self._answered_request = self._own_verdict = ""
        self._slow_reported: set[int] = set()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._guard = threading.Thread(target=self._watch_store, name="peers-store", daemon=True)

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(OBSERVED_SEC)  # it may wait for a store that is gone
        if self._topology.is_main and self._topology.spares and self.store is not None:
            with contextlib.suppress(dist.DistError, RuntimeError):
                self._watched.set("ended", str(EXIT_DONE if error is None else getattr(error, "exit_code", 1)))
                end = time.monotonic() + OBSERVED_SEC
                while self._watched.add("released", 0) < self._topology.spares and time.monotonic() < end:
                    time.sleep(0.1)  # the store ends with rank 0

    def join(self) -> None:
        """Wait for all ranks, and begin to watch them.

        Raises:
            UserError: a rank does not come.
        """
        if self._topology.started > 1:
            store = open_store(self._topology)
            self._note_answer()
            self._guard.start()
            try:
                store = meet(store, self._topology, answered=self._note_answer)
            except dist.DistError as error:
                self._lose_store(str(error).splitlines()[0][:120])
                raise
            self._hosts: list[str] = json.loads(store.get("hosts"))
            # A clone has a connection of its own. It is public; only the types lack it.
            self.store, self._watched = store, store.clone()  # type: ignore[attr-defined]
            self._watched.set_timeout(timedelta(seconds=OBSERVED_SEC))
            self.store.set_timeout(timedelta(days=1))  # rank 0 may fetch for long; the thread names one that hangs
            self._progress_at = time.monotonic()
            self._note_answer()
            if not self._topology.is_spare:
                self._thread.start()

    def share(self, what: str, work: Callable[[str, int, int], str]) -> list[str]:
        """Let every rank do its part of ``work``; rank 0 calls it before the process group exists.

        Args:
            what: the first argument of ``work``, not empty; the others are the rank, and how many ranks take part.
            work: as the others give it to ``help``.

        Returns:
            What it returned on each rank; on this one alone if it has not joined any peers.
        """
        if self.store is None:
            return [work(what, 0, 1)]
        self._shared += 1
        self.store.set(f"work/{self._shared}", what)
        own, ranks = work(what, 0, self._topology.world_size), range(1, self._topology.world_size)
        return [own, *(self.store.get(f"done/{self._shared}/{rank}").decode() for rank in ranks)]

    def help(self, work: Callable[[str, int, int], str]) -> None:
        """Do this rank's part of what rank 0 shares, until rank 0 calls this, too."""
        if self.store is not None and self._topology.is_main:
            self.store.set(f"work/{self._shared + 1}", "")
        elif self.store is not None:
            rank, ranks = self._topology.rank, self._topology.world_size
            for number in itertools.count(1):
                # A rank that reads from the store when rank 0 ends would print a C++ stack. With ``_lost``, the thread
                # is about to end this process.
                while self._lost is not None or not self.store.check([f"work/{number}"]):
                    time.sleep(0.05)
                if not (what := self.store.get(f"work/{number}").decode()):
                    return
                self.store.set(f"done/{number}/{rank}", work(what, rank, ranks))

    def stand_by(self) -> None:
        """Wait, as a spare, until the run has ended.

        Raises:
            LostRank: it did not end well. The exit code is that of the run, if rank 0 told it.
        """
        lost: LostRank | None = None
        try:
            while lost is None and not self._watched.check(["ended"]):
                lost = self._told()
                self._note_answer()
                time.sleep(BEAT_SEC)
            if lost is None and (code := int(self._watched.get("ended"))) != EXIT_DONE:
                lost = LostRank(f"the run ended with exit code {code}")
                lost.exit_code = code
            self._watched.add("released", 1)
        except RuntimeError as error:  # of the store
            self._lose_store(str(error).splitlines()[0][:120])
        if lost is not None:
            lost.speaks = False
            raise lost

    def _told(self) -> LostRank | None:
        """The end of the run that another rank wrote to the store; None as long as none did."""
        if lines := _hear_refusal(self._watched, self._topology):
            return LostRank("\n".join(lines), refused=True)
        return LostRank(self._watched.get("verdict").decode()) if self._watched.check(["verdict"]) else None

    def refuse(self, lines: tuple[str, ...]) -> None:
        """Make the other ranks end with ``lines``, the reason why this rank does not start."""
        if self.store is not None:
            self._ended.set()
            with contextlib.suppress(dist.DistError, RuntimeError):
                _refuse(self._watched, self._topology, lines)

    def end(self) -> None:
        """Stop watching: this rank no longer waits for the others, which may end before it."""
        self._ended.set()

    def begin(self, phase: str, step: int | None = None) -> None:
        """Note that this rank enters a phase: ``step``, its end (``agreement``), or one of ``LIMITS_SEC``."""
        step = self._own.step if step is None else step
        self._own = replace(self._own, phase=phase, step=step, progress_count=self._own.progress_count + 1)
        self._progress_at = time.monotonic()

    def note_progress(self) -> None:
        """Note progress in the phase, which every rank makes."""
        self._own = replace(self._own, progress_count=self._own.progress_count + 1)
        self._progress_at = time.monotonic()

    def note_own_progress(self) -> None:
        """Note progress that this rank makes while the others wait, such as with a file that it hashes."""
        self._progress_at = time.monotonic()

    def note_step(self, seconds: float) -> None:
        """Note that the device has finished a step, which took so many ``seconds``."""
        self._steps.append(seconds)
        self.note_progress()

    def worked(self, seconds: float) -> None:
        """Note for how long this rank computed and waited for data in a step."""
        self._work.append(seconds)
        if len(self._work) == SLOW_STEPS:
            self._own = replace(self._own, own_sec=statistics.median(self._work))

    def limit_sec(self, status: RankStatus) -> float:
        """Seconds without progress after which a rank stands still, by its phase."""
        usual = statistics.median_low(self._steps) if self._steps else 0.0  # the first step compiles
        return max(self._stall_timeout, LIMITS_SEC.get(status.phase, TIMES_STEP * usual))

    @property
    def _left_sec(self) -> float:
        """Seconds until this rank stands still, or has waited long enough for one that may take longer."""
        count, patience = self._patience
        return max(self.limit_sec(self._own), patience if count == self._own.progress_count else 0.0) - self.idle_sec

    @property
    def idle_sec(self) -> float:
        """Seconds since this rank last made progress."""
        return time.monotonic() - self._progress_at

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Raises ``LostRank`` for an error that another rank caused, and tells the others of an error of this one."""
        try:
            yield
        except Exception as error:
            if self.store is None or self._lost is not None:
                raise
            if isinstance(error, RuntimeError) and not isinstance(error, SaveError) and BROKEN.search(str(error)):
                self._broken.set()
                self._observed.wait(3 * OBSERVED_SEC)
                if self._lost is not None:
                    raise self._lost from error
            what, own = f"{type(error).__name__}: {error}".splitlines()[0], self._own
            stack = _calls(traceback.extract_tb(error.__traceback__))
            fact = {"failed": what, "stack": stack, "phase": own.phase, "step": own.step}
            with contextlib.suppress(dist.DistError, RuntimeError):
                self._watched.set(f"failed/{self._topology.rank}", json.dumps(fact))
            raise

    # In the thread.

    def _watch(self) -> None:
        while not self._ended.wait(BEAT_SEC):
            try:
                self._beat()
                if lost := self._told():
                    self._end(lost)
                elif self._broken.is_set() or self._left_sec < OBSERVED_SEC or self._neighbour_lost():
                    self._observe()
                elif self._topology.is_main and self._beats % 5 == 0:
                    ranks = self._all_statuses()
                    slow = slow_ranks(ranks, stages=self._topology.sizes.pipeline)
                    new, self._slow_reported = slow.keys() - self._slow_reported, self._slow_reported | slow.keys()
                    for rank in sorted(new):
                        self.on_slow_rank(rank, ranks[rank], slow[rank])
            except RuntimeError as error:  # of the store
                if not self._ended.wait(OBSERVED_SEC):  # else the run has ended
                    self._lose_store(str(error).splitlines()[0][:120])
                return

    def _watch_store(self) -> None:
        """Ends this process if the store does not answer: where its machine is cut off, the thread waits for hours."""
        silent_sec, answered_at, before = 0.0, self._store_answered_at, time.monotonic()
        while not self._ended.wait(BEAT_SEC):
            now = time.monotonic()
            silent_sec += min(now - before, 2 * BEAT_SEC)  # a process that was stopped or starved asked nothing
            if self._store_answered_at != answered_at:
                silent_sec, answered_at = 0.0, self._store_answered_at
            before = now
            if silent_sec > self._stall_timeout - OBSERVED_SEC:
                self._lose_store(f"no answer for {self._stall_timeout - OBSERVED_SEC:.0f} s")
                return

    def _note_answer(self) -> None:
        self._store_answered_at = time.monotonic()

    def _lose_store(self, why: str) -> None:
        at = os.environ["MASTER_ADDR"]
        words = f"rank 0 or its launcher, at {at}, does not answer any more, in {self._own.where} ({why})"
        self._own_verdict = f"{words}: it died, or a machine is cut off; continue with --resume"
        self._end(LostRank(self._own_verdict))

    def _beat(self) -> None:
        self._beats += 1
        own = replace(self._own, beat=self._beats, idle_sec=self.idle_sec)
        shared = {name: value for name, value in asdict(own).items() if name not in {"stack", "collectives"}}
        self._watched.set(f"at/{self._topology.rank}", json.dumps(shared))
        self._watched.check(["hosts"])  # it waits for the answer, which ``set`` does not
        self._note_answer()
        if self._watched.check(["ask"]) and (asked := self._watched.get("ask").decode()) != self._answered_request:
            self._answered_request = asked
            stack = _calls(traceback.extract_stack(sys._current_frames()[self._main]))
            fact = {"stack": stack, "collectives": _collectives()}
            self._watched.set(f"stack/{self._topology.rank}", json.dumps(fact))

    def _neighbour_lost(self) -> bool:
        """Whether the next rank has given no sign of life for almost ``stall_timeout``."""
        rank = (self._topology.rank + 1) % self._topology.world_size
        beat = self._read(rank, "at").get("beat", 0)
        if beat != self._next_beat[0]:
            self._next_beat = (beat, time.monotonic())
        return time.monotonic() - self._next_beat[1] > self._stall_timeout - 2 * OBSERVED_SEC

    def _read(self, rank: int, what: str) -> dict[str, Any]:
        key = f"{what}/{rank}"
        return dict(json.loads(self._watched.get(key))) if self._watched.check([key]) else {}

    def _all_statuses(self) -> dict[int, RankStatus]:
        ranks = {}
        for rank in range(self._topology.world_size):
            facts: dict[str, Any] = {"host": self._hosts[rank]}
            for what in ("at", "stack", "failed"):
                facts |= self._read(rank, what)
            ranks[rank] = RankStatus(**facts | {"stack": tuple(facts.get("stack", ()))})
        return ranks

    def _observe(self) -> None:
        """Look at all ranks for a while, then name those that the others wait for; stops if the run goes on.

        The limit is that of the rank that is waited for: rank 0 may write the record while the others are in a step.
        """
        idle, progress_count, end = self.idle_sec, self._own.progress_count, time.monotonic() + OBSERVED_SEC
        pipeline = self._topology.sizes.pipeline > 1
        before = self._all_statuses()
        self._watched.set("ask", f"{self._topology.rank} {time.time()}")
        while True:
            ended = self._ended.wait(BEAT_SEC)
            if ended or self._own.progress_count != progress_count or self._watched.check(["verdict"]):
                return
            self._beat()
            ranks = self._all_statuses()
            failed = any(status.failed for status in ranks.values())
            if time.monotonic() < end and not (failed and self._broken.is_set()):
                continue
            still = {rank for rank, status in ranks.items() if status.beat == before[rank].beat}
            silent = still - {self._topology.rank}
            ranks = {rank: replace(status, silent=rank in silent) for rank, status in ranks.items()}
            waited_for = [ranks[rank] for rank in culprits(ranks, pipeline=pipeline)[0]]
            left = max(self.limit_sec(status) - status.idle_sec for status in waited_for)
            if failed or silent or left < 2 * BEAT_SEC:
                break
            if self._broken.is_set():
                self._broken.clear()
                self._observed.set()  # without a name: the error is shown as it is
            if self._left_sec < BEAT_SEC:
                self._patience = (progress_count, self.idle_sec + min(left, self._stall_timeout))
            if self._left_sec > 2 * OBSERVED_SEC:
                return
        own = self._own  # all ranks took the step before, so the last beat of one that is gone may be older
        ranks |= {rank: replace(ranks[rank], phase=own.phase, step=own.step) for rank in silent}
        self._own_verdict = verdict(ranks, seconds=max(idle, self.idle_sec), pipeline=pipeline)
        self._end(LostRank(self._watched.compare_set("verdict", "", self._own_verdict).decode()))

    def _end(self, lost: LostRank) -> None:
        """Let the main thread raise ``lost`` if it can; otherwise end this process."""
        self._lost = lost
        speaks = self._topology.local_rank == 0 if lost.exit_code == EXIT_USER_ERROR else self._topology.is_main
        lost.speaks = speaks or str(lost) == self._own_verdict
        self._observed.set()
        if self._broken.is_set():
            self._linger()
            self._ended.set()
            return
        self.on_lost_rank(lost)
        self._linger()
        os._exit(lost.exit_code)

    def _linger(self) -> None:
        # The store may end with rank 0, and the others must read the verdict before the end of a rank disturbs them.
        time.sleep((3 if self._topology.is_main else 1.5) * BEAT_SEC)


def _calls(frames: traceback.StackSummary) -> list[str]:
    return [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames[-FRAMES:]]


def _collectives() -> dict[str, int]:
    """Number of collectives that this rank has called, by the name of the process group."""
    counts = {}
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        with contextlib.suppress(RuntimeError):  # a backend without numbers
            counts[str(name)] = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return counts
