"""Protos and plain data: the generated code is that of the protos, every parameter crosses, unset and zero
differ.
"""

from __future__ import annotations

import dataclasses
import json
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

import jengine
from jengine import BeamSearchParams, InvalidArgument, SamplingParams, StructuredOutputs
from jengine.api.chat import ChatOptions
from jengine.serving.generated.jengine.v1 import generate_pb2 as pb
from jengine.serving.grpc import conversions
from jengine.serving.grpc.conversions import NO_LIMIT, from_params, to_params
from tools import make_protos

DEFAULTS = SamplingParams()
TEXTS = st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3).map(tuple)
IDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5).map(tuple)
BOOLS = st.booleans()


def reals(low: float, high: float, **options: Any) -> SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False, **options)


WITHOUT_STOP = {
    "n": st.integers(1, jengine.core.request.MAX_SAMPLES),
    "temperature": reals(0.0, 1e6, exclude_min=True),
    "top_k": st.integers(-1, 2**31 - 1),
    "top_p": reals(0.0, 1.0, exclude_min=True),
    "min_p": reals(0.0, 1.0),
    "seed": st.none() | st.integers(-(2**63), 2**64 - 1),
    "max_tokens": st.none() | st.integers(100, NO_LIMIT - 1),
    "min_tokens": st.integers(0, 16),
    "ignore_eos": BOOLS,
    "stop_token_ids": IDS,
    "repetition_penalty": reals(0.0, 1e6, exclude_min=True),
    "presence_penalty": reals(-2.0, 2.0),
    "frequency_penalty": reals(-2.0, 2.0),
    "logit_bias": st.none()
    | st.dictionaries(st.integers(0, 2**32 - 1), reals(-1e30, 1e30), min_size=1, max_size=4),
    "allowed_token_ids": st.none() | IDS,
    "bad_words": TEXTS,
    "structured_outputs": st.none()
    | st.builds(StructuredOutputs, regex=st.text())
    | st.builds(StructuredOutputs, json=st.text())
    | st.builds(StructuredOutputs, grammar=st.text())
    | st.builds(StructuredOutputs, choice=st.lists(st.text(min_size=1), min_size=1).map(list)),
    "thinking_token_budget": st.none() | st.integers(0, 2**31 - 1),
    "include_stop_str_in_output": BOOLS,
    "skip_special_tokens": BOOLS,
    "logprobs": st.none() | st.integers(0, 20),
    "prompt_logprobs": st.none() | st.integers(0, 20),
}
FIELDS = WITHOUT_STOP | {"stop": TEXTS, "detokenize": st.just(True)}
ANY = st.fixed_dictionaries({}, optional=FIELDS) | st.fixed_dictionaries(
    {}, optional=WITHOUT_STOP | {"detokenize": BOOLS}
)


def test_generated_code_is_that_of_the_protos(tmp_path: Path) -> None:
    make_protos.make(tmp_path)
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.py*")}
    kept = {
        path.relative_to(make_protos.ROOT): path.read_bytes()
        for path in (make_protos.ROOT / make_protos.PACKAGE).rglob("*.py")
    }
    kept |= {
        path.relative_to(make_protos.ROOT): path.read_bytes()
        for path in (make_protos.ROOT / make_protos.PACKAGE).rglob("*.pyi")
    }
    assert len(made) == 5 and made == kept, "make protos, and commit what it made"


def test_the_proto_has_every_parameter() -> None:
    fields = pb.SamplingParams.DESCRIPTOR.fields_by_name
    parameters = {f.name for f in dataclasses.fields(SamplingParams)} - {"output_kind"}
    assert set(fields) == parameters | {"use_beam_search", "length_penalty"} and parameters == set(FIELDS)
    for field in fields.values():
        assert field.is_repeated or field.has_presence, f"{field.name}: an unset scalar would be a zero"
    assert {f.name for f in pb.StructuredOutputs.DESCRIPTOR.fields} == {
        f.name for f in dataclasses.fields(StructuredOutputs)
    }
    options = {f.name.removesuffix("_json") for f in pb.ChatOptions.DESCRIPTOR.fields}
    assert options | {"cache_salt"} == set(ChatOptions.__annotations__), (
        "cache_salt is a field of the requests"
    )


@given(ANY)
def test_parameters_cross(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    proto = pb.SamplingParams.FromString(from_params(params).SerializeToString())
    back = to_params(proto)
    if params.seed is not None:
        assert back.seed is not None and (back.seed - params.seed) % 2**64 == 0, (
            "all 64 bits count, not the sign"
        )
        params, back = (dataclasses.replace(one, seed=0) for one in (params, back))
    assert back == params
    other = DEFAULTS.clone(
        temperature=0.25, top_p=0.5, top_k=3, min_p=0.5, repetition_penalty=2.0, max_tokens=3
    )
    again = to_params(proto, other)
    assert again.clone(seed=None) == to_params(proto).clone(seed=None), (
        "what a model recommends replaces nothing that was given"
    )


BEAMS = st.fixed_dictionaries(
    {"beam_width": st.integers(1, 10), "max_tokens": st.integers(1, NO_LIMIT - 1)},
    optional={
        "ignore_eos": BOOLS,
        "temperature": reals(0.0, 1e6),
        "length_penalty": reals(-10.0, 10.0),
        "include_stop_str_in_output": BOOLS,
    },
)


@given(BEAMS)
def test_beam_searches_cross(fields: dict[str, Any]) -> None:
    params = BeamSearchParams(**fields)
    proto = pb.SamplingParams.FromString(from_params(params).SerializeToString())
    assert (
        to_params(proto)
        == to_params(proto, DEFAULTS.clone(temperature=0.25, top_p=0.5, max_tokens=3))
        == params
    )


@pytest.mark.parametrize(
    "fields, field, limit",
    [
        ({"length_penalty": 2.0}, "length_penalty", "needs use_beam_search"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p", "must not be set with use_beam_search"),
        ({"use_beam_search": True, "logprobs": 0}, "logprobs", "must not be set with use_beam_search"),
        ({"use_beam_search": True, "stop": ["x"]}, "stop", "must not be set with use_beam_search"),
        ({"use_beam_search": True, "n": 11}, "n", "at most 10"),
        ({"use_beam_search": True, "max_tokens": NO_LIMIT}, "max_tokens", "whole number"),
    ],
)
def test_beam_searches_take_what_they_have(fields: dict[str, Any], field: str, limit: str) -> None:
    with pytest.raises(InvalidArgument, match=limit) as wrong:
        to_params(pb.SamplingParams(**fields))
    assert wrong.value.field == field


def test_a_beam_search_has_the_models_max_tokens_and_its_own_temperature() -> None:
    recommended = DEFAULTS.clone(max_tokens=9, temperature=0.5, top_k=3)
    given = to_params(pb.SamplingParams(use_beam_search=True, n=3, top_p=1.0), recommended)
    assert given == BeamSearchParams(beam_width=3, max_tokens=9)


def test_the_models_defaults_fill_what_is_unset() -> None:
    recommended = SamplingParams(temperature=0.25, top_k=3, max_tokens=9)
    assert to_params(pb.SamplingParams(), recommended) == recommended
    assert to_params(pb.SamplingParams(top_k=0, max_tokens=NO_LIMIT), recommended) == SamplingParams(
        temperature=0.25, max_tokens=None
    )
    sent = from_params(SamplingParams(temperature=1.0), {"temperature"})
    assert to_params(sent, recommended) == recommended.clone(temperature=1.0)


def test_unset_is_the_default_and_zero_is_zero() -> None:
    assert to_params(pb.SamplingParams()) == DEFAULTS
    zeros = {
        "temperature": 0.0,
        "seed": 0,
        "logprobs": 0,
        "prompt_logprobs": 0,
        "skip_special_tokens": False,
        "min_p": 0.0,
        "top_k": 0,
    }
    assert to_params(pb.SamplingParams(**zeros)) == SamplingParams(**zeros)
    for name in ("max_tokens", "n"):
        with pytest.raises(InvalidArgument) as wrong:
            to_params(pb.SamplingParams(**{name: 0}))
        assert wrong.value.field == name
    assert to_params(pb.SamplingParams(max_tokens=NO_LIMIT)).max_tokens is None


def test_a_schema_may_be_a_dict() -> None:
    schema = {"type": "object", "properties": {"é": {"type": "string"}}}
    proto = from_params(SamplingParams(structured_outputs={"json": schema}))
    assert json.loads(proto.structured_outputs.json) == schema
    with pytest.raises(InvalidArgument) as wrong:
        to_params(pb.SamplingParams(structured_outputs=pb.StructuredOutputs()))
    assert wrong.value.field == "structured_outputs"


@pytest.mark.parametrize(
    "field, value",
    [
        ("top_k", 2**31),
        ("max_tokens", 10**12),
        ("stop_token_ids", [2**32]),
        ("stop", "\ud800"),
        ("logit_bias", {2**32: 1.0}),
    ],
)
def test_what_does_not_fit_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as wrong:
        from_params(SamplingParams(**{field: value}))
    assert wrong.value.field == field


@given(st.text(alphabet=string.printable, max_size=30))
def test_json_options(text: str) -> None:
    """Anything but an array is rejected; the error names the field."""
    try:
        fits = isinstance(json.loads(text), list)
    except ValueError:
        fits = False
    options = pb.ChatOptions(tools_json=text)
    if fits:
        assert conversions.to_options(options) == {"tools": json.loads(text)}
    else:
        with pytest.raises(InvalidArgument) as wrong:
            conversions.to_options(options)
        assert wrong.value.field == "options.tools_json"
