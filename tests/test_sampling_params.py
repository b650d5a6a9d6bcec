"""Lists in the sampling parameters have a maximum length, checked first, and no duplicates."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from jengine import InvalidArgument, PromptTooLong, SamplingParams
from jengine.core.request import MAX_ALLOWED_TOKEN_IDS, MAX_ENTRIES


def test_duplicates_are_removed() -> None:
    params = SamplingParams(
        stop=["b", "a", "b"],
        stop_token_ids=[7, 7, 3],
        allowed_token_ids=[5] * 1000 + [4],
        bad_words=["x", "x"],
    )
    assert (params.stop, params.stop_token_ids, params.allowed_token_ids, params.bad_words) == (
        ("b", "a"),
        (7, 3),
        (5, 4),
        ("x",),
    )


@pytest.mark.parametrize("name", MAX_ENTRIES)
def test_maxima(name: str) -> None:
    most = MAX_ENTRIES[name]

    def given(count: int) -> dict[str, Any]:
        ids = range(count)
        return {
            name: {i: 1.0 for i in ids}
            if name == "logit_bias"
            else [str(i) for i in ids]
            if name in ("stop", "bad_words")
            else [*ids]
        }

    assert len(getattr(SamplingParams(**given(most)), name)) == most
    with pytest.raises(InvalidArgument, match=f"^{name}='{most + 1} entries': at most {most}$"):
        SamplingParams(**given(most + 1))


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_characters_together(name: str) -> None:
    assert SamplingParams(**{name: ["x" * 4000, "y" * 6000]})
    with pytest.raises(
        InvalidArgument, match=f"{name}='10001 characters': at most 10000 characters together"
    ):
        SamplingParams(**{name: ["x" * 4000, "y" * 6001]})


class Untouchable(list[Any]):
    """Its entries are not to be looked at."""

    def __iter__(self) -> Any:
        raise AssertionError


@pytest.mark.parametrize("name", ["stop", "bad_words", "stop_token_ids", "allowed_token_ids"])
def test_length_comes_first(name: str) -> None:
    with pytest.raises(InvalidArgument, match="at most"):
        SamplingParams(**{name: Untouchable([5] * (MAX_ALLOWED_TOKEN_IDS + 1))})


@pytest.mark.parametrize("bad", [[1, True], [1, -1], [1, 2.0], ["1"], [[]]])
@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_ids_are_whole_numbers(name: str, bad: list[Any]) -> None:
    with pytest.raises(InvalidArgument, match=name):
        SamplingParams(**{name: bad})


def test_messages_do_not_write_out_what_is_large() -> None:
    class Entry:
        shown = 0

        def __repr__(self) -> str:
            Entry.shown += 1
            return "entry"

    error = InvalidArgument("prompt_token_ids", [Entry() for _ in range(100_000)], "no")
    assert len(str(error)) < 120 and Entry.shown < 1000


def test_a_seed_of_minus_one_is_random() -> None:
    """As in vLLM; gRPC sends 64 bits."""
    assert SamplingParams(seed=-1) == SamplingParams(seed=2**64 - 1) == SamplingParams()
    assert SamplingParams(seed=5).clone(seed=-1).seed is None and SamplingParams(seed=-2).seed == -2


def test_the_kind_of_outputs_is_kept_in_copies() -> None:
    params = SamplingParams(output_kind="delta")
    assert params == SamplingParams() and hash(params) == hash(SamplingParams())
    for copied in (
        params.clone(top_k=3),
        dataclasses.replace(params, top_k=3),
        copy.deepcopy(params),
        pickle.loads(pickle.dumps(params)),
    ):
        assert copied.output_kind == "delta"
    with pytest.raises(InvalidArgument, match="output_kind='some': must be one of cumulative, delta, final"):
        SamplingParams(output_kind="some")


def test_no_name_of_a_field_is_special() -> None:
    with pytest.raises(InvalidArgument, match="self=1: there is no such"):
        SamplingParams(**{"self": 1})  # type: ignore[arg-type]


def test_errors_can_be_copied_and_pickled() -> None:
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(temperature=lambda: 1)  # type: ignore[arg-type]
    error, long = caught.value, PromptTooLong("prompt", "a", "9 tokens; at most 7", 9, 8, or_more=True)
    for copied in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert (type(copied), str(copied), copied.field) == (InvalidArgument, str(error), "temperature")
    again = pickle.loads(pickle.dumps(long))
    assert (type(again), str(again), again.counts) == (PromptTooLong, str(long), (9, 8, True))
