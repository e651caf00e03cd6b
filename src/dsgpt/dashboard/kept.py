"""Large things in memory, shared by all sessions: a few of them, the ones used last. Imports no Streamlit."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Place(Generic[T]):
    lock: Lock = field(default_factory=Lock)
    found: T | None = None


class Kept(Generic[T]):
    """What ``get`` has made, by key. Two sessions that ask for one key at once make it once.

    Args:
        most: how many are kept. One that a session still uses stays in memory until that session lets go of it.
    """

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, Lock()
        self._places: OrderedDict[Hashable, _Place[T]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What belongs to ``key``, made by ``make`` if it is not kept; what ``make`` raises is not kept."""
        with self._lock:
            place = self._places.setdefault(key, _Place())
        with place.lock:
            if place.found is None:
                try:
                    place.found = make()
                except BaseException:
                    self._forget(key)
                    raise
            found = place.found
        with self._lock:
            self._places[key] = place
            self._places.move_to_end(key)
            while len(self._places) > self._most:
                self._places.popitem(last=False)
        return found

    def _forget(self, key: Hashable) -> None:
        with self._lock:
            self._places.pop(key, None)

    def __len__(self) -> int:
        return len(self._places)
