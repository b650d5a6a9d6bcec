"""Workloads: prompts, output lengths, and arrival times."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jengine.base.errors import InvalidArgument
from jengine.capacity.simulation.trace import read_trace

VOCABULARY = 100, 500  # ids that nearly every model has, and that are rarely special tokens
SHORTEST, LONGEST = 4, 1024  # minimum and maximum tokens of ShareGPT prompts, as in vLLM


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A request.

    Attributes:
        prompt: token ids, or text.
        output: tokens to generate.
        at: seconds from the beginning at which it is due; None: as soon as max_concurrency allows.
    """

    prompt: list[int] | str
    output: int
    at: float | None = None


def random_requests(
    count: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    seed: int = 0,
) -> list[BenchRequest]:
    """Random token ids.

    Args:
        input_len, output_len: mean numbers of tokens. All prompts also begin with prefix_len common tokens.
        range_ratio: lengths are uniform between 1 - range_ratio and 1 + range_ratio times the mean.

    Raises:
        InvalidArgument: a length or the ratio is out of range.
    """
    if not 0.0 <= range_ratio < 1.0:
        raise InvalidArgument("random_range_ratio", range_ratio, "must be in [0, 1)")
    for name, length, least in (
        ("input_len", input_len, 1),
        ("output_len", output_len, 1),
        ("random_prefix_len", prefix_len, 0),
    ):
        if length < least:
            raise InvalidArgument(name, length, f"must be at least {least}")
    rng = np.random.default_rng(seed)

    def lengths(mean: int) -> list[int]:
        low, high = max(int(mean * (1 - range_ratio)), 1), max(round(mean * (1 + range_ratio)), 1)
        return [int(length) for length in rng.integers(low, high + 1, count)]

    prefix = rng.integers(*VOCABULARY, prefix_len).tolist()
    sizes = zip(lengths(input_len), lengths(output_len), strict=True)
    return [BenchRequest(prefix + rng.integers(*VOCABULARY, size).tolist(), output) for size, output in sizes]


def sharegpt_turns(path: Path, count: int, seed: int = 0) -> list[tuple[str, str]]:
    """First turns of a ShareGPT file's conversations, in random order; enough to choose `count` from.

    Raises:
        InvalidArgument: the file cannot be read, or is not a ShareGPT file.
    """
    try:
        conversations = [entry["conversations"] for entry in json.loads(path.read_bytes())]
        turns = [(str(turn[0]["value"]), str(turn[1]["value"])) for turn in conversations if len(turn) >= 2]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument("dataset_path", str(path), f"must be a ShareGPT file: {error!r}") from None
    return [turns[place] for place in np.random.default_rng(seed).permutation(len(turns))[: 4 * count]]


def sharegpt_requests(
    turns: list[tuple[str, str]], count: int, tokens: Callable[[str], int], output_len: int | None = None
) -> list[BenchRequest]:
    """The conversations of `sharegpt_turns` whose prompts have SHORTEST to LONGEST tokens, repeated if there
    are too few.

    Args:
        tokens: returns the number of tokens of a text.
        output_len: output length of all requests; None: as in the file.

    Raises:
        InvalidArgument: no conversation is suitable.
    """
    requests = []
    for prompt, answer in turns:
        output = tokens(answer) if output_len is None else output_len
        if SHORTEST <= tokens(prompt) <= LONGEST and output >= (SHORTEST if output_len is None else 1):
            requests.append(BenchRequest(prompt, output))
    if not requests:
        raise InvalidArgument(
            "dataset_path",
            "no conversation",
            f"must have some whose prompts have {SHORTEST} to {LONGEST} tokens",
        )
    return [requests[i % len(requests)] for i in range(count)]


def trace_requests(path: Path, count: int, seed: int = 0) -> list[BenchRequest]:
    """The first `count` requests of a trace (see `jengine simulate`), with its arrivals and lengths, and
    random token ids.

    Raises:
        InvalidArgument: as read_trace.
    """
    trace, rng = read_trace(path), np.random.default_rng(seed)
    rows = list(zip(trace.arrivals.tolist(), trace.prompts.tolist(), trace.outputs.tolist(), strict=True))[
        :count
    ]
    return [
        BenchRequest(rng.integers(*VOCABULARY, prompt).tolist(), output, at) for at, prompt, output in rows
    ]


def with_arrivals(
    requests: list[BenchRequest], rate: float, burstiness: float = 1.0, seed: int = 0
) -> list[BenchRequest]:
    """Copies of the requests with random arrival times.

    Args:
        rate: requests a second; inf: all at once.
        burstiness: shape of the gamma distribution of intervals: 1 is Poisson; less is burstier, more is more
            even.

    Raises:
        InvalidArgument: a value is not above 0.
    """
    for name, value in (("request_rate", rate), ("burstiness", burstiness)):
        if not value > 0.0:
            raise InvalidArgument(name, value, "must be above 0")
    if rate == float("inf"):
        return [BenchRequest(request.prompt, request.output) for request in requests]
    pauses = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), len(requests))
    return [
        BenchRequest(request.prompt, request.output, float(at))
        for request, at in zip(requests, np.cumsum(pauses) - pauses[:1].sum(), strict=True)
    ]
