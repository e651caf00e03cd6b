"""``--spot_notice``: a run on a machine that is taken back saves and leaves; the provider is a stand-in."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from forked_ranks import run_script
from small_run import Quiet, command_line, running, within
from training_runs import SCRIPT, read_lines

from dsgpt.common.errors import EXIT_STOPPED, EXIT_USER_ERROR
from dsgpt.config.options import SPOT_PROVIDERS
from dsgpt.machine import spot
from dsgpt.machine.spot import spot_watch
from dsgpt.machine.topology import read_topology
from dsgpt.record.schema import STEPS_FILE

AWS, AZURE = "/latest/meta-data/spot/instance-action", "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
TOKEN, GCP = "/latest/api/token", "/computeMetadata/v1/instance/preempted"
QUIET = {AZURE: {"Events": [{"EventType": "Reboot", "NotBefore": ""}]}, GCP: "FALSE"}
NOTICES = {
    AWS: {"action": "terminate", "time": "2026-01-01T00:02:00Z"},
    AZURE: {"Events": [{"EventType": "Preempt", "NotBefore": "Mon, 19 Sep 2026 18:29:47 GMT", "Resources": ["VM_1"]}]},
    NAME: "vm_1",
    GCP: "TRUE",
}


class Service(ThreadingHTTPServer):
    """Answers as the metadata services do, by their documentation; ``notice_after`` questions there is a notice."""

    notice_after = 1_000_000
    asked = 0
    broken = False
    first_sec = 0.0
    """Before its first answer."""
    cut = False
    """Whether it closes connections in the middle of an answer."""


class Answer(Quiet):
    server: Service

    def do_PUT(self):
        self.respond("token" if self.path == TOKEN and self.headers["X-aws-ec2-metadata-token-ttl-seconds"] else None)

    def do_GET(self):
        allowed = {
            AWS: self.headers["X-aws-ec2-metadata-token"] == "token",
            **dict.fromkeys((AZURE, NAME), self.headers["Metadata"] == "true"),
            GCP: self.headers["Metadata-Flavor"] == "Google",
        }
        time.sleep(0 if self.server.asked else self.server.first_sec)
        self.server.asked += 1
        answers = NOTICES if self.server.asked > self.server.notice_after else QUIET
        self.respond(answers.get(self.path) if allowed[self.path] else None, code=404 if allowed[self.path] else 403)

    def respond(self, answer, *, code=404):
        self.send_response(503 if self.server.broken else code if answer is None else 200)
        if self.server.cut:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write((answer if isinstance(answer, str) else json.dumps(answer)).encode())


@pytest.fixture
def service(monkeypatch) -> Iterator[Service]:
    with running(server := Service(("127.0.0.1", 0), Answer)) as address:
        monkeypatch.setenv(spot.ADDRESS, address)
        yield server


@pytest.mark.parametrize("provider", SPOT_PROVIDERS)
def test_a_notice_is_read_and_its_absence_too(service, provider):
    assert spot.read_notice(provider) is None
    service.notice_after = 0
    assert any(word in spot.read_notice(provider) for word in ("terminate", "Preempt", "preempted"))
    service.cut = True
    with pytest.raises(OSError, match="no whole answer"):
        spot.read_notice(provider)
    service.broken = True
    with pytest.raises(OSError, match="503"):
        spot.read_notice(provider)


def test_azure_tells_every_machine_of_a_scale_set_and_takes_its_time_at_first(service, monkeypatch):
    service.notice_after = 0
    monkeypatch.setitem(NOTICES, NAME, "vm_2")
    assert spot.read_notice("azure") is None
    monkeypatch.setattr(spot, "ANSWER_SEC", 0.2)
    service.asked, service.first_sec, service.notice_after = 0, 0.5, 1_000_000
    with spot_watch("azure", read_topology({})):
        assert service.asked
    with pytest.raises(TimeoutError):
        service.asked = 0
        spot.read_notice("azure", seconds=spot.ANSWER_SEC)


SOON = """
import sys, time
from dsgpt.data import remote
from dsgpt.machine import spot
from dsgpt.machine.launcher import exit_rank
from dsgpt.training import trainer
from dsgpt.training.command import train
spot.POLL_SEC = trainer.POLL_SEC = 0.1
trainer.NOTICE_SEC = dict.fromkeys(spot.NOTICE_SEC, 2.1)
trainer.COPY_SEC = 3
write = remote.Place.write
remote.Place.write = lambda *args: time.sleep(120 * args[1].startswith("step-")) or write(*args)
exit_rank(train(sys.argv[1:]))
"""
"""``src/gpt2.py`` that asks more often, with a slow store, and providers that give two seconds."""


def when_it_trains(run: Path, then: Callable[[], object]) -> None:
    """Do something once a run has taken eight steps."""

    def watch() -> None:
        within(lambda: (run / STEPS_FILE).exists() and len(read_lines(run)) > 8, seconds=120)
        then()

    threading.Thread(target=watch, daemon=True).start()


@pytest.mark.parametrize("source", [*SPOT_PROVIDERS, "file"])
def test_a_run_saves_and_leaves(service, here, source):
    """Two ranks of one machine; the first is given notice, and both leave after the same step.

    The second copy would take minutes, and is left before the provider takes the machine.
    """
    script, notice, run = here / "soon.py", here / "notice", here / "run"
    script.write_text(SOON)
    flags = {"run_type": "ddp", "max_train_steps": 4000, "save_every": 4000, "no_inference": True, "max_val_steps": 1}
    asks = source in SPOT_PROVIDERS
    words = command_line(here, **flags, save_to=here / "copy", spot_notice=source if asks else notice)
    when_it_trains(run, partial(setattr, service, "notice_after", 0) if asks else notice.touch)
    done = run_script(script, words, ranks=2, cwd=here)
    assert done.returncode == EXIT_STOPPED, done.stdout + done.stderr
    assert f"--spot_notice {source if asks else notice}: " in done.stderr
    if asks:
        assert f"--spot_notice {source}: a notice leaves 2 s, and a save takes about 0.00" in done.stdout
    waited = re.search(r"--save_to: not finished after (\d+) s: it is \d+ steps behind", done.stdout + done.stderr)
    assert waited
    assert int(waited[1]) <= (2 if asks else 3)
    steps = [line["step"] for line in read_lines(run) if "loss" in line]
    assert 8 < steps[-1] < 4000
    assert (run / f"step-{steps[-1]:08d}").is_dir()


@pytest.mark.parametrize(
    ("source", "why"), [("gcp", "the provider's service does not answer"), ("./notice", "there is a notice already")]
)
def test_a_run_that_could_not_be_warned_or_already_is_does_not_begin(here, monkeypatch, source, why):
    (here / "notice").touch()
    monkeypatch.setenv(spot.ADDRESS, "http://127.0.0.1:9")
    done = run_script(SCRIPT, command_line(here, spot_notice=source), cwd=here)
    assert done.returncode == EXIT_USER_ERROR
    assert done.stderr.startswith(f"error: --spot_notice {source}: on ")
    assert why in done.stderr
    assert not (here / "run" / STEPS_FILE).exists()
