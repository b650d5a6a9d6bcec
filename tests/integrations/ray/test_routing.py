"""The choice of replicas and of their number: plain functions, except for their base classes."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.extras import of_extra

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    of_extra("ray", "ray.serve")

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]


def test_keys() -> None:
    from jengine.integrations.ray.serve import prefix_key

    system, first = {"role": "system", "content": "be brief"}, {"role": "user", "content": "a question"}
    turn = prefix_key({"messages": [system, first]})
    assert turn == prefix_key(
        {
            "messages": [
                system,
                first,
                {"role": "assistant", "content": "so"},
                {"role": "user", "content": "and?"},
            ]
        }
    )
    assert turn != prefix_key({"messages": [system, {"role": "user", "content": "another"}]})
    assert turn != prefix_key({"messages": [first]}) != prefix_key({"messages": [first], "tools": [1]})
    assert (
        prefix_key({"prompt": "x" * 600 + "a"})
        == prefix_key({"prompt": "x" * 600 + "b"})
        != prefix_key({"prompt": "y"})
    )
    assert (
        prefix_key({"prompt": [1, 2, 3]})
        == prefix_key({"prompt": [[1, 2, 3], [4]]})
        != prefix_key({"prompt": [1, 2]})
    )
    for body in ({}, {"prompt": []}, {"prompt": 5}, {"messages": "x"}, {"messages": []}):
        assert prefix_key(body) == ""
    assert prefix_key({"messages": ["x"]}) and prefix_key({"prompt": "\ud800"})


def test_ranks() -> None:
    from jengine.integrations.ray.serve import ranked

    idle = dict.fromkeys("abcd", 0)
    homes = {str(key): ranked(str(key), idle) for key in range(400)}
    assert all(sorted(ranks) == [*"abcd"] for ranks in homes.values())
    assert all(50 < sum(ranks[0] == name for ranks in homes.values()) < 150 for name in "abcd"), (
        "keys are spread"
    )
    without = {key: ranked(key, dict.fromkeys("abc", 0)) for key in homes}
    assert all(without[key] == [name for name in ranks if name != "d"] for key, ranks in homes.items()), (
        "only d's keys move"
    )
    busy = {"a": 20, "b": 1, "c": 1, "d": 1}
    assert all(
        ranked(key, busy) == [name for name in ranks if name != "a"] + ["a"] for key, ranks in homes.items()
    )
    assert all(ranked(key, {"a": 5, "b": 2, "c": 1, "d": 0}) == ranks for key, ranks in homes.items()), (
        "a little more is no matter"
    )
    assert ranked("x", {}) == []


@pytest.mark.parametrize(
    "tokens, expected", [((), 1), ((0, 0), 1), ((1000,), 1), ((1001,), 2), ((3000, 2500), 4), ((10**6,), 4)]
)
def test_replicas(tokens: tuple[int, ...], expected: int) -> None:
    from jengine.integrations.ray.serve import QUEUED_TOKENS, QueuedTokens

    context: Any = SimpleNamespace(
        aggregated_metrics={QUEUED_TOKENS: dict(enumerate(tokens))} if tokens else None,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
    )
    assert QueuedTokens(1000)(context) == (expected, {})


def test_options() -> None:
    from jengine import InvalidArgument
    from jengine.integrations.ray.serve import ServeConfig, app

    for options, name in (
        ({"min_replicas": 2}, "max_replicas"),
        ({"target_tokens": 0}, "target_tokens"),
        ({"server": {"api_key": "secret"}}, r"server.api_key='\.\.\.'"),
        ({"server": {"response_store_bytes": 9}, "max_replicas": 2}, "response_store_bytes=9: must be 0"),
        ({"server": {"none": 1}}, "server.none"),
        ({"server": {"max_waiting": -1}}, "max_waiting"),
    ):
        with pytest.raises(InvalidArgument, match=name):
            ServeConfig(**options)
    assert ServeConfig().server_config().response_store_bytes > 0
    assert ServeConfig(max_replicas=2).server_config().response_store_bytes == 0
    with pytest.raises(InvalidArgument, match="replicas='1': there is no such option"):
        app({"replicas": "1"})
    assert app({"model": "demo", "max_replicas": "3", "engine_kwargs": '{"dtype": "float32"}'}) is not None


def test_health(model: Path) -> None:
    """A replica reports the failure of its engine."""
    from jengine import AsyncLLM, EngineDead, Tokenizer
    from jengine.api.backend import EngineThread
    from jengine.integrations.ray.serve import QUEUED_TOKENS, EngineReplica, ServeConfig
    from tests.mocks.mock_engine import MockEngine

    def make(_: object) -> AsyncLLM:
        return AsyncLLM.over(
            EngineThread(MockEngine(vocab_size=501, fail_at=60, seconds=0.002)), Tokenizer.load(model)
        )

    async def main() -> None:
        engine = EngineReplica(ServeConfig(model="mock"), make)
        body, head, client = (
            b'{"prompt": [1, 2], "max_tokens": 20}',
            {"content-type": "application/json"},
            ("10.0.0.1", 5),
        )
        await engine.check_health()
        assert await engine.record_autoscaling_stats() == {QUEUED_TOKENS: 0.0}
        (status, _), *rest = [
            part async for part in engine.answer("POST", "/v1/completions", head, body, client)
        ]
        assert status == 200 and b"text" in b"".join(rest)
        for _ in range(3):
            statuses = [
                part[0]
                async for part in engine.answer("POST", "/v1/completions", head, body, client)
                if isinstance(part, tuple)
            ]
        assert statuses == [503]
        with pytest.raises(EngineDead):
            await engine.check_health()
        engine._api.close()  # type: ignore[union-attr]

    asyncio.run(main())
