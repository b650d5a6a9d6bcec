"""The search for settings that fit, with a made-up memory."""

from __future__ import annotations

import pytest

from jengine.base.errors import InvalidArgument
from jengine.capacity.planning.memory import Fitting, what_fits
from jengine.core.config import EngineConfig

GIB = 1 << 30


def fits_if(holds: object) -> tuple[int, int]:
    return (GIB, 4096) if holds else (0, 0)


def names(found: list[Fitting]) -> list[dict[str, object]]:
    return [one.options for one in found]


def test_the_largest_step_that_fits() -> None:
    def room(config: EngineConfig) -> tuple[int, int]:
        return fits_if((config.max_num_batched_tokens or 8192) <= 2048)

    found = what_fits(EngineConfig(), room, most_tokens=8192, weights_fit=True)
    assert names(found)[0] == {"max_num_batched_tokens": 2048}
    assert str(found[0]) == "--max-num-batched-tokens 2048 (1.0 GiB of cache, 4,096 tokens)"


def test_each_kind_is_named_once_and_what_is_refused_is_not() -> None:
    def room(config: EngineConfig) -> tuple[int, int]:
        if config.quantization == "int8":
            raise InvalidArgument("quantization", "int8", "not for this model")
        return fits_if(config.quantization or config.tensor_parallel_size >= 4)

    found = what_fits(EngineConfig(), room, most_tokens=8192, weights_fit=True)
    assert names(found) == [{"quantization": "int4"}, {"tensor_parallel_size": 4}]


def test_no_smaller_step_helps_weights_that_do_not_fit() -> None:
    asked = []

    def room(config: EngineConfig) -> tuple[int, int]:
        asked.append(config)
        return fits_if(False)

    assert (
        what_fits(
            EngineConfig(quantization="int4", tensor_parallel_size=8),
            room,
            most_tokens=8192,
            weights_fit=False,
        )
        == []
    )
    assert asked == []


def test_a_cache_that_was_asked_for_is_the_cause() -> None:
    found = what_fits(
        EngineConfig(num_pages=10**6),
        lambda config: fits_if(config.num_pages is None),
        most_tokens=64,
        weights_fit=True,
    )
    assert [str(one) for one in found] == ["no --num-pages (1.0 GiB of cache, 4,096 tokens)"]


@pytest.mark.parametrize(
    ("tokens", "longest", "enough"), [(2047, 8192, False), (2048, 8192, True), (64, 64, True)]
)
def test_a_cache_for_less_than_a_sequence_does_not_count(tokens: int, longest: int, enough: bool) -> None:
    found = what_fits(EngineConfig(), lambda config: (GIB, tokens), most_tokens=longest, weights_fit=True)
    assert bool(found) == enough


def test_rows_that_a_small_step_cannot_hold() -> None:
    """max_num_seqs=2000 needs steps of 2064 tokens."""
    asked: list[EngineConfig] = []

    def room(config: EngineConfig) -> tuple[int, int]:
        asked.append(config)
        return fits_if(False)

    what_fits(EngineConfig(max_num_seqs=2000), room, most_tokens=8192, weights_fit=True)
    budgets = [
        config.max_num_batched_tokens
        for config in asked
        if config.max_num_seqs == 2000 and config.quantization is None
    ]
    assert budgets[:1] == [4096] and all(budget is None or budget >= 2064 for budget in budgets)
