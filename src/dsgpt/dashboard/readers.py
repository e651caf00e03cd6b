"""Records and steps, read once for all sessions: each result is kept by the identity of the file that it came from."""

from dataclasses import dataclass
from pathlib import Path

import streamlit as st

from dsgpt.dashboard.folders import Contents, contents


@dataclass(frozen=True)
class Identity:
    """A version of a file: another one has another identity."""

    path: str
    device: int
    inode: int
    modified_ns: int
    size: int


def identity(path: Path) -> Identity:
    """The identity of a file.

    Raises:
        OSError: there is none.
    """
    found = path.stat()
    return Identity(str(path), found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)


@st.cache_data(ttl=1.0, max_entries=8, show_spinner=False)
def contents_of(folder: Path) -> Contents:
    """What lies in ``folder``, at most a second old."""
    return contents(folder)
