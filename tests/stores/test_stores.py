"""Stores of pages against a model of them: what was kept is found until there is no room; nothing else is."""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jengine.stores.disk import HEAD_BYTES, DiskStore
from jengine.stores.memory import MemoryStore, PageStore

NAMES = [bytes([i]) * 32 for i in range(8)]
SIZES = st.integers(1, 40)


def content(name: bytes, size: int) -> list[bytes]:
    """A page never changes under its name, so its size is the name's."""
    whole = name * (size // 32 + 1)
    return [whole[: size // 2], whole[size // 2 : size]]


class StoreMachine(RuleBasedStateMachine):
    """Pages are used in some order; the oldest without a lease make room."""

    @initialize(
        kind=st.sampled_from(["memory", "disk"]), most=st.integers(0, 120), lease=st.sampled_from([0, 5])
    )
    def start(self, kind, most, lease):
        self.now, self.kind, self.lease = 1.0, kind, lease if kind == "memory" else 0
        self.folder = Path(tempfile.mkdtemp())
        self.head = HEAD_BYTES if kind == "disk" else 0
        self.most = most + 3 * self.head
        self.open()
        self.known: dict[bytes, tuple[bytes, float]] = {}  # the least recently used first; content, lease
        self.sizes: dict[bytes, int] = {}

    def open(self):
        self.store: PageStore = (
            MemoryStore(self.most, self.lease, clock=lambda: self.now)
            if self.kind == "memory"
            else DiskStore(self.folder, self.most)
        )

    @rule(name=st.sampled_from(NAMES), size=SIZES)
    def keep(self, name, size):
        size = self.sizes.setdefault(name, size)
        page = content(name, size)
        room = self.most - self.used
        taken = name in self.known
        gone = list[bytes]()
        if not taken:
            for other, (data, until) in self.known.items():
                if room >= size + self.head:
                    break
                if until <= self.now:
                    gone.append(other)
                    room += len(data) + self.head
            taken = room >= size + self.head
        assert self.store.keep(name, page) == taken
        if taken:
            for other in gone:
                del self.known[other]
            self.known.pop(name, None)
            self.known[name] = b"".join(page), self.now + self.lease

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=4))
    def look(self, names):
        assert self.store.find(names) == [name in self.known for name in names]

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=4))
    def load(self, names):
        for name, page in zip(names, self.store.load(names), strict=True):
            expected, _ = self.known.pop(name, (None, 0.0))
            assert page == expected
            if expected is not None:
                self.known[name] = expected, 0.0

    @precondition(lambda self: self.kind == "disk")
    @rule(name=st.sampled_from(NAMES))
    def drop(self, name):
        self.store.drop(name)
        self.known.pop(name, None)

    @rule(seconds=st.integers(1, 9))
    def time_passes(self, seconds):
        self.now += seconds

    @precondition(lambda self: self.kind == "disk")
    @rule(name=st.sampled_from(NAMES), how=st.sampled_from(["torn", "flipped", "renamed"]))
    def damage(self, name, how):
        path = self.store._path(name)
        if not path.exists():
            return
        data = bytearray(path.read_bytes())
        if how == "torn":
            del data[len(data) // 2 :]
        elif how == "flipped":
            data[-1] ^= 1
        else:  # the page of another name
            data[8:40] = NAMES[0] if name != NAMES[0] else NAMES[1]
        path.write_bytes(data)
        assert [*self.store.load([name])] == [None] and not path.exists()
        self.known.pop(name)

    @precondition(lambda self: self.kind == "disk")
    @rule()
    def restart(self):
        (self.folder / "9-9.new").write_bytes(b"a process ended while it wrote")
        self.open()
        assert [*self.store._sizes] == [*self.known], "the order of use is that of the files' times"

    @property
    def used(self):
        return sum(len(data) + self.head for data, _ in self.known.values())

    @invariant()
    def bounded(self):
        if hasattr(self, "store"):
            assert self.store.used == self.used <= max(self.most, 0)

    def teardown(self):
        if hasattr(self, "folder"):
            self.store.close()
            shutil.rmtree(self.folder)


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestStores = StoreMachine.TestCase


@pytest.mark.full
class TestMoreStores(StoreMachine.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=40, deadline=None)


def test_processes_share_a_folder(tmp_path: Path) -> None:
    one, other = DiskStore(tmp_path / "pages", 10_000), DiskStore(tmp_path / "pages", 10_000)
    assert (tmp_path / "pages").stat().st_mode & 0o777 == 0o700
    one.keep(NAMES[1], [b"page"])
    assert other.find(NAMES[:2]) == [False, True] and [*other.load(NAMES[1:2])] == [b"page"]
    one.drop(NAMES[1])
    assert [*other.load(NAMES[1:2])] == [None] and other.find(NAMES[1:2]) == [False] and other.used == 0
    for name in NAMES:
        one.keep(name, [bytes(900)])
    for _ in range(3):
        for name in NAMES:
            other.keep(name[:31] + b"x", [bytes(900)])
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.page")) <= 10_000 + 1000


def test_what_is_coming_is_waited_for() -> None:
    coming = [True]
    store = MemoryStore(1000, coming=lambda: coming[0])
    found = list[list[bool]]()
    thread = threading.Thread(target=lambda: found.append(store.find(NAMES[:1], 60.0)))
    thread.start()
    store.keep(NAMES[0], [b"page"])
    thread.join()
    assert found == [[True]]
    coming[0] = False
    assert store.find(NAMES[:2], 60.0) == [True, False], "nothing is coming"
    coming[0] = True
    assert store.find(NAMES[:2], 0.01) == [True, False], "the wait is bounded"
