"""System calls on files by thread: reads and writes that the kernel counts, and times estimated from
samples."""

from __future__ import annotations

from collections import defaultdict

from jengine.insight.profiling.data import CallCount, ProcessProfile
from jengine.insight.profiling.proc import input_output, thread_ids
from jengine.insight.profiling.sampler import ThreadSampler


def kernel_counts() -> dict[int, dict[str, int]]:
    """Reads and writes so far, by the system's id of each thread of this process."""
    return {thread: input_output(thread) for thread in thread_ids()}


def add_calls(profile: ProcessProfile, sampler: ThreadSampler, before: dict[int, dict[str, int]]) -> None:
    """Adds the calls since `before`, an earlier result of `kernel_counts`, to the profile."""
    threads, frames = sampler.names(), _usual_frames(sampler)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for (thread, name, _), count in sampler.calls.items():
        seconds[thread, name] += count * sampler.interval
    for number, now in kernel_counts().items():
        if number in sampler.own:
            continue
        if not now:
            profile.missing["counts of system calls"] = "/proc/self/task/*/io is missing"
        thread = threads.get(number, f"thread {number}")
        for key, name in (("syscr", "read"), ("syscw", "write")):
            if count := now.get(key, 0) - before.get(number, {}).get(key, 0):
                where, spent = frames.get((thread, name), ""), seconds.pop((thread, name), 0.0)
                profile.calls.append(CallCount(thread, name, count, spent, where))
    profile.calls += [CallCount(*key, -1, spent, frames.get(key, "")) for key, spent in seconds.items()]
    if sampler.knows_calls:
        profile.slow_calls += sampler.slow_calls
    else:
        profile.missing["slow system calls"] = "/proc/self/task/*/syscall cannot be read"


def _usual_frames(sampler: ThreadSampler) -> dict[tuple[str, str], str]:
    """For each thread and call on files, the frame in most of its samples."""
    samples = [*reversed(sampler.calls_at.most_common()), *reversed(sampler.calls.most_common())]
    return {(thread, call): where for (thread, call, where), _ in samples}
