"""Values by key, the newest within a number of bytes.

Invariant: the sizes of what is there add up to at most `max_bytes`. This module weighs nothing itself.
"""

from __future__ import annotations

from collections import OrderedDict


class Shelf[K, V]:
    """Values by key; the oldest fall off when there are too many bytes of them."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def put(self, key: K, value: V, size: int) -> None:
        """Add or replace a value of `size` bytes. One that is larger than the shelf is not taken."""
        self.pop(key)
        if size > self._max_bytes:
            return
        self._values[key] = value, size
        self._bytes += size
        while self._bytes > self._max_bytes:
            self.pop(next(iter(self._values)))

    def get(self, key: K) -> V | None:
        """The value, left where it is."""
        found = self._values.get(key)
        return found[0] if found else None

    def pop(self, key: K) -> V | None:
        """The value, taken away."""
        found = self._values.pop(key, None)
        if found is None:
            return None
        self._bytes -= found[1]
        return found[0]
