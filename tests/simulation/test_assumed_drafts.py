"""Simulations with an assumed share of right drafts."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jengine.capacity.simulation.replay import replay
from jengine.capacity.simulation.setup import AssumedDrafts
from jengine.capacity.simulation.summary import Outcome
from jengine.capacity.simulation.trace import make_trace
from tests.simulation.shapes import make_shape, poisson


def simulated(right: float | None, **trace: Any) -> Outcome:
    shape = make_shape()
    if right is not None:
        shape = dataclasses.replace(shape, drafters=[AssumedDrafts(right, 7)])
    return replay(shape, trace.pop("made", None) or make_trace([(0.0, 10, 100)], **trace))


def test_a_share_of_the_drafts_is_right() -> None:
    sequence: Any = SimpleNamespace(tokens=[5, 6, 9, 9], prompt_len=2, number=3)
    drafted = [AssumedDrafts(share, 15).draft(sequence, 4000) for share in (0.0, 0.7, 1.0)]
    shares = [np.mean(np.array(draft.tokens) == 9) for draft in drafted if draft is not None]
    assert shares == pytest.approx([0.0, 0.7, 1.0], abs=0.03)
    sequence.prompt_len = 4
    assert AssumedDrafts(1.0, 15).draft(sequence, 9) is None, "its tokens are not known yet"


@pytest.mark.parametrize("limits", [None, np.array([105])])
def test_more_right_drafts_save_more_steps(limits: np.ndarray | None) -> None:
    none = simulated(None, limits=limits)
    steps = [simulated(right, limits=limits).steps for right in (0.5, 0.8, 1.0)]
    assert none.steps >= 100 > steps[0] > steps[1] > steps[2]
    assert steps[2] < 100 / 4, "each step gives eight tokens, once drafts are known to be right"
    assert simulated(0.0, limits=limits).steps == none.steps, "costs do without wrong drafts"


def test_every_request_gets_its_tokens() -> None:
    trace = poisson(1, 200, rate=50.0)
    plain, drafted = simulated(None, made=trace), simulated(0.8, made=trace)
    assert not drafted.rejected and not np.isnan(drafted.last).any()
    assert drafted.steps < plain.steps and np.mean(drafted.last - plain.last) < 0.0


def test_a_prompt_beside_drafts_ends_no_sooner() -> None:
    trace = make_trace([(0.0, 10, 100), (0.02, 60, 20)], limits=np.array([105, 25]))
    drafted = simulated(1.0, made=trace)
    assert drafted.steps < simulated(None, made=trace).steps
    assert drafted.last[1] > drafted.first[1], "it ends with its first token"
