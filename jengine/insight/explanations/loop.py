"""Rules about delays of the loop: the host, masks, callers, compilations, the garbage collector."""

from __future__ import annotations

from jengine.insight.explanations.finding import Finding, Window, ms, percent, times

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
