"""Predictions of LLM.predict, for prompts and for lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jengine import LLM, InvalidArgument, SamplingParams
from jengine.core.request import Request
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.forecasts.expectations import hypothetical
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def llm(text_model: Path) -> LLM:
    with on_demand():
        return LLM(text_model, progress=False, **SMALL, max_model_len=192)


def test_predictions_of_prompts_and_lengths(llm: LLM) -> None:
    llm.reset_prefix_cache()
    fixed = GREEDY.clone(max_tokens=20, ignore_eos=True)
    # a tile; more than a step takes
    (short,), (long,) = (llm.predict(prompt_tokens=length, sampling_params=fixed) for length in (2, 150))
    assert (
        0.0 < short.first_token < short.last_token
        and short.first_token < long.first_token
        and short.last_token < long.last_token
    )
    assert llm.predict([[5, 6]], fixed) == [short]
    first, second = llm.predict(prompt_tokens=[60, 60], sampling_params=fixed)
    assert first.first_token <= second.first_token
    assert not llm.engine.has_work


def test_a_prediction_knows_what_runs_and_what_is_cached(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "observe",
        "observe_burst",
        "observe_plan",
        "observe_collect",
    ):  # so that predictions differ by nothing else
        monkeypatch.setattr(StepCosts, name, lambda *_: None)
    llm.reset_prefix_cache()
    prompt, params = [*range(2, 62)], GREEDY.clone(max_tokens=4, ignore_eos=True)
    scheduler, request = (
        llm.engine.scheduler,
        Request(request_id="new", prompt_token_ids=prompt, params=params),
    )
    (idle,) = llm.predict([prompt], params)
    assert hypothetical(scheduler, request).cached == 0
    llm.generate(prompt, params, use_tqdm=False)
    assert hypothetical(scheduler, request).cached == 48
    streams = [
        llm.stream([7 + i] * 8, params.clone(max_tokens=160)) for i in range(scheduler.registry.max_num_seqs)
    ]  # it has to wait for one of them
    for stream in streams:
        next(stream)
    (beside,) = llm.predict([[9] * 60], params)
    assert llm.engine.load.first_token_seconds > 0.0
    for stream in streams:
        stream.close()
    assert beside.last_token > idle.last_token


@pytest.mark.parametrize(
    "arguments, field",
    [({}, "prompt_tokens"), ({"prompts": ["a"], "prompt_tokens": 3}, "prompt_tokens"),
        ({"prompt_tokens": 0}, "prompt_tokens"),
     ({"prompt_tokens": 10**6}, "prompt_tokens"), ({"prompts": [[10**9]]}, "prompt_token_ids")],
)  # fmt: skip
def test_bad_predictions(arguments: dict[str, Any], field: str, llm: LLM) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        llm.predict(**arguments)
    assert refusal.value.field == field
