"""The report is one self-contained page with the findings first."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from jengine import InvalidArgument
from jengine.insight.profiling.data import Flame, Profile, ProfileOptions
from jengine.insight.profiling.device_trace import DeviceGap, DeviceTimes, device_times, operations_of
from jengine.insight.profiling.report import report_html, summary
from tests.profiling.profiles import process, stepping
from tests.profiling.test_findings import HELD, LEAK, LOG, STORM

VOID = {"meta", "br", "tr", "td", "th", "li", "p"}


class Page(HTMLParser):
    """A page's text and tooltips, links and unclosed tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attributes if name in ("href", "src", "xlink:href")]
        self.words += " ".join(value or "" for name, value in attributes if name == "title") + " "
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words += data + " "


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> Profile:
    virtual = stepping(monkeypatch, 0.3)
    end = virtual.clock.now
    engine = process(
        trace=virtual.engine.trace().to_json(),
        ended=end,
        collections=STORM,
        lock_waits=HELD,
        calls=LOG,
        growth=LEAK,
        heap_seconds=5.0,
        memory={"weights": 7 << 20, "<other>": 1 << 20},
        flames=[
            Flame("loop", {"main (a.py:1);<lambda> (a.py:2)": 70, "main (a.py:1);f (b.py:1)": 30}),
            Flame("unseen", {}),
        ],
        operations=[("dot", 3, 0.5)],
        missing={"jax.profiler": "this machine has <none>"},
    )
    return Profile(target="demo at 127.0.0.1:50051", processes=[engine, process(name="server", pid=8)])


def test_the_page(profile: Profile) -> None:
    text = report_html(profile, "profile.jax.zip")
    page = Page(text)
    assert (
        page.open == []
        and page.links == ["profile.jax.zip"]
        and not re.search(r"https?://|@import|<script|url\(", text)
    )
    assert (
        page.words.index("Findings") < page.words.index("garbage_collection") < page.words.index("Time line")
    )
    for word in (
        "lock",
        "system_calls",
        "heap_growth",
        "self._lock",
        "holder, in hold (app.py:20)",
        "this machine has <none>",
        "Slow steps",
    ):
        assert word in page.words, word
    assert (
        "<lambda> (a.py:2): 70.0 %, 70 samples" in page.words
        and "<other>" in page.words
        and "step 100" in page.words
    )
    assert "server, process 8" in page.words


def test_a_healthy_one() -> None:
    healthy = Profile(target="demo", processes=[process()])
    assert "None: none of the measurements" in report_html(healthy) and "No findings" in summary(healthy)


def test_it_crosses_processes(profile: Profile) -> None:
    assert Profile.from_json(profile.to_json()) == profile
    with pytest.raises(InvalidArgument, match="is not a profile of this version"):
        Profile.from_json(b"{}")


@pytest.mark.parametrize(
    "field, value",
    [
        ("seconds", 0.0),
        ("seconds", float("nan")),
        ("seconds", 1e9),
        ("system_calls", "dtrace"),
        ("rate", 0),
        ("rate", 10**6),
    ],
)
def test_options_out_of_range(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=rf"^{field}="):
        ProfileOptions(**{field: value})  # type: ignore[arg-type]


def test_operations_of_jax() -> None:
    events = [
        {"ph": "X", "name": "dot", "dur": 1000.0},
        {"ph": "X", "name": "dot", "dur": 500.0},
        {"ph": "M", "name": "process_name"},
    ]
    trace = {"traceEvents": [*events, {"ph": "X", "name": "add", "dur": 1.0}]}
    assert operations_of(trace) == [
        ("dot", 2, pytest.approx(0.0015)),
        ("add", 1, pytest.approx(1e-6)),
    ]
    assert device_times(trace) == [] == device_times({})


GPU_LANES = [
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}},
    {"ph": "M", "name": "process_name", "pid": 9, "args": {"name": "/host:CPU"}},
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 7, "args": {"name": "Stream #7(Compute)"}},
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 8, "args": {"name": "Stream #8(MemcpyD2H)"}},
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "XLA Ops"}},
    {"ph": "M", "name": "thread_name", "pid": 9, "tid": 7, "args": {"name": "python"}},
]


def on_gpu(name: str, start: float, end: float, lane: int = 7) -> dict[str, object]:
    return {"ph": "X", "pid": 1, "tid": lane, "name": name, "ts": start, "dur": end - start}


def test_times_of_a_gpu() -> None:
    """Lanes that repeat kernels by operation count once; overlapping copies are hidden behind kernels."""
    trace = {
        "traceEvents": [
            *GPU_LANES,
            on_gpu("dot", 1000, 1400),
            on_gpu("fusion", 1000, 1400, lane=2),
            on_gpu("add", 1410, 1500),
            on_gpu("MemcpyD2H", 1450, 1600, lane=8),
            on_gpu("dot", 1900, 2000),
            {"ph": "X", "pid": 9, "tid": 7, "name": "call", "ts": 0, "dur": 5000.0},
        ]
    }
    (times,) = device_times(trace)
    assert times == DeviceTimes(
        "GPU:0",
        *[pytest.approx(1e-6 * us) for us in (1000, 590, 100, 10, 300)],
        3,
        [DeviceGap("MemcpyD2H", "dot", 1, pytest.approx(3e-4))],
    )
    assert operations_of(trace) == [
        ("dot", 2, pytest.approx(5e-4)),
        ("MemcpyD2H", 1, pytest.approx(1.5e-4)),
        ("add", 1, pytest.approx(9e-5)),
    ]
    page = report_html(
        Profile(target="demo", processes=[process(device_times=[times], operations=[("dot", 2, 5e-4)])])
    )
    assert "3 kernels in 1 ms" in page and "idle for longer<td>300 us<td>30%" in page
