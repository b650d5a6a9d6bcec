"""The busiest of several devices with whole experts, compared with random choices."""

from __future__ import annotations

import numpy as np
import pytest

from jengine.capacity.planning.roofline import MANY, most_arrived, most_met, most_routed


@pytest.mark.parametrize(
    ("experts", "chosen", "devices", "tokens"),
    [(256, 8, 16, 1), (256, 8, 16, 16), (256, 8, 16, 128), (128, 8, 2, 4), (128, 8, 8, 64), (8, 2, 4, 10)],
)
def test_the_busiest_device(experts: int, chosen: int, devices: int, tokens: int) -> None:
    random = np.random.default_rng(0)
    met, routed = [], []
    for _ in range(300):
        choices = np.argsort(random.random((tokens, experts)), axis=1)[:, :chosen]
        counts = np.bincount(choices.ravel(), minlength=experts).reshape(devices, -1)
        met.append((counts > 0).sum(1).max())
        routed.append(counts.sum(1).max())
    assert most_met(experts, chosen, devices, tokens) == pytest.approx(np.mean(met), rel=0.03)
    assert most_routed(experts, chosen, devices, tokens) == pytest.approx(np.mean(routed), rel=0.06)


@pytest.mark.parametrize(("mean", "cohorts"), [(0.4, 4), (1.1, 2), (30.0, 4)])
def test_the_fullest_cohort(mean: float, cohorts: int) -> None:
    arrived = np.random.default_rng(0).poisson(mean / cohorts, (20_000, cohorts)).max(1).mean()
    assert most_arrived(mean, cohorts) == pytest.approx(arrived, rel=0.02)
    assert most_arrived(mean, 1) == mean


def test_limits() -> None:
    """All devices alike, none, and the excess over the mean, which grows with the square root."""
    assert most_met(64, 8, 1, 1) == pytest.approx(8, rel=1e-9) and most_met(64, 8, 8, 10_000) == 8
    assert most_routed(64, 8, 1, 7) == 56 and most_met(64, 8, 8, 0) == most_routed(64, 8, 8, 0) == 0
    few, many = (most_routed(64, 8, 8, tokens) - tokens for tokens in (MANY, 100 * MANY))
    assert many == pytest.approx(10 * few) and few > 0
    assert most_routed(64, 8, 8, MANY + 1) == pytest.approx(most_routed(64, 8, 8, MANY) + 1, rel=1e-3)
