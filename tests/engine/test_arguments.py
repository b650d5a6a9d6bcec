"""Rejected values of SamplingParams and engine options."""

from __future__ import annotations

import copy
import math
import pickle
import re
from typing import Any

import pytest

from jengine import EngineConfig, InvalidArgument, SamplingParams
from jengine.core.request import MAX_ALLOWED_TOKEN_IDS, MAX_LOGPROBS, MAX_SAMPLES

BAD_PARAMS: dict[str, list[Any]] = {
    "n": [0, -1, MAX_SAMPLES + 1, 2.0, "2", None, True],
    "temperature": [math.nan, math.inf, -math.inf, -0.1, "1", None, True, 1j, [1.0]],
    "top_k": [-2, 1.5, "4", None, True],
    "top_p": [0.0, 1.0001, -0.5, math.nan, "0.9", None, True],
    "min_p": [-0.1, 1.1, math.nan, "0.1", None],
    "seed": [-(2**63) - 1, 2**64, 1.0, "1", True],
    "max_tokens": [0, -1, 2.0, "16", True],
    "min_tokens": [-1, 17, 1.0, None, True],  # max_tokens is 16
    "ignore_eos": [1, "yes", None],
    "stop": ["", [""], ["a", ""], [1], 5, [None], {"a": 1}],
    "stop_token_ids": [[-1], ["1"], [1.0], [True], 5, "12", list(range(MAX_ALLOWED_TOKEN_IDS + 1))],
    "logprobs": [-1, MAX_LOGPROBS + 1, 1.0, "5", True],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_PARAMS.items() for value in values]
)
def test_bad_parameters(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert (
        caught.value.field == name
        and str(caught.value).startswith(f"{name}=")
        and len(caught.value.limit) > 5
    )


def test_a_parameter_that_does_not_exist() -> None:
    """The error names it, with the parameter to use instead."""
    for name, hint in {
        "best_of": "n gives several",
        "max_new_tokens": "max_tokens does this",
        "temprature": "did you mean temperature?",
    }.items():
        with pytest.raises(InvalidArgument, match=re.escape(hint)) as refused:
            SamplingParams(**{name: 2})  # type: ignore[arg-type]
        assert refused.value.field == name
        with pytest.raises(InvalidArgument, match=re.escape(hint)):
            SamplingParams().clone(**{name: 2})


def test_a_clone_is_equal_and_may_differ() -> None:
    params = SamplingParams(temperature=0.5, stop="x", logit_bias={5: 1.0})
    assert params.clone() == params == copy.deepcopy(params) == pickle.loads(pickle.dumps(params))
    assert params.clone(temperature=0.7) == SamplingParams(temperature=0.7, stop="x", logit_bias={5: 1.0})
    with pytest.raises(InvalidArgument, match="temperature=-1"):
        params.clone(temperature=-1)


@pytest.mark.parametrize(
    "options",
    [
        {"trust_remote_code": False},
        {"disable_log_stats": True},
        {"swap_space": 0},
        {"enforce_eager": False},
        {"prefix_caching_hash_algo": "sha256"},
    ],
)
def test_options_of_vllm_that_change_nothing(options: dict[str, Any]) -> None:
    assert EngineConfig.of("demo", {**options, "seed": 3}) == EngineConfig(seed=3)


def test_options_of_vllm_that_would_change_something() -> None:
    for name, value, reason in (
        ("skip_tokenizer_init", True, "always loaded"),
        ("cpu_offload_gb", 4, "not offloaded"),
    ):
        with pytest.raises(InvalidArgument, match=reason) as refused:
            EngineConfig.of("demo", {name: value})
        assert refused.value.field == name
    with pytest.raises(InvalidArgument, match="enable_prefix_caching=1: must be True or False"):
        EngineConfig.of("demo", {"enable_prefix_caching": 1})
    with pytest.warns(UserWarning, match="enforce_eager=True has no effect: programs are always compiled"):
        EngineConfig.of("demo", {"enforce_eager": True})
