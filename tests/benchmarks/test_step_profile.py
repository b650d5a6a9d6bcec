"""How a profile's times are divided among operations."""

from __future__ import annotations

from benchmarks.step_profile import innermost, union


def test_what_is_nested_counts_once_and_for_itself() -> None:
    events = [
        ("dot", 0.0, 100.0),
        ("add", 10.0, 20.0),
        ("loop", 30.0, 60.0),
        ("mul", 35.0, 40.0),
        ("end", 100.0, 110.0),
    ]
    spans = innermost(events)
    times = {name: sum(end - begin for found, begin, end in spans if found == name) for name, _, _ in events}
    assert times == {"dot": 60.0, "add": 10.0, "loop": 25.0, "mul": 5.0, "end": 10.0}
    assert union([(begin, end) for _, begin, end in spans]) == 110e-9


def test_of_several_threads_time_counts_once() -> None:
    assert union([(0, 50), (20, 70), (90, 100)]) == 80e-9
