"""Fair turns for slow work, counted in seconds: grammars that are checked or compiled, templates that are
rendered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

# seconds; smaller differences do not count, so a client with little work stays ahead of new ones
QUANTUM = 0.25
# idle clients whose time is kept; beyond that, the half with the least time is forgotten
REMEMBERED = 4096


class Turns[T]:
    """Waiting work by client. The client whose work has taken the least time is next.

    A client with nothing waiting starts at the time of the client that was served last, so idle time earns no
    credit. Among equals the newest is first: when many clients come at once, most of those that have waited
    long have given up or are one attacker with many addresses, and a client that asks for little is served
    next.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}  # the newest client last
        self._spent: dict[str, float] = {}  # seconds
        self._now = 0.0  # seconds of the client that was served last, before that turn

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, client: str, work: T) -> None:
        if client not in self._waiting:
            self._waiting[client] = deque()
            self._spent[client] = max(self._spent.get(client, 0.0), self._now)
            self._forget()
        self._waiting[client].append(work)

    def take(self, busy: Collection[str] = ()) -> tuple[str, T] | None:
        """Removes and returns the next client and its oldest work; None if there is none. Skips clients in
        `busy`.
        """
        ready = [client for client in reversed(self._waiting) if client not in busy]
        if not ready:
            return None
        client = min(ready, key=lambda client: self._spent[client] // QUANTUM)
        self._now = max(self._now, self._spent[client])
        work = self._waiting[client].popleft()
        self._drop_if_empty(client)
        return client, work

    def remove(self, client: str, work: T) -> bool:
        """Removes work that is no longer wanted. Returns whether it was waiting."""
        if work not in self._waiting.get(client, ()):
            return False
        self._waiting[client].remove(work)
        self._drop_if_empty(client)
        return True

    def spend(self, client: str, seconds: float) -> None:
        """Counts the time that a client's work has taken."""
        self._spent[client] = self._spent.get(client, self._now) + seconds

    def _drop_if_empty(self, client: str) -> None:
        if not self._waiting[client]:
            del self._waiting[client]

    def _forget(self) -> None:
        if len(self._spent) - len(self._waiting) > REMEMBERED:
            idle = sorted(self._spent.keys() - self._waiting.keys(), key=lambda client: self._spent[client])
            for client in idle[: -REMEMBERED // 2]:
                del self._spent[client]
