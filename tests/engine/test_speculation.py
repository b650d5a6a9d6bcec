"""In float32, tokens and log probabilities do not depend on drafts, whatever the drafter proposes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.restart import restart_scheduler
from jengine import LLM
from jengine.core.request import SamplingParams
from jengine.core.structured_outputs import StructuredOutputs
from jengine.engine.loop.engine import Engine
from jengine.scheduling.costs.draft_costs import all_of_them
from jengine.scheduling.requests.sequence import Sequence
from jengine.text.masks import AllOf, AllowedTokens, BadWords
from tests.engine.on_demand import on_demand
from tests.engine.running import Answer, Work, run
from tests.scheduling.adversaries import Knowing

ALL: dict[str, Any] = {"how_many_drafts": all_of_them}
OPTIONS: dict[str, Any] = {"optimized": True, "dtype": "float32", "max_num_seqs": 8, "num_pages": 100}
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 2.0, "top_k": 40, "min_p": 0.01, "n": 2},
    {"temperature": 0.7, "repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.4},
    {"temperature": 0.0, "frequency_penalty": 1.2, "logprobs": 3},
    {"temperature": 1.0, "logprobs": 0, "logit_bias": {3: 4.0}},
    {"temperature": 0.9, "min_tokens": 12, "stop_token_ids": [*range(0, 64, 5)]},
    {"temperature": 1.0, "allowed_token_ids": [*range(0, 64, 7)]},
]


def work(draw: random.Random, count: int) -> list[Work]:
    out: list[Work] = []
    for i in range(count):
        params = SamplingParams(seed=i, max_tokens=draw.randint(12, 24), **PARAMS[i % len(PARAMS)])
        out.append(([draw.randrange(64) for _ in range(draw.randint(1, 30))], params))
    return out


def drafter(plain: list[Answer], right: float, seed: int = 0) -> Knowing:
    tokens = {answer.sequence.request_id: answer.tokens for answer in plain}
    return Knowing(lambda sequence: tokens[sequence.request_id], right, seed=seed)


def check_equal(speculated: list[Answer], plain: list[Answer], exact: bool = False) -> None:
    for one, other in zip(speculated, plain, strict=True):
        assert one.tokens == other.tokens
        assert [update.finish_reason for update in one.updates] == [
            update.finish_reason for update in other.updates
        ]
        for update, expected in zip(one.updates, other.updates, strict=True):
            assert (update.logprobs is None) == (expected.logprobs is None)
            if update.logprobs is not None and expected.logprobs is not None:
                tolerance = 0.0 if exact else 1e-4
                assert update.logprobs.chosen == pytest.approx(expected.logprobs.chosen, abs=tolerance)
                assert len(update.logprobs.top) == len(expected.logprobs.top)


def compare(engine: Engine, count: int, exact: bool = False, **changes: Any) -> dict[float, list[int]]:
    """Runs the same requests without drafts, and with drafters of several qualities. Returns the steps, the
    drafted and the accepted tokens of each.
    """
    found: dict[float, list[int]] = {}
    restart_scheduler(engine)
    plain = run(engine, work(random.Random(5), count))
    for right in (1.0, 0.0, 0.7):
        restart_scheduler(engine, drafters=[drafter(plain, right)], **ALL, **changes)
        before = len(engine.records.steps)
        check_equal(run(engine, work(random.Random(5), count)), plain, exact)
        speculation, steps = engine.scheduler.speculation, [*engine.records.steps][before:]
        assert all(step.rows <= step.trunk.rows for step in steps)
        assert any(step.rows - step.prompt_rows > step.running for step in steps), "drafts' rows count too"
        found[right] = [
            len(steps),
            speculation.tokens,
            sum(speculation.accepted),
        ]
    assert engine.compiles_since_start == 0
    return found


def test_tokens_are_those_without_drafts(make_engine: Callable[..., Engine]) -> None:
    found = compare(make_engine(**OPTIONS), 16)
    assert found[0.0][1] > 20 and found[0.0][2] == 0, "a wrong draft was accepted"
    assert found[1.0][1] == found[1.0][2] > 15, "a right draft was not accepted"
    assert 0 < found[0.7][2] < found[0.7][1]
    assert found[1.0][0] < found[0.0][0], "drafts saved no step"


def test_bits_of_a_batch_invariant_engine(make_engine: Callable[..., Engine]) -> None:
    """Log probabilities are equal to the last bit, in bfloat16."""
    engine = make_engine(**{**OPTIONS, "dtype": "bfloat16"}, batch_invariant=True)
    assert compare(engine, 16, exact=True)[1.0][2] > 15


@pytest.mark.full
@pytest.mark.parametrize("variant", ["gemma3", "deepseek_v3", "gpt_oss", "mixtral", "gemma3n"])
def test_families(variant: str, make_engine: Callable[..., Engine]) -> None:
    assert compare(make_engine(variant, **OPTIONS), 16)[1.0][2] > 15


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_a_cache_that_is_too_small(seed: int, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(**OPTIONS, swap_space=0.05, num_scheduler_steps=8)
    found = compare(engine, 48, num_pages=16)
    assert found[0.7][2] > 100


class Counted(AllowedTokens):
    """Allows even and odd tokens in turn, and none after `most` tokens."""

    def __init__(self, most: int) -> None:
        super().__init__(range(0, 96, 2))
        self._other, self._taken, self._most = AllowedTokens(range(1, 96, 2)), 0, most

    def fill(self, words: Any) -> None:
        if self._taken == self._most:
            words[:] = 0
        else:
            (super() if self._taken % 2 else self._other).fill(words)

    def accept(self, token: int) -> None:
        self._taken += 1

    def rollback(self, count: int) -> None:
        self._taken -= count


@pytest.mark.parametrize("right", [1.0, 0.0, 0.6])
def test_masks_of_each_row(right: float, make_engine: Callable[..., Engine]) -> None:
    """Drafts that masks forbid, tokens behind drafts, and a mask that comes to forbid everything."""
    engine = make_engine(**OPTIONS)

    def answers() -> list[Answer]:
        found = {}
        for i, request in enumerate(requests()):
            engine.limits.validate(request)
            (sequence,) = engine.add(request)
            found[request.request_id] = Answer(sequence)
            assert i < 8
        while engine.has_work:
            for update in engine.step():
                found[update.request_id].updates.append(update)  # type: ignore[arg-type]
            engine.scheduler.check_integrity()
        return [*found.values()]

    def requests() -> list[Any]:
        from jengine.core.request import Request

        masks = [Counted(99), Counted(7), AllOf([Counted(99), BadWords([[5, 6], [7], [9, 8, 3]])]), None]
        return [
            Request(
                request_id=str(i),
                prompt_token_ids=[i, 2, 3],
                params=SamplingParams(temperature=1.0, seed=i, max_tokens=16, min_tokens=3, ignore_eos=True),
                mask=mask,
            )
            for i, mask in enumerate(masks)
        ]

    restart_scheduler(engine)
    plain = answers()
    tokens = {answer.sequence.request_id: _tokens(answer) for answer in plain}
    assert tokens["0"][0] % 2 and len(tokens["1"]) == 7 and len(tokens["0"]) == 16
    restart_scheduler(engine, drafters=[Knowing(lambda s: [*tokens[s.request_id], 1, 2, 3], right)], **ALL)
    speculated = answers()
    assert {answer.sequence.request_id: _tokens(answer) for answer in speculated} == tokens
    for one, other in zip(speculated, plain, strict=True):
        assert (one.sequence.finish_reason, one.sequence.stop_reason) == (
            other.sequence.finish_reason,
            other.sequence.stop_reason,
        )
    assert plain[1].sequence.finish_reason == "error"
    assert engine.scheduler.speculation.tokens > 10


def _tokens(answer: Answer) -> list[int]:
    return [update.token for update in answer.updates if hasattr(update, "token")]


def test_text_stops_in_the_middle_of_accepted_drafts(make_engine: Callable[..., Engine]) -> None:
    """What the caller ends after the first of several tokens gets no more of them."""
    engine = make_engine(**OPTIONS)
    restart_scheduler(engine)
    one: list[Work] = [([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))]
    plain = run(engine, one)
    stop = plain[0].tokens[6]
    restart_scheduler(engine, drafters=[drafter(plain, 1.0)], **ALL)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
    (answer,) = run(engine, [([1, 2, 3], params)])
    end = plain[0].tokens.index(stop)
    assert answer.tokens == plain[0].tokens[: end + 1]
    assert [update.finish_reason for update in answer.updates] == [*[None] * end, "stop"]
    assert isinstance(answer.sequence, Sequence) and answer.sequence.stop_reason == stop


def test_ngrams(make_engine: Callable[..., Engine]) -> None:
    """Outputs that repeat themselves: the drafter finds them, and the metrics count them."""
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    prompt = [*range(20)] * 3
    repeating = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    ids: list[Work] = [(prompt, repeating), *work(random.Random(1), 8)]
    plain = run(make_engine(**OPTIONS), ids)
    engine = make_engine(**OPTIONS, speculative_config=config)
    restart_scheduler(engine, **ALL)
    check_equal(run(engine, ids), plain)
    load = engine.load
    assert load.drafts > 5 and load.draft_tokens > load.drafts
    assert load.accepted_tokens == tuple(engine.scheduler.speculation.accepted)
    assert 0 < sum(load.accepted_tokens) <= load.draft_tokens


def test_grammars_draft_their_forced_tokens(make_engine: Callable[..., Engine]) -> None:
    """The demo model, whose tokenizer has the words of a schema; outputs are those without drafts."""
    structures = [
        StructuredOutputs(json={"type": "object", "properties": {"first_name": {"type": "boolean"},
            "last_name": {"type": "boolean"}}, "required": ["first_name", "last_name"]}),
        StructuredOutputs(regex="(the same text|the same words) and then [ab]{4}"),
    ]  # fmt: skip
    params = [
        SamplingParams(temperature=float(seed % 2), seed=seed, max_tokens=40, structured_outputs=structure)
        for seed, structure in enumerate(2 * structures)
    ]
    options = {"progress": False, "dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 136}
    with on_demand(optimized=True):
        plain, drafting = (
            LLM("demo", **options, speculative_config=config)
            for config in (None, {"method": "ngram", "num_speculative_tokens": 6})
        )
    restart_scheduler(drafting._shared.engine, **ALL)
    prompts = ["def", "class", "import", "return"]
    expected, got = (llm.generate(prompts, params, use_tqdm=False) for llm in (plain, drafting))
    assert [one.outputs[0].token_ids for one in got] == [one.outputs[0].token_ids for one in expected]
    assert "first_name" in got[0].outputs[0].text and "and then" in got[1].outputs[0].text
    speculation = drafting._shared.engine.scheduler.speculation
    assert sum(speculation.accepted) > 10
