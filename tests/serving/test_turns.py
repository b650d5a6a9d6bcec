"""Fair turns: clients by the time that their work has taken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jengine.serving.processes import turns as module
from jengine.serving.processes.turns import Turns


def test_the_client_that_took_least_is_next() -> None:
    turns: Turns[int] = Turns()
    for work in range(3):
        turns.put("many", work)
    assert turns.take() == ("many", 0)
    turns.spend("many", 2.0)
    turns.put("one", 7)
    assert len(turns) == 3
    assert turns.take() == ("one", 7)
    turns.spend("one", 0.1)
    turns.put("one", 8)
    assert [turns.take() for _ in range(4)] == [("one", 8), ("many", 1), ("many", 2), None]


def test_among_new_clients_the_newest_is_next() -> None:
    turns: Turns[int] = Turns()
    for client in "abc":
        turns.put(client, 0)
    assert turns.take() == ("c", 0)
    assert turns.take(busy={"b"}) == ("a", 0)


def test_little_work_does_not_count() -> None:
    turns: Turns[int] = Turns()
    for client in "abc":
        turns.put(client, 0)
    assert turns.take() == ("c", 0)
    turns.spend("c", 0.01)
    turns.put("c", 1)
    assert turns.take() == ("c", 1)
    turns.spend("c", 1.0)
    turns.put("c", 2)
    assert turns.take() == ("b", 0)


def test_idle_time_earns_no_credit() -> None:
    turns: Turns[int] = Turns()
    turns.spend("a", 5.0)
    turns.put("a", 0)
    assert turns.take() == ("a", 0)
    turns.spend("a", 1.0)
    turns.put("b", 0)  # begins at 5, where a was when it was served
    turns.put("a", 1)
    assert turns.take() == ("b", 0)
    turns.spend("b", 2.0)
    turns.put("b", 1)
    assert turns.take() == ("a", 1)


def test_what_is_removed_is_not_served() -> None:
    turns: Turns[int] = Turns()
    turns.put("a", 0)
    assert turns.remove("a", 0) and not turns.remove("a", 0) and not turns.remove("b", 0)
    assert turns.take() is None and len(turns) == 0


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from(["put", "take"]), st.floats(0, 3))))
def test_all_work_is_served_once_and_little_is_remembered(events: list[tuple[int, str, float]]) -> None:
    turns: Turns[int] = Turns()
    usual, module.REMEMBERED = module.REMEMBERED, 5
    try:
        given, served = [], []
        for number, (client, what, seconds) in enumerate(events):
            if what == "put":
                new = str(client) not in turns._waiting
                turns.put(str(client), number)
                given.append(number)
                assert not new or len(turns._spent) <= len(turns._waiting) + 5
            elif (taken := turns.take()) is not None:
                served.append(taken[1])
                turns.spend(taken[0], seconds)
        while (taken := turns.take()) is not None:
            served.append(taken[1])
        assert sorted(served) == given
    finally:
        module.REMEMBERED = usual
