"""Hosts of a cluster on this machine: network namespaces with addresses and host names of their own, behind a switch.

Ranks of one host share a namespace. Between hosts everything goes over the switch, which is a bridge in a namespace of
its own, so that nothing of this machine's network is changed. Only root can make them, on Linux with iproute2.
"""

import contextlib
import ctypes
import fcntl
import os
import secrets
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "host0"
"""The interface of every host."""
RELAY = "delay0"
"""The interface of a host whose packets are held back; see ``relay``."""
TUN_SET, TUN_FLAGS = 0x400454CA, 0x1001
"""``TUNSETIFF`` of Linux, and ``IFF_TUN | IFF_NO_PI``: packets of IP without a header of their own."""
TUN = Path("/dev/net/tun")
READY_SEC = 10.0
REPOSITORY = Path(__file__).resolve().parents[3]
RUNTIME = Path("/run/netns")
NEW_NETWORK, NEW_NAMES, NEW_MOUNTS = 0x40000000, 0x04000000, 0x00020000
"""``CLONE_NEWNET``, ``CLONE_NEWUTS`` and ``CLONE_NEWNS`` of Linux."""
REMOTE = {"openssh-server": "sshd", "pdsh": "pdsh"}
"""Debian package to its command: what DeepSpeed's launcher needs to reach other hosts."""
SSHD = """\
Port 22
ListenAddress {address}
HostKey {folder}/key
PidFile {folder}/{name}.pid
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
SetEnv GLOO_SOCKET_IFNAME={interface} DS_ACCELERATOR=cpu
"""
SSH = """\
#!/bin/sh
exec {ssh} -i {folder}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "$@"
"""


class NoHosts(RuntimeError):
    """This machine or this user cannot make hosts, or do to them what was asked; the message says why."""


@dataclass(frozen=True)
class Hosts:
    """Hosts in network namespaces; the first is number 0."""

    name: str
    """Unique on this machine; that of a host is ``NAME-NUMBER``."""
    count: int
    names: Path = Path()
    """The file that is ``/etc/hosts`` on every host."""

    def host(self, number: int) -> str:
        """The name of a host, which is its namespace's, too."""
        return f"{self.name}-{number}"

    def address(self, number: int) -> str:
        """The address of a host."""
        return f"10.77.0.{number + 1}"

    def variables(self) -> dict[str, str]:
        """Environment variables that a process on any host needs."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DSGPT_")}
        return kept | {"GLOO_SOCKET_IFNAME": INTERFACE, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

    def start(
        self, number: int, *words: object, log: Path, cwd: Path = REPOSITORY, variables: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a command on a host, in a session of its own; what it prints is appended to ``log``."""
        named = f'hostname {self.host(number)} && mount --bind {self.names} /etc/hosts && exec "$@"'
        inside = ["ip", "netns", "exec", self.host(number), "unshare", "--uts", "sh", "-c", named, "host"]
        with log.open("ab") as file:
            return subprocess.Popen(
                [*inside, *map(str, words)], cwd=cwd, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env=self.variables() | dict(variables or {}), start_new_session=True,
            )  # fmt: skip

    def processes(self, number: int) -> list[int]:
        """The ids of the processes on a host."""
        return [int(word) for word in run("ip", "netns", "pids", self.host(number)).split()]

    def unplug(self, number: int) -> None:
        """Cut a host off: what is sent to it is lost without an answer, as when its power fails."""
        run("ip", "-n", self.host(number), "link", "set", INTERFACE, "down")

    def plug(self, number: int) -> None:
        """Connect a host again."""
        run("ip", "-n", self.host(number), "link", "set", INTERFACE, "up")

    def shape(
        self, number: int, *, mbit: float | None = None, loss: float = 0.0, delay_ms: float = 0.0
    ) -> dict[str, str]:
        """Make the link between a host and the switch slow, in both directions, or lossy; another call changes it.

        Args:
            number: of the host.
            mbit: Megabits a second; None for no limit.
            loss: the share of packets that do not arrive at the host.
            delay_ms: added to the time that a packet from the host takes.

        Returns:
            What does it, by the name of the argument: ``{"mbit": "tc tbf", "loss": "iptables statistic"}``.

        Raises:
            NoHosts: this machine lacks what it needs: iptables for losses, a TUN device for delays.
        """
        host, used = self.host(number), {}
        for namespace, link in ((host, INTERFACE), (f"{self.name}-switch", f"port{number}")):
            tc = ["tc", "-n", namespace, "qdisc"]
            subprocess.run([*tc, "delete", "dev", link, "root"], capture_output=True, check=False)  # there may be none
            if mbit:
                burst = str(max(16_000, int(mbit * 125)))  # bytes of 1 ms, and at least ten packets
                run(*tc, "add", "dev", link, "root", "tbf", "rate", f"{mbit}mbit", "burst", burst, "latency", "400ms")
                used["mbit"] = "tc tbf"
        self.end_relay(number)
        if delay_ms:  # netem would do it, but few kernels of containers have it
            words = [sys.executable, __file__, self.address(number), str(delay_ms / 1e3)]
            relay = subprocess.Popen(["ip", "netns", "exec", host, *words], stderr=subprocess.PIPE, text=True)
            end = time.monotonic() + READY_SEC
            while RELAY not in run("ip", "-n", host, "route"):
                if relay.poll() is not None or time.monotonic() > end:
                    relay.kill()
                    last = relay.communicate()[1].strip().rpartition("\n")[2]
                    raise NoHosts(f"delays need a TUN device: {last}")
                time.sleep(0.01)
            used["delay_ms"] = "TUN relay"
        iptables = ["ip", "netns", "exec", host, "iptables", "--wait"]
        if shutil.which("iptables"):
            run(*iptables, "--flush")
        elif loss:
            raise NoHosts("lost packets need iptables")
        if loss:
            chance = ["statistic", "--mode", "random", "--probability", loss]
            run(*iptables, "--append", "INPUT", "--in-interface", INTERFACE, "--match", *chance, "--jump", "DROP")
            used["loss"] = "iptables statistic"
        return used

    def end_relay(self, number: int) -> None:
        """Without its interface, the relay ends by itself."""
        subprocess.run(["ip", "-n", self.host(number), "link", "delete", RELAY], capture_output=True, check=False)

    @contextlib.contextmanager
    def reached_by_ssh(self, folder: Path) -> Iterator[dict[str, str]]:
        """A real sshd on every host; gives the variables of a process that may log in to all of them.

        Raises:
            NoHosts: there is no sshd, or no pdsh.
        """
        if lacking := [package for package, name in REMOTE.items() if not shutil.which(name)]:
            raise NoHosts(f"needs {', '.join(lacking)}")
        Path("/run/sshd").mkdir(exist_ok=True)
        folder.mkdir()
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
        wrapper = folder / "ssh"
        wrapper.write_text(SSH.format(ssh=shutil.which("ssh"), folder=folder))
        wrapper.chmod(0o755)
        with contextlib.ExitStack() as running:
            for number in range(self.count):
                own, facts = folder / f"{number}.conf", {"address": self.address(number), "interface": INTERFACE}
                own.write_text(SSHD.format(**facts, folder=folder, name=number))
                daemon = self.start(number, shutil.which("sshd"), "-D", "-e", "-f", own, log=folder / "log")
                running.callback(daemon.wait, timeout=30)
                running.callback(daemon.terminate)
            yield {"PATH": f"{folder}:{os.environ['PATH']}"}


@contextlib.contextmanager
def made_hosts(count: int) -> Iterator[Hosts]:
    """``count`` hosts behind one switch. At the end all are removed.

    Raises:
        NoHosts: they cannot be made.
    """
    if os.geteuid() != 0:
        raise NoHosts("only root can make network namespaces")
    if not shutil.which("ip"):
        raise NoHosts("needs iproute2, to make network namespaces")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as made:
        hosts = Hosts(f"dsgpt-{os.getpid()}-{secrets.token_hex(2)}", count, Path(folder) / "hosts")
        lines = [f"{hosts.address(number)} {hosts.host(number)}" for number in range(count)]
        hosts.names.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        switch = f"{hosts.name}-switch"
        for name in (switch, *map(hosts.host, range(count))):
            run("ip", "netns", "add", name)
            made.callback(subprocess.run, ["ip", "netns", "delete", name], check=False)
        run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "switch", "up")
        for number in range(count):
            host, port = hosts.host(number), f"port{number}"
            run("ip", "link", "add", port, "netns", switch, "type", "veth", "peer", "name", INTERFACE, "netns", host)
            run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
            run("ip", "-n", host, "address", "add", f"{hosts.address(number)}/24", "dev", INTERFACE)
            for link in ("lo", INTERFACE):
                run("ip", "-n", host, "link", "set", link, "up")
            made.callback(hosts.end_relay, number)
        yield hosts


def run(*words: object) -> str:
    """Output of a command.

    Raises:
        NoHosts: it failed.
    """
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoHosts(f"this machine refuses `{' '.join(map(str, words))}`: {done.stderr.strip()}")
    return done.stdout


def enter(name: str, names: Path | None = None) -> None:
    """Move this process to the host ``name``, or if it has several threads, this thread.

    Args:
        name: of the host.
        names: a file to be ``/etc/hosts`` there, as ``Hosts.names``; only for a process with one thread.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with (RUNTIME / name).open() as namespace:
        if libc.setns(namespace.fileno(), NEW_NETWORK) or libc.unshare(NEW_NAMES | (NEW_MOUNTS if names else 0)):
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")
    socket.sethostname(name)
    if names:
        run("mount", "--make-rprivate", "/")
        run("mount", "--bind", names, "/etc/hosts")


def be_rank_on(hosts: Hosts, *, per_host: int) -> None:
    """Make this forked rank one of the ``per_host`` of its host."""
    host, local = divmod(int(os.environ["RANK"]), per_host)
    enter(hosts.host(host))
    own = {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_host, "MASTER_ADDR": hosts.address(0)}
    os.environ.update({key: str(value) for key, value in own.items()} | {"GLOO_SOCKET_IFNAME": INTERFACE})


def relay(address: str, delay_sec: float) -> None:
    """Hold back what this host sends to others, until its interface ``RELAY`` is deleted.

    A route leads the packets to others into a TUN device, from which they are read here. After the delay they are sent
    over ``INTERFACE``, to which this socket is bound, so that the route does not lead them here again.

    Args:
        address: of this host.
        delay_sec: of every packet.
    """
    others = ".".join([*address.split(".")[:3], "0/25"])  # the half that has all hosts: before the route of INTERFACE
    held = deque[tuple[float, bytes]]()
    with TUN.open("r+b", buffering=0) as tun, socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as out:
        fcntl.ioctl(tun, TUN_SET, struct.pack("16sH22x", RELAY.encode(), TUN_FLAGS))
        for name in ("all", INTERFACE):  # else the system drops what does not come from where answers go
            if (source_check := Path(f"/proc/sys/net/ipv4/conf/{name}/rp_filter")).read_text() != "0\n":
                source_check.write_text("0")
        out.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, INTERFACE.encode())
        run("ip", "link", "set", RELAY, "txqueuelen", "10000", "up")
        run("ip", "route", "add", others, "dev", RELAY, "src", address)
        while True:
            wait = max(0.0, held[0][0] - time.monotonic()) if held else None
            if select.select([tun], [], [], wait)[0]:
                packet = tun.read(65_536)
                if packet[0] >> 4 == 4:  # the system announces itself by IPv6, too
                    held.append((time.monotonic() + delay_sec, packet))
            while held and held[0][0] <= time.monotonic():
                packet = held.popleft()[1]
                with contextlib.suppress(OSError):  # the host is unplugged
                    out.sendto(packet, (socket.inet_ntoa(packet[16:20]), 0))


if __name__ == "__main__":
    relay(sys.argv[1], float(sys.argv[2]))
