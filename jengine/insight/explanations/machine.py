"""Rules about the machine (growing memory, other load, compilers) and about delays of the loop: the host,
masks, callers, compilations, the garbage collector.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import NamedTuple

from jengine.insight.explanations.finding import Finding, Processors, Window, ms, percent, times
from jengine.insight.recording.records import Memory

IDLE = 0.2  # share of time that the device waits for the host
MASKS, AWAY, COLLECTING = 0.15, 0.15, 0.05  # shares of time
STARVED = 0.6  # share of planning time with a processor, below which the machine is to blame
# minimum length of a single pause: in seconds, and as a multiple of a typical step
LONG_PAUSE, PAUSES = 0.05, 10


def host(window: Window) -> Finding | None:
    """The device waits while the host plans, collects and produces text."""
    if not window.enough or window.processor < STARVED or window.compiling:
        return None
    spent, count = window.spent, len(window.steps)
    other = spent["mask"] + window.paused + window.compiled + (0.0 if window.served else spent["away"])
    seconds = window.busy - spent["wait"] - other
    idle = window.busy - window.device - other
    if idle < IDLE * window.busy or seconds < IDLE * window.busy:
        return None
    stages = {
        stage: spent[stage]
        for stage in ("schedule", "pack", "dispatch", "collect", "text", *(["away"] if window.served else []))
    }
    worst = max(stages, key=lambda stage: stages[stage])
    step, device = seconds / count, window.device / count
    if not window.facts.overlap:
        option, change = "overlap", "overlap=True dispatches a step before the previous one is read"
        better = max(step, device)
    elif worst == "text":
        option = "detokenize, stop or the server"
        change = (
            "ask for token ids (detokenize=False) or fewer stop strings; a server makes text in another"
            " process"
        )
        better = max(step - stages["text"] / count, device)
    else:
        option = "max_num_seqs"
        change = (
            "larger batches share a step's fixed cost, where enough requests come; penalties, logprobs and"
            " short prompts cost the host"
        )
        better = _with_larger_batches(window, step, device)
    factor = window.busy / count / better if better > 0.0 else 1.0
    return Finding(
        "host",
        idle / window.busy,
        f"the device waits {percent(idle / window.busy)} of the time for the host, most of all for {worst}",
        {
            "host, a step": ms(step),
            "device, a step": ms(device),
            f"of it {worst}": ms(stages[worst] / count),
            "steps that were done before they were read": percent(
                window.share([s for s in window.steps if not s.waited])
            ),
        },
        option,
        change,
        times(factor),
    )


def _with_larger_batches(window: Window, step: float, device: float) -> float:
    """Seconds to produce a step's number of tokens in steps with twice as many rows."""
    rows = max(int(window.running), 1)
    now, twice = (window.costs.host_seconds(n) for n in (rows, 2 * rows))
    grown = (twice.plan + twice.collect) / max(now.plan + now.collect, 1e-9)
    return max(step * grown, device * window.decoding(2 * rows) / max(window.decoding(rows), 1e-9)) / 2


def masks(window: Window) -> Finding | None:
    """Steps wait for token masks."""
    seconds = window.spent["mask"]
    if not window.enough or seconds < MASKS * window.busy:
        return None
    masked = [step for step in window.steps if step.mask]
    rest = max(window.busy - seconds, window.device)
    return Finding(
        "masks",
        seconds / window.busy,
        f"steps wait {percent(seconds / window.busy)} of the time for token masks",
        {
            "masks, a step that has some": ms(seconds / len(masked)),
            "the slowest": ms(max([step.mask for step in masked])),
            "steps with masks": percent(window.share(masked)),
        },
        "structured_outputs",
        "choices, short regular expressions and schemas without unbounded patterns fill masks faster; so do"
        " fewer such requests at once",
        times(window.busy / rest) + " without them",
    )


def slow_readers(window: Window) -> Finding | None:
    """Callers keep the loop's thread busy, or do not read their outputs."""
    readers = window.trace.readers
    away = window.spent["away"] - window.paused - window.compiled  # both may have happened there
    if readers is not None and readers.waiting:
        return Finding(
            "slow_readers",
            readers.waiting / max(readers.streams, 1),
            f"{readers.waiting} of {readers.streams} streams wait for their clients to read",
            {"the longest wait": f"{readers.longest:.1f} s"},
            "write_timeout",
            "their requests hold places and pages until they are read or time out; a shorter time frees these"
            " sooner",
            f"up to {readers.waiting} sequences for other requests",
        )
    if window.served or not window.enough or away < AWAY * window.busy:
        return None
    return Finding(
        "slow_readers",
        away / window.busy,
        f"the loop is blocked {percent(away / window.busy)} of the time, while callers have its thread or the"
        " interpreter",
        {
            "between two steps": ms(away / len(window.steps)),
            "a step itself": ms((window.busy - away) / len(window.steps)),
        },
        "how outputs are read",
        "do less between two outputs of `stream`, or in another thread; AsyncLLM and the server have a thread"
        " for the loop",
        times(window.busy / (window.busy - away)),
    )


def compilation(window: Window) -> Finding | None:
    """Something was compiled after the warm-up."""
    count = int(window.grown("compiles"))
    if not count:
        return None
    share = min(window.compiled / window.busy, 1.0) if window.busy else 1.0
    return Finding(
        "compilation",
        share,
        f"{count} programs were compiled while the engine ran",
        {"compilations": str(count), "seconds": f"{window.compiled:.2f}"},
        "other JAX code of this process",
        "compile it before the engine starts, or run it elsewhere; if there is none, this is a bug of"
        " jengine: please report it",
        f"steps are up to {ms(window.compiled / count)} shorter, each time",
    )


def garbage_collection(window: Window) -> Finding | None:
    """Python's garbage collector stops the process. It does so more while programs are traced."""
    if not window.enough or window.compiling:
        return None
    begun, ended = window.steps[0].begun, window.steps[-1].ended
    pauses = [pause for pause in window.trace.pauses if begun <= pause.begun <= ended]
    longest, typical = max([pause.seconds for pause in pauses], default=0.0), window.busy / len(window.steps)
    if window.paused < COLLECTING * window.busy and longest < max(LONG_PAUSE, PAUSES * typical):
        return None
    return Finding(
        "garbage_collection",
        min(window.paused / window.busy, 1.0),
        f"Python's garbage collector stops the process {percent(window.paused / window.busy)} of the time",
        {
            "pauses of 1 ms or more": str(len(pauses)),
            "the longest": ms(longest),
            "a step": ms(typical),
            "most objects freed at once": str(max([pause.collected for pause in pauses], default=0)),
        },
        "gc.freeze() and gc.set_threshold()",
        "call gc.freeze() once your objects are there, and raise the thresholds; or make fewer objects in"
        " this process",
        times(window.busy / max(window.busy - window.paused, window.device, 1e-9))
        + f", and no step is {ms(longest)} late",
    )


QUEUED = 0.25  # minimum share of the time that threads could run, for which they have no processor
OTHERS = 0.2  # minimum share of the processors that others use, to be named while programs are compiled
THROTTLED, STOLEN = 0.05, 0.1  # minimum shares of time, and of processors
MOST = 0.9  # largest share that is claimed
NAMED = 0.02  # minimum share of time lost to compilations that have ended
DRIFT = 1.25  # duration of steps relative to usual
HOST = 0.02  # minimum share of time spent planning for its CPU time to be significant
SAMPLES, SECONDS = 8, 15.0  # minimum number of memory samples, and of seconds, for a trend
GROWTH = 16 << 20  # bytes a minute
MIB = 1 << 20


class Cause(NamedTuple):
    """Why the machine is slow, and the share of time that this costs."""

    share: float
    summary: str
    option: str = "what else runs here"


def busy_machine(window: Window) -> Finding | None:
    """Threads do not get a processor, or steps take longer than usual."""
    causes = [*_by_kernel(window), *_by_costs(window)]
    if not causes:
        return None
    share, summary, option = max(causes, key=lambda cause: cause.share)
    return Finding(
        "busy_machine",
        share,
        summary,
        {
            "steps, against their costs": f"{_drift(window):.2f} times",
            "processor time of the loop": percent(window.processor),
            **_figures(window.processors),
        },
        option,
        "other processes and threads use the processors: move them away, or leave them some (cpu_threads, or"
        " one engine fewer)",
        times(1.0 / (1.0 - share)),
    )


def _by_kernel(window: Window) -> Iterator[Cause]:
    """The kernel's counts need no usual duration, which on a busy machine includes its load."""
    used = window.processors
    if used is None:
        return
    number = used.first.processors
    queued = used.loop_queued if window.compiling else used.queued  # threads that compile wait for each other
    if queued >= QUEUED and not _compilers_alone(window):
        yield Cause(
            min(queued, MOST),
            f"the engine's threads wait for a processor {percent(queued)} of the time that they could"
            f" run; other processes use {used.others:.1f} of {number}",
        )
    if (throttled := used.rate("throttled")) >= THROTTLED:
        yield Cause(
            min(throttled, MOST),
            f"the container's quota of processors is used up {percent(throttled)} of the time",
            "the container's limit of processors",
        )
    if (stolen := used.rate("stolen")) >= STOLEN * number:
        yield Cause(min(stolen / number, MOST), f"the hypervisor takes {stolen:.1f} of {number} processors")


def _by_costs(window: Window) -> Iterator[Cause]:
    if not window.enough or _compilers_alone(window):
        return
    drift, spent = _drift(window), window.spent
    starved = window.processor < STARVED and spent["schedule"] >= HOST * window.busy
    if drift < DRIFT and not starved:
        return
    waits = (1.0 - window.processor) * sum(
        [spent[stage] for stage in ("schedule", "pack", "collect", "text")]
    )
    without = window.busy - waits - (1.0 - 1.0 / max(drift, 1.0)) * spent["wait"]
    yield Cause(
        min(1.0 - without / window.busy, MOST),
        f"steps take {drift:.2f} times as long as usual, and the loop has a processor"
        f" {percent(window.processor)} of its time",
    )


def _drift(window: Window) -> float:
    return statistics.median([step.drift for step in window.steps]) if window.steps else 1.0


def _compilers_alone(window: Window) -> bool:
    """Whether programs were compiled, and nothing else explains that threads wait."""
    used = window.processors
    return window.compiling and used is not None and used.others < OTHERS * used.first.processors


def _figures(used: Processors | None) -> dict[str, str]:
    """What the kernel counted."""
    if used is None or not used.known:
        return {}
    figures = {
        "threads of the engine's process, able to run without a processor": percent(used.queued),
        "the loop's thread, likewise": percent(used.loop_queued),
        "processors that other processes use": f"{used.others:.1f} of {used.first.processors}",
        "involuntary switches": f"{used.rate('switches'):,.0f} a second",
    }
    if used.first.pressure >= 0.0:
        figures["some process waits for a processor (pressure)"] = percent(used.rate("pressure"))
    return figures


def compiling(window: Window) -> Finding | None:
    """Programs were still being loaded or compiled."""
    used = window.processors
    if used is None or not used.compiling:
        return None
    last, number = used.last, used.first.processors
    missing = last.programs - last.programs_ready
    waits = max(used.queued, used.loop_queued, 1.0 - window.processor)  # for a processor, or the interpreter
    if not _compilers_alone(window):
        waits *= used.low / max(used.low + used.others, 1e-9)
    share = min(used.compiling * waits, MOST)
    if not missing and share < NAMED:
        return None
    when = "later" if used.left is None else f"in about {used.left:.0f} s" if missing else "from now on"
    return Finding(
        "compiling",
        share,
        f"{last.programs_ready} of {last.programs} programs are ready; the others are loaded or compiled"
        " while steps run, some of them with larger programs than they need"
        if missing
        else f"programs were loaded or compiled {percent(used.compiling)} of this time; now all"
        f" {last.programs} programs are ready",
        {
            "ready in this time": f"{last.programs_ready - used.first.programs_ready} programs",
            "left": f"{missing} programs" + (f", ready {when}" if missing else ""),
            "work of low priority, such as compilers, uses": f"{used.low:.1f} of {number} processors",
            "the loop's thread, able to run without a processor": percent(used.loop_queued),
            "processor time of the loop while it plans": percent(window.processor),
        },
        "nothing, or warm_up",
        "this ends by itself, and programs are saved for the next start; measure after wait_until_compiled,"
        " or start with warm_up=all",
        f"{times(1.0 / (1.0 - share))}, {when}",
    )


def memory_growth(window: Window) -> Finding | None:
    """The process's memory keeps growing."""
    # what compilers take they give back only in part, but once
    compiled = [machine.at for machine in window.trace.machines if machine.programs_ready < machine.programs]
    samples = [memory for memory in window.trace.memories if not compiled or memory.at > compiled[-1]]
    if len(samples) < SAMPLES or samples[-1].at - samples[0].at < SECONDS:
        return None
    late = samples[len(samples) // 4 :]  # without the beginning, which fills caches
    slope = statistics.linear_regression([s.at for s in late], [s.resident for s in late]).slope
    if 60 * slope < max(GROWTH, 0.02 * late[0].resident) or not _steady(late):
        return None
    left = samples[-1].available
    until = f"memory lasts for {left / slope / 60:.0f} minutes more" if left else "memory ends"
    return Finding(
        "memory_growth",
        min(60 * slope / late[-1].resident, 1.0),
        f"the process takes {60 * slope / MIB:.0f} MiB more each minute",
        {
            "resident": (
                f"{late[0].resident / MIB:.0f} to {late[-1].resident / MIB:.0f} MiB in"
                f" {late[-1].at - late[0].at:.0f} s"
            ),
            "available": f"{left / MIB:.0f} MiB" if left else "not known",
        },
        "what this process keeps",
        "the engine's own memory does not grow once it is warm: look for outputs or other objects that are"
        " kept (tracemalloc shows them)",
        until,
    )


def _steady(samples: list[Memory]) -> bool:
    """Whether each third of the samples is larger than the previous one."""
    third = len(samples) // 3
    parts = [samples[:third], samples[third : 2 * third], samples[2 * third :]]
    means = [statistics.fmean([sample.resident for sample in part]) for part in parts]
    return means[0] < means[1] < means[2]
