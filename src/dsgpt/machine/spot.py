"""Notices that a provider takes a spot instance back: they stop the run in order, as SIGTERM would.

Every machine has a notice of its own, from the metadata service of its provider, or from whatever makes a file. The
first rank of each machine asks. Formats: AWS "Spot Instance interruption notices", Google Cloud "Preemptible VM
instances", Azure "Scheduled Events".
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from dsgpt.common.errors import UserError
from dsgpt.machine.device import gather_objects
from dsgpt.machine.launcher import waiting_processes
from dsgpt.machine.topology import Topology

ADDRESS = "DSGPT_METADATA_ADDRESS"
"""An environment variable: the address of a metadata service in another place than the provider's."""
POLL_SEC = 5.0
"""Seconds between two questions, as AWS recommends."""
NOTICE_SEC = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
"""Seconds from a notice to the end of the machine."""
ANSWER_SEC, FIRST_ANSWER_SEC = 2.0, {"azure": 150.0}
"""Seconds that a metadata service has for its answer: it is on the same machine, or beside it. Azure's may need two
minutes for its first one."""
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # a proxy is another machine
"""Opens an address without the proxies of the environment."""


Ask = Callable[..., str]
"""``_ask`` with a time limit."""


def _ask(address: str, headers: Mapping[str, str], method: str = "GET", *, seconds: float) -> str:
    try:
        with _open(urllib.request.Request(address, headers=dict(headers), method=method), timeout=seconds) as answer:
            return str(answer.read(1 << 16), "utf-8", "replace")
    except http.client.HTTPException as error:
        raise OSError(f"{address}: no whole answer ({type(error).__name__})") from error


def _aws(ask: Ask, service: str) -> str | None:
    token = ask(f"{service}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    try:
        return ask(f"{service}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    except urllib.error.HTTPError as error:
        if error.code == 404:  # no notice
            return None
        raise


def _gcp(ask: Ask, service: str) -> str | None:
    answer = ask(f"{service}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return "preempted" if answer.strip() == "TRUE" else None


def _azure(ask: Ask, service: str) -> str | None:
    answer = json.loads(ask(f"{service}/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"}))
    ends = [event for event in answer["Events"] if event["EventType"] in {"Preempt", "Terminate"}]
    if ends:  # machines of one availability set or scale set hear of each other's
        own = ask(f"{service}/metadata/instance/compute/name?api-version=2021-02-01&format=text", {"Metadata": "true"})
        ends = [event for event in ends if own.strip().lower() in map(str.lower, event["Resources"])]
    return f"{ends[0]['EventType']} at {ends[0].get('NotBefore') or 'once'}" if ends else None


_LINK_LOCAL = "http://169.254.169.254"
PROVIDERS = {
    "aws": (_LINK_LOCAL, _aws),
    "gcp": ("http://metadata.google.internal", _gcp),
    "azure": (_LINK_LOCAL, _azure),
}
"""Address of the metadata service, and what reads a notice from it."""


def read_notice(source: str, *, seconds: float = ANSWER_SEC) -> str | None:
    """The notice of a provider, heard within ``seconds``, or of the file ``source``; None if there is no notice.

    Raises:
        OSError: the provider's service does not answer.
        ValueError: it answers with something else.
    """
    if source not in PROVIDERS:
        return "it exists" if Path(source).exists() else None
    address, read = PROVIDERS[source]
    try:
        return read(partial(_ask, seconds=seconds), os.environ.get(ADDRESS, address))
    except (KeyError, TypeError) as error:
        raise ValueError(f"an answer without {error}") from error


@contextlib.contextmanager
def spot_watch(source: str | None, topology: Topology) -> Iterator[None]:
    """A context: inside, a notice makes this machine's ranks, and so the run, stop in order.

    Args:
        source: a provider, a path, or None to ask nobody.
        topology: says which rank asks.

    Raises:
        UserError: on entry, on every rank: a machine's provider does not answer, so that nobody would give notice; or
            there is one already.
    """
    if source is None:
        yield
        return
    problem: str | None = None
    asks, end = topology.local_rank == 0, threading.Event()
    if asks:
        where = f"--spot_notice {source}: on {socket.gethostname()}"
        try:
            if notice := read_notice(source, seconds=FIRST_ANSWER_SEC.get(source, ANSWER_SEC)):
                problem = f"{where} there is a notice already ({notice}): use another machine, or remove the file"
        except (OSError, ValueError) as error:
            problem = f"{where} the provider's service does not answer: {error}"
    if problems := [line for line in gather_objects(problem) if line]:
        raise UserError(*problems)
    thread = threading.Thread(target=_watch, args=(source, topology, end), name="spot", daemon=True)
    if asks:
        thread.start()
    try:
        yield
    finally:
        end.set()
        if asks:
            thread.join()


def _watch(source: str, topology: Topology, end: threading.Event) -> None:
    answers = True
    while not end.wait(POLL_SEC):
        try:
            notice = read_notice(source)
        except (OSError, ValueError) as error:
            if answers:
                _say(f"warning: --spot_notice {source}: {error}; asked again every {POLL_SEC:g} s")
            answers = False
            continue
        answers = True
        if notice:
            _say(f"--spot_notice {source}: {notice}: the run stops and saves")
            # under torchrun the signal goes to its agent, which would otherwise restart the ranks
            process = waiting_processes()[-1].pid if topology.launcher == "torchrun" else os.getpid()
            os.kill(process, signal.SIGTERM)
            return


def _say(line: str) -> None:
    """Print on whichever machine it is: only rank 0 logs."""
    with contextlib.suppress(OSError):  # the terminal is gone
        print(line, file=sys.stderr, flush=True)
