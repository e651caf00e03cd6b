"""Disks after a power cut: what a traced command did to files, and the states that a file system may keep of it.

The model is the weakest of ALICE (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014). Until an fsync
of the file, a disk may lack any part of a write, down to pieces of one page of 4 KiB. It may lack the new size, too. A
size that it has without the data reads as zeros. Until an fsync of the folder, it may lack any name that was made,
renamed or removed there, whatever else it has. One rename is atomic. What an fsync covered stays.
"""

import hashlib
import math
import os
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import compress, product
from pathlib import Path
from typing import Any

PAGE = 4096
_LONGEST = 1 << 22
"""Bytes of one write that a trace holds; a longer one is an error."""
_WRITES = {"write", "pwrite64", "sendfile"}
_NAMED = {"open", "creat", "mkdir", "rename", "unlink", "rmdir", "truncate", "link", "symlink"}
"""Calls with paths; those of others stand beside descriptors."""
_NAMES = {"mkdir", "mkdirat", "rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir"}
_SYNCS = {"fsync", "fdatasync"}
_REFUSED = (
    *("open", "creat", "writev", "pwritev", "pwritev2", "truncate", "fallocate", "copy_file_range", "splice"),
    *("link", "linkat", "symlink", "symlinkat", "sync_file_range"),
)
"""Calls that the model lacks: a trace in which one concerns the folder is refused."""
_CALLS = [*_WRITES, *_NAMES, *_SYNCS, *_REFUSED, "openat", "lseek", "ftruncate", "mmap"]
STRACE = (
    *("strace", "-f", "-y", "-xx", "-s", str(_LONGEST), "-ttt", "-T", "--seccomp-bpf"),
    *("-e", "signal=none", "-e", f"trace={','.join(_CALLS)}", "-o"),
)
"""The command that records another; the file to write comes next. It follows every process, and times are of ends."""
_LINE = re.compile(r"\d+ +(\d+\.\d+) (\w+)\((.*)\) += (\d+)\S* <(\d+\.\d+)>")
_CUT = " <unfinished ...>"

CONSOLE = "console.log"
"""File beside the run folder for what a command prints: it is not on the disk under test."""
Tree = dict[str, bytes | None]
"""Everything in a folder: paths below it, with the contents of a file, or None for a folder."""


def read_tree(folder: Path) -> Tree:
    """What lies in ``folder``."""
    paths = sorted(folder.rglob("*"))
    return {path.relative_to(folder).as_posix(): None if path.is_dir() else path.read_bytes() for path in paths}


def write_tree(tree: Tree, folder: Path) -> None:
    """Put ``tree`` into the empty ``folder``."""
    for name, content in tree.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)


def below(tree: Tree, folder: str) -> Tree:
    """The part of ``tree`` in one of its folders."""
    return {name.removeprefix(f"{folder}/"): each for name, each in tree.items() if name.startswith(f"{folder}/")}


def digest(tree: Tree) -> str:
    """The same for equal trees alone."""
    lines = (f"{name}\0{'' if each is None else hashlib.sha256(each).hexdigest()}" for name, each in tree.items())
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


@dataclass(kw_only=True, eq=False)
class Change:
    """A change that a disk has whole or not at all; of a folder's names, of a file's size, or of bytes in one page."""

    inode: int
    """Of the folder or the file, whose fsync makes the change durable."""
    done: float
    """Time at which the call returned."""
    durable: float = math.inf
    """Time from which every disk has it."""
    names: Mapping[str, int | None] = field(default_factory=dict)
    """Inodes that names get; None for one that is removed."""
    size: int | None = None
    cuts: bool = False
    """The file is cut to this size; otherwise it is at least as large."""
    data: bytes = b""
    offset: int = 0


class Disk:
    """Folders, names and files; folder 0 is the outermost."""

    def __init__(self, tree: Tree) -> None:
        self.folders: dict[int, dict[str, int]] = {0: {}}
        self.files: dict[int, bytearray] = {}
        self.sizes: dict[int, int] = {}
        for name, content in sorted(tree.items()):
            parent, last = self.place(name)
            inode = self.new(folder=content is None)
            self.folders[parent][last] = inode
            if content is not None:
                self.files[inode], self.sizes[inode] = bytearray(content), len(content)

    def new(self, *, folder: bool) -> int:
        """A new inode, which no name has yet."""
        inode = len(self.folders) + len(self.files)
        if folder:
            self.folders[inode] = {}
        else:
            self.files[inode], self.sizes[inode] = bytearray(), 0
        return inode

    def place(self, path: str) -> tuple[int, str]:
        """The inode of the folder of ``path``, and the name in it."""
        *parents, name = path.split("/")
        folder = 0
        for parent in parents:
            folder = self.folders[folder][parent]
        return folder, name

    def apply(self, change: Change) -> None:
        """Make ``change``."""
        if change.names:
            names = self.folders.setdefault(change.inode, {})
            for name, inode in change.names.items():
                names.pop(name, None)
                if inode is not None:
                    names[name] = inode
            return
        content = self.files.setdefault(change.inode, bytearray())
        if change.size is not None:
            self.sizes[change.inode] = change.size if change.cuts else max(change.size, self.sizes.get(change.inode, 0))
            del content[change.size if change.cuts else len(content) :]
        end = change.offset + len(change.data)
        content.extend(bytes(max(0, end - len(content))))
        content[change.offset : end] = change.data

    def tree(self, inode: int = 0, prefix: str = "") -> Tree:
        """What can be found in a folder by its names."""
        found: Tree = {}
        for name, child in self.folders.get(inode, {}).items():
            if child in self.folders:
                found |= {prefix + name: None} | self.tree(child, f"{prefix}{name}/")
            else:
                size = self.sizes.get(child, 0)
                found[prefix + name] = bytes(self.files.get(child, b"")[:size]).ljust(size, b"\0")
        return found


@dataclass(kw_only=True)
class Trace:
    """What a command did in a folder."""

    before: Tree
    changes: list[Change] = field(default_factory=list)
    """In the order in which they were done."""
    said: list[tuple[float, str]] = field(default_factory=list)
    """When and what it printed."""
    folders: set[int] = field(default_factory=set)
    """Inodes of folders."""

    def start(self) -> Disk:
        """The disk before the first change."""
        disk = Disk(self.before)
        disk.folders = {inode: {} for inode in self.folders} | disk.folders
        return disk


def read_trace(file: Path, *, root: Path, before: Tree) -> Trace:  # noqa: PLR0912 - one for each call
    """What ``file``, which ``STRACE`` wrote, says about the folder ``root``, in which ``before`` was.

    Raises:
        ValueError: a call concerns the folder and is not in the model, or the folder is not what they make of it.
    """
    trace, disk = Trace(before=before), Disk(before)
    offsets: dict[tuple[int, int], int | None] = {}
    """By inode and descriptor; None where each write goes to the end."""
    for call in sorted(_calls(file, root), key=lambda call: float(call[1]) + float(call[5])):
        start, what, words, result = float(call[1]), call[2], call[3], int(call[4], 0)
        done, paths = start + float(call[5]), _paths(what, words, root)
        if not paths or (what == "mmap" and not ("PROT_WRITE" in words and "MAP_SHARED" in words)):
            continue
        if (path := paths[0]) == CONSOLE:
            if what == "write":
                trace.said.append((done, _written(what, words, result).decode(errors="replace")))
            continue
        made = list[Change]()
        folder, name = disk.place(path) if path != "." else (0, "")
        inode = disk.folders[folder].get(name, 0)
        opened = inode, int(words.partition("<")[0]) if words[0].isdigit() else -1
        if what in _NAMES:
            names: dict[str, int | None] = {name: disk.new(folder=True) if what.startswith("mkdir") else None}
            if what.startswith("rename"):
                other, new_name = disk.place(paths[1])
                names[new_name] = inode if other == folder else _unknown(call[0])
            made = [Change(inode=folder, done=done, names=names)]
        elif what == "openat":
            if "O_CREAT" in words and not inode:
                inode = disk.new(folder=False)
                made = [Change(inode=folder, done=done, names={name: inode})]
            elif "O_TRUNC" in words:
                made = [Change(inode=inode, done=done, size=0, cuts=True)]
            offsets[inode, result] = None if "O_APPEND" in words else 0
        elif what == "lseek":
            offsets[opened] = None if offsets.get(opened, 0) is None else result
        elif what in _WRITES:
            data, at = _written(what, words, result), offsets[opened]
            offset = int(words.rpartition(", ")[2]) if what == "pwrite64" else disk.sizes[inode] if at is None else at
            if at is not None and what != "pwrite64":
                offsets[opened] = offset + result
            made = list(_pieces(data, offset, inode=inode, done=done))
        elif what == "ftruncate":
            size = int(words.rpartition(", ")[2])
            made = [Change(inode=inode, done=done, size=size, cuts=size < disk.sizes[inode])]
        elif what in _SYNCS:
            for change in trace.changes:
                if change.inode == inode and change.done <= start:
                    change.durable = min(change.durable, done)
        else:
            _unknown(call[0])
        for change in made:
            disk.apply(change)
        trace.changes += made
    if disk.tree() != {name: content for name, content in read_tree(root).items() if name != CONSOLE}:
        raise ValueError(f"{root} is not what the trace says: the model of a disk lacks a call")
    trace.folders = set(disk.folders)
    return trace


def _calls(file: Path, root: Path) -> Iterator[re.Match[str]]:
    """The calls that name ``root`` and did not fail; strace cuts a line in two if another thread's event comes."""
    mark, begun = "".join(f"\\x{byte:02x}" for byte in str(root).encode()), dict[str, str]()
    for line in file.read_text(encoding="ascii").splitlines():
        thread = line.partition(" ")[0]
        if line.endswith(_CUT):
            begun[thread] = line.removesuffix(_CUT)
            continue
        if rest := re.match(r"\d+ +\S+ <\.\.\. \w+ resumed>", line):
            line = begun.pop(thread) + line[rest.end() :]  # noqa: PLW2901 - the whole line
        if mark in line and not re.search(r"\) += -1 E", line):
            yield _LINE.fullmatch(line) or _unknown(line)


def _unknown(line: str) -> Any:
    raise ValueError(f"the trace has a call that the model of a disk lacks: {line[:300]}")


def _plain(words: str) -> bytes:
    return bytes.fromhex(words.replace("\\x", ""))


def _paths(what: str, words: str, root: Path) -> list[str]:
    """The paths of a call that lie in ``root``, relative to it, in their order."""
    text = r"((?:\\x..)*)"
    if what in _NAMED:
        found = [("", path) for path in re.findall(f'"{text}"', words)]
    elif what.rstrip("2").endswith("at"):
        found = re.findall(rf'<{text}>, "{text}"', words)
    else:
        found = [("", path) for path in re.findall(rf"\d<{text}>", words)]
    joined = (os.path.normpath(Path(*(_plain(part).decode(errors="replace") for part in parts))) for parts in found)
    return [path.relative_to(root).as_posix() for path in map(Path, joined) if path.is_relative_to(root)]


def _written(what: str, words: str, count: int) -> bytes:
    """The bytes that a call wrote."""
    if what == "sendfile":
        source, first = re.findall(r"<((?:\\x..)*)>", words)[1], int(re.findall(r"\[(\d+)\]", words)[0])
        return Path(_plain(source).decode()).read_bytes()[first : first + count]
    text = re.search(r'"((?:\\x..)*)"(?!\.)', words) or _unknown(words)  # dots: it is longer than a trace holds
    return _plain(text[1])[:count]


def _pieces(data: bytes, offset: int, *, inode: int, done: float) -> Iterator[Change]:
    """The new size, and the bytes of each page."""
    yield Change(inode=inode, done=done, size=offset + len(data))
    start = 0
    while start < len(data):
        end = min(len(data), start + PAGE - (offset + start) % PAGE)
        yield Change(inode=inode, done=done, offset=offset + start, data=data[start:end])
        start = end


# The states after a cut of the power.

WAYS = ("data kept", "data lost", "zeros for data", "torn data")
"""What became of data that no fsync covered; torn: of each file another part."""
MANY = 5
"""Names up to which every subset is tried; of more, those that lack one or have one, and as many at random."""


@dataclass(frozen=True, kw_only=True)
class State:
    """A disk after a cut."""

    tree: Tree
    moment: float
    """The cut came just before this time."""
    kind: str
    """What it lacks."""


def states(trace: Trace, *, seed: int, most: int) -> Iterator[State]:
    """Distinct states, those of late cuts first; logs for people do not count.

    A disk keeps any subset of what is not durable yet. So only the moments just before a sync ends are tried, and the
    end: what is lost by an earlier cut is a subset that is lost by a later one.

    Args:
        trace: what was done.
        seed: draws subsets and torn files.
        most: states tried at a moment; of more, some are drawn.
    """
    chance, seen = random.Random(seed), set[str]()
    for moment in sorted({change.durable for change in trace.changes} | {math.inf}, reverse=True):
        done = [change for change in trace.changes if change.done < moment]
        free = [change for change in done if change.durable >= moment]
        names, written = [one for one in free if one.names], defaultdict[int, list[Change]](list)
        for change in free:
            if not change.names:
                written[change.inode].append(change)
        every = list(product(_subsets(names, chance), WAYS if written else WAYS[:1]))
        for kept, way in every if len(every) <= most else chance.sample(every, most):
            data = (change for each in written.values() for change in _kept(each, way, chance))
            lost = set(free).difference(kept, data)
            disk = trace.start()
            for change in done:
                if change not in lost:
                    disk.apply(change)
            tree = disk.tree()
            key = digest({name: content for name, content in tree.items() if not name.endswith(".log")})
            if key not in seen:
                seen.add(key)
                yield State(tree=tree, moment=moment, kind=f"names {'kept' if kept == names else 'undone'}, {way}")


def _subsets(names: list[Change], chance: random.Random) -> list[list[Change]]:
    count = len(names)
    if count <= MANY:
        return [list(compress(names, bits)) for bits in product((1, 0), repeat=count)]
    some = chance.sample(range(count), min(count, 1 << (MANY - 1)))
    every = [names, [], *([one] for one in names), *(names[:at] + names[at + 1 :] for at in some)]
    return every + [[one for one in names if chance.random() < 0.5] for _ in some]


def _kept(changes: list[Change], way: str, chance: random.Random) -> list[Change]:
    """Those of the ``changes`` of one file's contents that the disk has."""
    if way == "torn data":
        way = chance.choice((*WAYS[:3], "begun", "any"))
    if way == "begun":
        return changes[: chance.randrange(len(changes))]
    if way == "any":
        return [change for change in changes if chance.random() < 0.5]
    return {"data kept": changes, "data lost": []}.get(way, [one for one in changes if one.size is not None])
