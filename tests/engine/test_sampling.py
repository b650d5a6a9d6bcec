"""Each sampling parameter in the engine has an effect on its request, and none on others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jengine.base.errors import InvalidArgument
from jengine.core.config import EngineConfig
from jengine.core.request import MASKED_STOPS, MAX_LOGPROBS, SamplingParams
from jengine.engine.loop.engine import Engine
from jengine.engine.start import start_engine
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL, Answer, limit_pages, prompts, run
from tests.golden.weights import write_model

VOCAB, LENGTH = 96, 24
PROMPTS = prompts(8, vocab=VOCAB, longest=90, seed=5)
PROMPT = PROMPTS[3]
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH)
SAMPLED = SamplingParams(temperature=1.0, seed=11, max_tokens=LENGTH)


def params(base: SamplingParams = SAMPLED, **changes: object) -> SamplingParams:
    fields = {name: getattr(base, name) for name in SamplingParams.__dataclass_fields__}
    return SamplingParams(**{**fields, **changes})  # type: ignore[arg-type]


def one(engine: Engine, wanted: SamplingParams, prompt: list[int] = PROMPT) -> Answer:
    return run(engine, [(prompt, wanted)])[0]


def ended(answer: Answer) -> tuple[str | None, int | str | None]:
    last = answer.updates[-1]
    return last.finish_reason, last.stop_reason


# What a neighbour of each kind does to a batch. Greedy and sampled tokens for PROMPTS are fixed by these
# alone.
KINDS = {
    "temperature": {"temperature": 0.6},
    "high temperature": {"temperature": 5.0},
    "top_k": {"top_k": 10},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "seed": {"seed": 2**63 + 12},
    "max_tokens": {"max_tokens": 3},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": list(range(10))},
    "stop_token_ids": {"stop_token_ids": list(range(MASKED_STOPS))},
    "ignore_eos": {"ignore_eos": True},
    "logprobs": {"logprobs": 5},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": -1.0},
    "logit_bias": {"logit_bias": {i: (-1.0) ** i * 5 for i in range(40)}},
    "allowed_token_ids": {"allowed_token_ids": list(range(0, 96, 3))},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "all": {
        **{
            "temperature": 0.9,
            "top_k": 30,
            "top_p": 0.9,
            "min_p": 0.02,
            "min_tokens": 4,
            "stop_token_ids": [1, 2],
            "logprobs": 2,
        },
        **{"repetition_penalty": 1.2, "frequency_penalty": 0.5, "logit_bias": {7: 3.0}},
    },
}


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[list[int]]:
    """Tokens of PROMPTS, greedy and sampled in turn, each alone."""
    return [one(engine, SAMPLED if i % 2 else GREEDY, prompt).tokens for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_do_not_notice(kind: str, engine: Engine, plain: list[list[int]]) -> None:
    """Every third request has the parameter. It has the same tokens alone as in the batch, and so do the
    others.
    """
    wanted = params(**KINDS[kind])
    work = [
        (prompt, wanted if i % 3 == 0 else SAMPLED if i % 2 else GREEDY) for i, prompt in enumerate(PROMPTS)
    ]
    for i, answer in enumerate(run(engine, work)):
        expected = one(engine, wanted, PROMPTS[i]).tokens if i % 3 == 0 else plain[i]
        assert answer.tokens == expected


EFFECTIVE = [
    "temperature", "high temperature", "top_k", "top_p", "min_p", "seed", "logit_bias", "allowed_token_ids",
]  # fmt: skip
EFFECTIVE += ["repetition_penalty", "presence_penalty", "frequency_penalty"]


@pytest.mark.parametrize("kind", EFFECTIVE)
def test_each_has_an_effect(kind: str, engine: Engine) -> None:
    changed = [
        one(engine, params(**KINDS[kind]), prompt).tokens != one(engine, SAMPLED, prompt).tokens
        for prompt in PROMPTS
    ]
    assert sum(changed) >= len(PROMPTS) // 2


def test_parameters_that_leave_one_token_are_greedy(engine: Engine) -> None:
    greedy = one(engine, GREEDY).tokens
    for narrow in (
        {"top_k": 1},
        {"min_p": 1.0},
        {"top_p": 1e-9},
        {"temperature": 1e-9},
        {"temperature": 20.0, "top_k": 1},
    ):
        assert one(engine, params(**narrow)).tokens == greedy, narrow


def test_parameters_that_leave_every_token_change_nothing(engine: Engine) -> None:
    plain = one(engine, SAMPLED).tokens
    for wide in (
        {"top_k": VOCAB},
        {"top_k": 0},
        {"top_k": -1},
        {"top_k": 10**6},
        {"top_p": 1.0},
        {"min_p": 1e-12},
        {"min_tokens": 3},
    ):
        assert one(engine, params(**wide)).tokens == plain, wide


def test_truncated_tokens_are_among_those_left(engine: Engine) -> None:
    """Checked against the log probabilities that come with them: ranks within top_k, masses within top_p and
    min_p.
    """
    for update in one(engine, params(top_k=3, temperature=50.0, logprobs=0)).updates:
        assert update.logprobs is not None and update.logprobs.rank <= 3
    for update in one(engine, params(min_p=0.3, logprobs=1)).updates:
        assert (
            update.logprobs is not None
            and update.logprobs.chosen >= update.logprobs.top[0][1] + np.log(0.3) - 1e-5
        )
    for update in one(engine, params(top_p=0.5, logprobs=MAX_LOGPROBS)).updates:
        assert update.logprobs is not None
        likelier = [np.exp(value) for _, value in update.logprobs.top if value > update.logprobs.chosen]
        assert len(likelier) < MAX_LOGPROBS and sum(likelier) < 0.5 + 1e-5


def test_temperature_flattens(engine: Engine) -> None:
    """The higher the temperature, the less likely are the sampled tokens."""
    means = []
    for temperature in (0.2, 1.0, 3.0):
        wanted = [params(temperature=temperature, seed=seed, logprobs=0) for seed in range(8)]
        answers = run(engine, [(PROMPT, w) for w in wanted])
        means.append(
            np.mean([u.logprobs.chosen for a in answers for u in a.updates if u.logprobs is not None])
        )
    assert means[0] > means[1] + 0.2 > means[2] + 0.4


@pytest.mark.parametrize("count", [0, 1, 5, MAX_LOGPROBS])
@pytest.mark.parametrize("base", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_logprobs(base: SamplingParams, count: int, engine: Engine) -> None:
    """As many as requested, likeliest first, and the chosen token's; requesting them does not change the
    tokens.
    """
    answer, most = one(engine, params(base, logprobs=count)), one(engine, params(base, logprobs=MAX_LOGPROBS))
    assert answer.tokens == one(engine, base).tokens
    for update, full in zip(answer.updates, most.updates, strict=True):
        assert update.logprobs is not None and full.logprobs is not None
        assert update.logprobs.top == full.logprobs.top[:count]
        assert (update.logprobs.chosen, update.logprobs.rank) == (full.logprobs.chosen, full.logprobs.rank)
        values = [value for _, value in full.logprobs.top]
        assert (
            values == sorted(values, reverse=True)
            and len(values) == MAX_LOGPROBS
            and np.exp(values).sum() <= 1 + 1e-5
        )
        if full.logprobs.rank <= MAX_LOGPROBS:
            assert full.logprobs.top[full.logprobs.rank - 1] == (update.token, update.logprobs.chosen)
        assert base is SAMPLED or update.logprobs.rank == 1
    assert all(update.logprobs is None for update in one(engine, base).updates)


def test_logprobs_are_those_of_the_raw_logits(engine: Engine) -> None:
    """Other parameters do not change the log probabilities of the first token."""
    first = one(engine, params(GREEDY, logprobs=MAX_LOGPROBS)).updates[0].logprobs
    assert first is not None
    hot = one(
        engine,
        params(
            temperature=4.0, top_k=2, min_tokens=4, stop_token_ids=[first.top[0][0]], logprobs=MAX_LOGPROBS
        ),
    )
    assert hot.updates[0].logprobs is not None and hot.updates[0].logprobs.top == first.top


def test_stop_token_ids(engine: Engine) -> None:
    """The output ends with the stop token, and names it."""
    tokens = one(engine, GREEDY).tokens
    at = next(i for i in range(4, LENGTH) if tokens[i] not in tokens[:i])
    answer = one(engine, params(GREEDY, stop_token_ids=[tokens[at]]))
    assert answer.tokens == tokens[: at + 1] and ended(answer) == ("stop", tokens[at])
    unused = next(t for t in range(VOCAB) if t not in tokens)
    assert one(engine, params(GREEDY, stop_token_ids=[unused])).tokens == tokens


def test_min_tokens_suppresses_stop_tokens_until_then(engine: Engine) -> None:
    stop = one(engine, GREEDY).tokens[0]
    assert len(one(engine, params(GREEDY, stop_token_ids=[stop])).tokens) == 1
    for least in (1, 2, 5):
        answer = one(engine, params(GREEDY, stop_token_ids=[stop], min_tokens=least))
        assert len(answer.tokens) > least and stop not in answer.tokens[:least]
    stops = list(range(MASKED_STOPS))
    for seed in range(4):
        answer = one(engine, params(seed=seed, temperature=50.0, stop_token_ids=stops, min_tokens=12))
        assert len(answer.tokens) >= 12 and not {*answer.tokens[:12]} & {*stops}


@pytest.mark.parametrize("base", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_max_tokens(base: SamplingParams, engine: Engine) -> None:
    for most in (1, 2, LENGTH):
        answer = one(engine, params(base, max_tokens=most))
        assert len(answer.tokens) == most and ended(answer) == ("length", None)
        assert answer.tokens == one(engine, base).tokens[:most]


@pytest.mark.parametrize("most", [None, 10_000])
def test_max_model_len_cuts(most: int | None, engine: Engine) -> None:
    limit = engine.limits.sequence.max_model_len
    for length in (limit - 1, limit - 20):
        answer = one(engine, params(GREEDY, max_tokens=most, ignore_eos=True), [7] * length)
        assert len(answer.tokens) == limit - length and ended(answer) == ("length", None)
    with pytest.raises(InvalidArgument, match=f"max_model_len - 1 = {limit - 1}"):
        one(engine, GREEDY, [7] * limit)


# End of sequence: a model whose end-of-sequence tokens are ones that it is sure to choose soon.


@pytest.fixture(scope="module")
def eos(engine: Engine) -> int:
    return one(engine, GREEDY).tokens[5]


@pytest.fixture(scope="module")
def with_eos(eos: int, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder: Path = tmp_path_factory.mktemp("eos")
    write_model(folder, "llama_gqa")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [eos, VOCAB - 1]}))
    with on_demand():
        return start_engine(EngineConfig.of(str(folder), {"max_model_len": 192, **SMALL}), progress=False)[0]


def test_end_of_sequence(eos: int, with_eos: Engine, engine: Engine) -> None:
    tokens = one(engine, GREEDY).tokens
    at = tokens.index(eos)
    answer = one(with_eos, GREEDY)
    assert answer.tokens == tokens[: at + 1] and ended(answer) == ("stop", None)


def test_ignore_eos(eos: int, with_eos: Engine, engine: Engine) -> None:
    tokens = one(engine, GREEDY).tokens
    answer = one(with_eos, params(GREEDY, ignore_eos=True))
    assert answer.tokens == tokens and eos in tokens and ended(answer) == ("length", None)
    at = tokens.index(eos)
    named = one(with_eos, params(GREEDY, ignore_eos=True, stop_token_ids=[eos]))
    assert named.tokens == tokens[: at + 1] and ended(named) == ("stop", eos), "a stop token all the same"


def test_min_tokens_suppresses_end_of_sequence(eos: int, with_eos: Engine) -> None:
    """Also with ignore_eos, as in vLLM."""
    at = one(with_eos, GREEDY).tokens.index(eos)
    for ignore in (False, True):
        answer = one(with_eos, params(GREEDY, min_tokens=at + 4, ignore_eos=ignore))
        assert len(answer.tokens) >= at + 4 and not {*answer.tokens[: at + 4]} & {eos, VOCAB - 1}


@pytest.mark.parametrize("ends", [False, True])
def test_any_number_of_stop_tokens(ends: bool, engine: Engine, with_eos: Engine) -> None:
    """All but four of the vocabulary, far more than a slot's list holds; min_tokens stays exact."""
    stops = list(range(4, VOCAB))
    for seed in range(4):
        hot = params(seed=seed, temperature=50.0, stop_token_ids=stops, max_tokens=40)
        answer = one(with_eos if ends else engine, hot)
        assert (
            ended(answer) == ("stop", answer.tokens[-1])
            and answer.tokens[-1] in stops
            and not {*answer.tokens[:-1]} & {*stops}
        )
        answer = one(with_eos if ends else engine, hot.clone(min_tokens=12))
        assert len(answer.tokens) > 12 and not {*answer.tokens[:12]} & {*stops}


def test_allowed_tokens_are_all_that_come(engine: Engine) -> None:
    for base in (GREEDY, SAMPLED):
        assert {*one(engine, params(base, allowed_token_ids=[5, 17, 95])).tokens} <= {5, 17, 95}


def test_a_large_bias_decides(engine: Engine) -> None:
    assert {*one(engine, params(logit_bias={41: 1e6})).tokens} == {41}
    assert 41 not in one(engine, params(logit_bias={41: -1e6}, max_tokens=90)).tokens


def test_penalties_are_those_of_the_formula(engine: Engine) -> None:
    """Greedy tokens replayed: the raw log probabilities of all tokens are not known, but those of the
    likeliest decide.
    """
    prompt = [3, 3, 9, 20]
    for penalties in (
        {"repetition_penalty": 1.8},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.0},
        {"frequency_penalty": -0.5},
    ):
        answer = one(engine, params(GREEDY, logprobs=MAX_LOGPROBS, **penalties), prompt)
        wanted = params(**penalties)
        output: list[int] = []
        for update in answer.updates:
            assert update.logprobs is not None
            # that one scales logits, which log probabilities give up to a constant
            if "repetition_penalty" not in penalties:
                values = {
                    token: value
                    - wanted.presence_penalty * (token in output)
                    - wanted.frequency_penalty * output.count(token)
                    for token, value in update.logprobs.top
                }
                assert values[update.token] >= max(values.values()) - 1e-4
            output.append(update.token)
    repeated = one(engine, params(GREEDY, repetition_penalty=50.0, max_tokens=60)).tokens
    assert len({*repeated}) > len({*one(engine, params(GREEDY, max_tokens=60)).tokens})


def test_penalties_survive_preemption(make_engine: Callable[..., Engine]) -> None:
    """Counts are computed again from all known tokens."""
    wanted = params(frequency_penalty=1.0, repetition_penalty=1.3, max_tokens=60)
    roomy, tight = make_engine(), make_engine()
    limit_pages(tight, 18)
    work = [(prompt, wanted) for prompt in PROMPTS]
    assert [a.tokens for a in run(tight, work)] == [a.tokens for a in run(roomy, work)]
    assert tight.scheduler.registry.num_preemptions > 0


def test_prompt_logprobs(engine: Engine) -> None:
    """For a prompt and its greedy continuation, they equal the log probabilities of decoding."""
    greedy = one(engine, params(GREEDY, logprobs=3))
    longer = PROMPT + greedy.tokens
    scores = [
        s
        for answer in [one(engine, params(GREEDY, prompt_logprobs=3, max_tokens=1), longer)]
        for s in answer.scores
    ]
    assert [s.position for s in scores] == [1 + 64 * i for i in range(len(scores))]
    assert [token for s in scores for token in s.tokens] == longer[1:]
    got = [entry for s in scores for entry in s.logprobs][len(PROMPT) - 1 :]
    for entry, update in zip(got, greedy.updates, strict=True):
        assert update.logprobs is not None
        assert abs(entry.chosen - update.logprobs.chosen) < 1e-4 and entry.rank == 1
        assert [token for token, _ in entry.top] == [token for token, _ in update.logprobs.top]
