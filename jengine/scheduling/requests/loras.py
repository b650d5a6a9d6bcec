"""LoRA adapters as the scheduler knows them: loaded ones, their places on the devices, their users."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import count

from jengine.base.errors import InvalidArgument

EMPTY = 0  # in the place of an adapter's number


@dataclass(slots=True, eq=False)
class Lora:
    """A loaded adapter.

    Attributes:
        number: of this loading, from 1; never used again, so it tells apart adapters that had the same name.
        place: on the devices, from 1; 0: none.
        users: unfinished requests.
        running: sequences that run, beams of a search counted once.
        used: when it was loaded, or last got a place or a running sequence; larger is later.
        leaving: whether another adapter needs its place.
        starts_left: number of sequences that may still start with it while it is leaving.
        unloaded: whether no further request may use it.
    """

    name: str
    number: int
    place: int = 0
    users: int = 0
    running: int = 0
    used: int = 0
    leaving: bool = False
    starts_left: int = 0
    unloaded: bool = False


class LoraPlaces:
    """Loaded adapters, and the places of those that steps may use.

    An adapter gets a place when its first sequence starts, and keeps it until another one needs it. The least
    recently used adapter without running sequences makes way. If all have some, the waiting adapter that
    comes first makes one of them leave: as many more of its sequences start as slots were free then, so that
    batches stay full, and its place becomes free when they have ended.

    Args:
        places: on the devices.

    Attributes:
        dropped: numbers of adapters that nothing uses any more, for the engine to take.
    """

    def __init__(self, places: int = 0) -> None:
        self.by_name: dict[str, Lora] = {}
        self.dropped: list[int] = []
        self._on: list[Lora | None] = [None] * places
        self._used: dict[Lora, None] = {}  # by unfinished requests
        self._writes: dict[int, int] = {}  # numbers of adapters by place; EMPTY: none
        self._numbers, self._clock = count(1), count(1)
        self._claims: dict[Lora, Lora] = {}  # waiting adapters, and those that leave for them

    def __iter__(self) -> Iterator[Lora]:
        return iter([*self.by_name.values()])

    @property
    def places(self) -> int:
        return len(self._on)

    # --- loading ------------------------------------------------------------------------------------

    def next_number(self) -> int:
        """A number for an adapter that is about to be loaded. Thread-safe."""
        return next(self._numbers)

    def load(self, name: str, number: int) -> Lora:
        """Requests may use an adapter from now on. It replaces a loaded one of this name."""
        if name in self.by_name:
            self.unload(name)
        self.by_name[name] = Lora(name, number, used=next(self._clock))
        return self.by_name[name]

    def get(self, name: str | None) -> Lora | None:
        """The adapter of a request.

        Raises:
            InvalidArgument: it is not loaded.
        """
        if name is None:
            return None
        if name not in self.by_name:
            raise InvalidArgument("lora_request", name, "no adapter of this name is loaded")
        return self.by_name[name]

    def unload(self, name: str) -> None:
        """No further request may use this adapter. Raises InvalidArgument if it is not loaded."""
        lora = self.get(name)
        assert lora is not None
        del self.by_name[name]
        lora.unloaded = True
        self._drop(lora)

    def idle(self, keep: Collection[str]) -> list[Lora]:
        """The loaded adapters without requests, but none of these names, least recently used first."""
        unused = [lora for lora in self if not lora.users and lora.name not in keep]
        return sorted(unused, key=lambda lora: lora.used)

    # --- requests -----------------------------------------------------------------------------------

    def came(self, lora: Lora | None) -> None:
        """A request that uses it was added."""
        if lora is not None:
            lora.users += 1
            self._used[lora] = None

    def ended(self, lora: Lora | None) -> None:
        """A request that uses it has ended, and does not run."""
        if lora is not None:
            lora.users -= 1
            if not lora.users:
                del self._used[lora]
                self._give_up(lora)
            self._drop(lora)

    def may_start(self, lora: Lora | None, slots: int = 0) -> bool:
        """Whether a sequence with it may start now. If not, another leaves for it, unless one does.

        Args:
            slots: number of free ones.
        """
        if lora is None:
            return True
        if lora.place:
            return not lora.leaving or lora.starts_left > 0
        if self._free() is not None:
            return True
        if lora not in self._claims:
            staying = [claim for claim in self._on if claim is not None and not claim.leaving]
            if staying:
                leaving = min(staying, key=lambda claim: (claim.running, claim.used))
                leaving.leaving, self._claims[lora] = True, leaving
                leaving.starts_left = slots
        return False

    def start(self, lora: Lora | None) -> None:
        """A sequence that uses it starts. The adapter gets a place if it has none."""
        if lora is None:
            return
        if not lora.place:
            place = self._free()
            assert place is not None, "no place is free"
            before = self._on[place - 1]
            if before is not None:
                self._leave(before)
            self._on[place - 1], lora.place = lora, place
            self._writes[place] = lora.number
            self._give_up(lora)
        lora.running += 1
        lora.starts_left -= lora.leaving
        lora.used = next(self._clock)

    def stop(self, lora: Lora | None) -> None:
        """A sequence that uses it does not run any more."""
        if lora is not None:
            lora.running -= 1
            lora.used = next(self._clock)
            if not lora.running:  # for the first that may start; others may wait for images
                lora.leaving = False
                self._claims = {new: old for new, old in self._claims.items() if old is not lora}

    @property
    def highest(self) -> int:
        """The highest place of an adapter that a running sequence uses; 0: there is none."""
        return max((claim.place for claim in self._on if claim is not None and claim.running), default=0)

    @property
    def in_use(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of adapters that running and waiting requests use, each sorted. Thread-safe."""
        used = [*self._used]
        running = {claim.name for claim in used if claim.running}
        waiting = {claim.name for claim in used if claim.users > claim.running}
        return tuple(sorted(running)), tuple(sorted(waiting))

    def take_writes(self) -> list[tuple[int, int]]:
        """(number, place) of the adapters to write before the next step. EMPTY: the place is zeroed."""
        writes, self._writes = self._writes, {}
        return [(number, place) for place, number in writes.items()]

    def check_integrity(self) -> None:
        """Raises AssertionError unless places and adapters agree."""
        for place, lora in enumerate(self._on, 1):
            assert lora is None or lora.place == place, "two adapters have one place"
        for lora in self.by_name.values():
            assert not lora.place or self._on[lora.place - 1] is lora, "an adapter lost its place"
            assert lora.place or not lora.running, "an adapter runs without a place"
            assert lora.users >= lora.running >= 0, "more sequences run than there are"
            assert lora.running or not lora.leaving, "an adapter leaves a place that is free"
        assert len({id(claim) for claim in self._claims.values()}) == len(self._claims)

    def _free(self) -> int | None:
        """A place that no running sequence uses: an empty one, or that of the least recently used adapter."""
        for place, lora in enumerate(self._on, 1):
            if lora is None:
                return place
        idle = [lora for lora in self._on if lora is not None and not lora.running]
        return min(idle, key=lambda claim: claim.used).place if idle else None

    def _give_up(self, lora: Lora) -> None:
        """Drop the claim of an adapter that needs no place any more, so that no other leaves for it."""
        other = self._claims.pop(lora, None)
        if other is not None:
            other.leaving = False

    def _leave(self, lora: Lora) -> None:
        self._on[lora.place - 1] = None
        lora.place = 0

    def _drop(self, lora: Lora) -> None:
        """Frees its place if it was unloaded and has no requests."""
        if not lora.unloaded or lora.users:
            return
        if lora.place:
            self._writes[lora.place] = EMPTY
            self._leave(lora)
        self.dropped.append(lora.number)
