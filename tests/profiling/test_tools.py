"""Parsing of tools' output."""

from __future__ import annotations

import pytest

from jengine.insight.profiling.counters import parse_stat
from jengine.insight.profiling.jax_capture import longest_operations
from jengine.insight.profiling.py_spy import parse_raw
from jengine.insight.profiling.system_calls import parse_perf, parse_strace

PERF = """\
     5.640 (12.077 ms): python/13686 write(fd: 3</tmp/log>, buf: 0x7f76dc000ba0, count: 81)          = 81
  1728.387 (80.044 ms): python/13691 clock_nanosleep(which_clock: 1, flags: 1, rqtp: 0x7f76e3a9fc60) = 0
  1810.001 ( 3.044 ms): python/13691 poll(timeout_msecs: 3)                                         = 0
   113.600 (         ): sleep/2259 exit_group()                                                      = ?

 Summary of events:

 python (13686), 25963 events, 98.5%

   syscall            calls  errors  total       min       avg       max       stddev
                                     (msec)    (msec)    (msec)    (msec)        (%)
   --------------- --------  ------ -------- --------- --------- ---------     ------
   write              12800      0   424.902     0.013     0.033    12.077      6.88%
   fsync                 63      0   183.309     0.440     2.910     8.319      7.42%

 python (13691), 140 events, 0.5%

   futex                 35      0     1.010     0.013     0.029     0.331     31.00%
"""
STRACE = """\
14019 1795356694.090646 clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, {tv_sec=60058},  <unfinished ...>
14018 1795356694.100474 write(3, ""..., 81) = 81 <0.000016>
14018 1795356694.100530 write(3, ""..., 81) = 81 <0.002000>
14019 1795356694.190646 <... clock_nanosleep resumed>NULL) = 0 <0.100000>
14019 1795356694.290646 fsync(3 <unfinished ...>
14018 1795356694.290700 write(3, ""..., 81) = 81 <0.000001>
14019 1795356694.300646 <... fsync resumed>) = 0 <0.010000>
14018 1795356694.200000 +++ exited with 0 +++
"""


def test_perf_trace() -> None:
    counts, slow = parse_perf(PERF)
    assert counts == [
        (13686, "write", 12800, pytest.approx(0.424902)),
        (13686, "fsync", 63, pytest.approx(0.183309)),
        (13691, "futex", 35, pytest.approx(0.00101)),
    ]
    assert slow == [
        (pytest.approx(0.00564), pytest.approx(0.012077), 13686, "write"),
        (pytest.approx(1.810001), pytest.approx(0.003044), 13691, "poll"),
    ]


def test_strace() -> None:
    """A call interrupted by other lines is identified by its end. Calls that only wait are counted, but not
    listed.
    """
    counts, slow = parse_strace(STRACE)
    assert sorted(counts) == [
        (14018, "write", 3, pytest.approx(0.002017)),
        (14019, "clock_nanosleep", 1, pytest.approx(0.1)),
        (14019, "fsync", 1, pytest.approx(0.01)),
    ]
    assert [(thread, name) for _, _, thread, name in slow] == [(14018, "write"), (14019, "fsync")]
    assert slow[1][0] == pytest.approx(1795356694.290646, abs=1e-5)


STAT = """\
# started

0.57,msec,task-clock:u,571007,100.00,0.474,CPUs utilized
49,,page-faults,571007,100.00,85.813,K/sec
<not supported>,,cycles,0,100.00,,
"""
RAW = """\
thread (0x7F12): "MainThread";main (a b.py:3);wait (c.py:9) 12
thread (13): holder;hold (d.py:1) 3
nonsense
process 12:"python" 4
"""


def test_perf_stat() -> None:
    assert parse_stat(STAT) == {"task-clock": 0.57, "page-faults": 49.0}


def test_py_spy() -> None:
    flames = {flame.thread: flame.stacks for flame in parse_raw(RAW)}
    assert flames == {"MainThread": {"main (a b.py:3);wait (c.py:9)": 12}, "holder": {"hold (d.py:1)": 3}}


def test_operations_of_jax() -> None:
    events = [
        {"ph": "X", "name": "dot", "dur": 1000.0},
        {"ph": "X", "name": "dot", "dur": 500.0},
        {"ph": "M", "name": "process_name"},
    ]
    assert longest_operations({"traceEvents": [*events, {"ph": "X", "name": "add", "dur": 1.0}]}) == [
        ("dot", 2, pytest.approx(0.0015)),
        ("add", 1, pytest.approx(1e-6)),
    ]
