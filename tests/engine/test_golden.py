"""The engine compared with transformers: prefill, decode, chunks, and batches that cross tile and page
boundaries.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from jengine.core.request import MAX_LOGPROBS, SamplingParams
from jengine.engine.loop.engine import Engine
from jengine.engine.operations import ResetPrefixCache
from tests.engine.running import SMALL, Answer, run
from tests.golden.weights import VARIANTS, Case, Golden

# compiled as users' programs are; the rest differ outside what the engine adds
IN_CI = {"rope_dynamic_beyond", "gemma2"}
PAGE = SMALL["page_size"]
# images whose tokens see each other: a step must hold one
OPTIONS = {"gemma4_images": {"image_pool_rows": 64}}
CASES = [
    variant if variant in IN_CI else pytest.param(variant, marks=pytest.mark.full) for variant in VARIANTS
]


def assert_equal(answer: Answer, case: Case) -> None:
    """Checks that tokens are equal, and the most likely tokens' log probabilities within 1e-4, at every
    step.
    """
    assert answer.tokens == case.tokens.tolist()
    for update, logits in zip(answer.updates, case.logits.astype(np.float64), strict=True):
        logprobs = logits - np.logaddexp.reduce(logits)
        assert update.logprobs is not None and update.logprobs.top[0][0] == int(logits.argmax())
        for token, value in update.logprobs.top:
            assert abs(value - logprobs[token]) < 1e-4


@pytest.mark.parametrize("variant", CASES)
def test_greedy_tokens_and_logprobs(variant: str, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(variant, optimized=variant in IN_CI, **OPTIONS.get(variant, {}))
    cases = Golden.read(variant).cases
    work = [
        (
            case.prompt.tolist(),
            SamplingParams(
                temperature=0.0, max_tokens=len(case.tokens), ignore_eos=True, logprobs=MAX_LOGPROBS
            ),
        )
        for case in cases
    ]
    # together: tiles beside rows, chunks of two tiles a step
    for answer, case in zip(run(engine, work), cases, strict=True):
        assert_equal(answer, case)
    # from the cache, as far as there are whole pages
    for answer, case in zip(run(engine, work), cases, strict=True):
        assert_equal(answer, case)
        # of snapshots
        grid = PAGE if engine.scheduler.blocks.states is None else engine.scheduler.table.tile_size
        assert answer.sequence.num_cached == (len(case.prompt) - 1) // grid * grid
    engine.do(ResetPrefixCache())
    for answer, case in zip(run(engine, work[-1:]), cases[-1:], strict=True):  # the longest alone
        assert_equal(answer, case)
        assert answer.sequence.num_cached == 0
    assert engine.compiles_since_start == 0
