"""In float32, tokens do not depend on whether the rest of a prompt lies on rows or in a tile."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from jengine.core.request import SamplingParams
from jengine.engine.loop.engine import Engine
from tests.engine.running import Answer, Work, run

OPTIONS: dict[str, Any] = {"optimized": True, "dtype": "float32", "max_num_seqs": 16, "page_size": 16}
FAMILIES = ["gemma3", "deepseek_v3", "gpt_oss", "llama4", "gemma3n", "bloom"]


def chats(draw: random.Random, count: int = 8, turns: int = 5) -> list[list[Work]]:
    """Turns of conversations with short questions: each prompt begins as the one before."""
    texts = [[draw.randrange(64) for _ in range(draw.randint(1, 40))] for _ in range(count)]
    out = []
    for _ in range(turns):
        for text in texts:
            text += [draw.randrange(64) for _ in range(draw.randint(1, 9))]
        out.append([([*text], params(draw, i)) for i, text in enumerate(texts)])
    return out


def params(draw: random.Random, number: int) -> SamplingParams:
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "n": 3},
        {"temperature": 1.5, "top_k": 30, "logprobs": 2, "repetition_penalty": 1.3},
        {"temperature": 0.8, "min_tokens": 4, "stop_token_ids": [*range(40)]},
        {"temperature": 0.7, "allowed_token_ids": [*range(0, 60, 3)]},
        {"temperature": 1.0, "prompt_logprobs": 1},
    ]
    return SamplingParams(seed=number, max_tokens=draw.randint(4, 9), **options[number % len(options)])


def answers(engine: Engine, most: int, turns: list[list[Work]]) -> list[Answer]:
    engine.scheduler.rows_or_tiles.max_rows = most
    return [answer for work in turns for answer in run(engine, work)]


def compare(engine: Engine) -> tuple[int, int]:
    """Runs the same conversations in tiles and on rows. Returns the steps with prompts on rows, and those
    that also had tiles.
    """
    turns, most = chats(random.Random(1)), engine.scheduler.rows_or_tiles.max_rows
    assert most == 63
    tiles = answers(engine, 0, turns)
    assert not any(step.prompt_rows for step in engine.records.steps)
    engine.scheduler.blocks.reset()
    before = len(engine.records.steps)
    rows = answers(engine, most, turns)
    assert [answer.tokens for answer in rows] == [answer.tokens for answer in tiles]
    for one, other in zip(rows, tiles, strict=True):
        for update, expected in zip(one.updates, other.updates, strict=True):
            if expected.logprobs is not None:
                assert update.logprobs is not None
                assert update.logprobs.chosen == pytest.approx(expected.logprobs.chosen, abs=1e-4)
    assert engine.compiles_since_start == 0
    steps = [step for step in [*engine.records.steps][before:] if step.prompt_rows]
    return len(steps), sum(step.tiles > 0 for step in steps)


def test_tokens_are_those_of_tiles(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(**OPTIONS)
    few, mixed = compare(engine)
    assert few > 4 and mixed > 0, "prompts did not lie on rows"


@pytest.mark.full
@pytest.mark.parametrize("variant", FAMILIES)
def test_tokens_of_families(variant: str, make_engine: Callable[..., Engine]) -> None:
    """Windows, several cache groups, layers that share keys and values, latent attention, sinks, slopes."""
    assert compare(make_engine(variant, **OPTIONS))[0] > 4


@pytest.mark.full
def test_with_a_host_tier_and_bursts(make_engine: Callable[..., Engine]) -> None:
    assert compare(make_engine(**OPTIONS, swap_space=0.05, num_scheduler_steps=8))[0] > 4
