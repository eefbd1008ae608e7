"""An object store in memory that records what is written, and in which a process may die."""

import threading
from collections.abc import Callable
from typing import Any

import tensorstore as ts

from moe_ckpt.objects import ObjectPath
from moe_ckpt.testing.faults import Died


class FaultyStore:
    """A store of tensorstore that lets something go wrong at the ``at``-th request to change it.

    Args:
        at: Counted from 1; 0 counts only.
        dies: If true, that request and every later one raise ``Died`` and do nothing. If false,
            that request alone raises ValueError, as tensorstore does.
        reaches: Whether the request that fails reaches the store all the same, and only its answer
            is lost.
        store: To change; by default a new one.

    Attributes:
        count: Requests so far.
        keys: The key of each.
    """

    def __init__(
        self, at: int = 0, *, dies: bool = False, reaches: bool = False, store: Any = None
    ):
        self.at, self.dies, self.reaches = at, dies, reaches
        context = ts.Context({})
        self.store = (
            ts.KvStore.open("memory://", context=context).result() if store is None else store
        )
        self.count, self.keys = 0, []
        self._lock = threading.Lock()

    def path(self) -> ObjectPath:
        """Return the place of everything in the store."""
        return ObjectPath(self, "", "memory://")

    def contents(self) -> dict[str, bytes]:
        """Return every object."""
        return {key.decode(): self.store[key] for key in self.store.list().result()}

    def write(self, key: str, value: bytes | None, **options: Any) -> Any:
        """Write or delete an object."""
        return self._change(key, lambda: self.store.write(key, value, **options))

    def delete_range(self, keys: Any) -> Any:
        """Delete objects."""
        return self._change(str(keys), lambda: self.store.delete_range(keys))

    def read(self, key: str, **options: Any) -> Any:
        """Read an object."""
        return self.store.read(key, **options)

    def list(self, keys: Any) -> Any:
        """List objects."""
        return self.store.list(keys)

    def _change(self, key: str, work: Callable[[], Any]) -> Any:
        with self._lock:
            self.count += 1
            self.keys.append(key)
            hit = self.count == self.at
            dead = self.dies and self.at and self.count >= self.at
            if not hit and not dead:
                return work()
            if hit and self.reaches:
                work().result()
        if dead:
            raise Died(f"at request {self.count}, {key}")
        raise ValueError(f"UNAVAILABLE: request {self.count}, {key}")
