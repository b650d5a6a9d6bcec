"""What the busiest of several does, if work comes to them at random: devices with whole experts, of which
each token chooses some, and the cohorts of a pipeline.

All wait for the busiest, so its expectation counts, not the mean. Devices are treated as independent, which
they nearly are.
"""

from __future__ import annotations

import functools
from math import comb, sqrt

import numpy as np

MANY = 512  # tokens from which the excess over the mean grows with their square root


@functools.lru_cache(maxsize=1 << 14)
def most_met(experts: int, chosen: int, devices: int, tokens: int) -> float:
    """Expected number of different experts that the tokens use on the device with the most of them."""
    if not tokens:
        return 0.0
    met = 1 - (1 - chosen / experts) ** tokens
    local = -(-experts // devices)
    each = [comb(local, count) * met**count * (1 - met) ** (local - count) for count in range(local)]
    return _expected_most(np.cumsum(each), devices)


@functools.lru_cache(maxsize=1 << 14)
def most_routed(experts: int, chosen: int, devices: int, tokens: int) -> float:
    """Expected number of (token, expert) pairs on the device with the most of them."""
    mean = tokens * chosen / devices
    if tokens > MANY:
        excess = most_routed(experts, chosen, devices, MANY) - MANY * chosen / devices
        return mean + excess * sqrt(tokens / MANY)
    if not tokens or devices == 1:
        return mean
    local = -(-experts // devices)
    chances = [  # probabilities that a token chooses 0, 1, ... experts of a device
        comb(local, count) * comb(experts - local, chosen - count) / comb(experts, chosen)
        for count in range(min(chosen, local) + 1)
    ]
    size = tokens * (len(chances) - 1) + 1
    all_of = np.fft.irfft(np.fft.rfft(chances, 2 * size) ** tokens, 2 * size)[:size]  # of independent tokens
    return _expected_most(np.minimum(np.cumsum(np.maximum(all_of, 0.0)), 1.0)[:-1], devices)


def most_arrived(mean: float, cohorts: int) -> float:
    """Expected number of arrivals at the cohort with the most of them, if `mean` arrive at all together."""
    if cohorts == 1:
        return mean
    each = mean / cohorts
    counts = np.arange(1, int(each + 10 * sqrt(each)) + 12)
    steps = np.exp(-each + np.cumsum(np.log(each) - np.log(counts)))  # probabilities of 1, 2, ...
    return _expected_most(np.cumsum([np.exp(-each), *steps]), cohorts)


def _expected_most(below: np.ndarray, devices: int) -> float:
    """The expected maximum of so many equal variables. below: probabilities that one is at most 0, 1, ..."""
    return float(np.sum(1 - below**devices))
