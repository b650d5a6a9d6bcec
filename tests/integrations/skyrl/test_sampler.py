"""SkyRL's own batches and results, against LLM.generate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jengine import LLM, RequestOutput, SamplingParams
from jengine.checkpoints.folder import DEMO
from tests.engine.loras import prompts
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL
from tests.extras import of_extra
from tests.golden.loras import Lora, lora, write_lora

of_extra("skyrl", "skyrl")

from skyrl.tinker import types  # noqa: E402
from skyrl.utils.storage import pack_and_upload  # noqa: E402

from jengine.integrations.skyrl.sampler import JengineSampler, _answer  # noqa: E402

OPTIONS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "weight_updates": True}
LONG, SHORT = prompts(2, 9)[0], prompts(2, 9)[1][:4]
GREEDY = types.SamplingParams(temperature=0.0, max_tokens=6, seed=0)
SEEDED = types.SamplingParams(temperature=0.9, max_tokens=6, seed=3, top_k=40, top_p=0.9)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with on_demand(), LLM("demo", progress=False, max_model_len=128, **SMALL, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def sampler(llm: LLM) -> Iterator[JengineSampler]:
    sampler = JengineSampler(llm)
    yield sampler
    for info in llm.loras.list():
        llm.loras.unload(info.name)


def adapter(name: str) -> Lora:
    return lora("llama_gqa", "plain", name, config=json.loads((DEMO / "config.json").read_text()))


def archive(folder: Path, name: str) -> str:
    """A file as SkyRL's save_sampler_checkpoint writes it."""
    path = folder / f"{name}.tar.gz"
    with pack_and_upload(path) as content:
        write_lora(content, adapter(name))
    return str(path)


def request(tokens: list[int], params: Any = GREEDY, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"tokens": [tokens], "params": params, "count": count, **more}


def batch(**requests: dict[str, Any]) -> types.PreparedSampleBatch:
    """As SkyRL's engine prepares requests."""
    rows: list[tuple[Any, ...]] = []
    slices = []
    for name, one in requests.items():
        start = len(rows)
        chunks = one.get("chunks") or [types.EncodedTextChunk(tokens=tokens) for tokens in one["tokens"]]
        model, checkpoint = one.get("model", ""), one.get("checkpoint", "")
        for index in range(one["count"]):
            params = one["params"].model_copy(update={"seed": one["params"].seed + index})
            rows.append((types.ModelInput(chunks=chunks), params, model, checkpoint, one.get("path", "")))
        scored, top = one.get("prompt_logprobs", False), one.get("top", 0)
        slices.append((name, model, start, len(rows), scored, top))
    inputs, params, models, checkpoints, paths = ([row[at] for row in rows] for at in range(5))
    return types.PreparedSampleBatch(
        all_model_inputs=inputs,
        all_sampling_params=params,
        all_model_ids=models,
        all_checkpoint_ids=checkpoints,
        all_checkpoint_paths=paths,
        all_session_ids=[None] * len(rows),
        needs_prompt_logprobs=any(one[4] for one in slices),
        request_batch_slices=slices,
    )


def generated(llm: LLM, tokens: list[int], adapter: str | None = None, **params: Any) -> RequestOutput:
    how = SamplingParams(max_tokens=6, logprobs=0, ignore_eos=True, **params)
    return llm.generate(tokens, how, lora_request=adapter, use_tqdm=False)[0]


def assert_same(found: Any, output: RequestOutput) -> None:
    completion = output.outputs[0]
    assert found.tokens == completion.token_ids
    assert found.stop_reason == completion.finish_reason
    assert completion.logprobs is not None
    expected = [entry[token].logprob for token, entry in zip(found.tokens, completion.logprobs, strict=True)]
    np.testing.assert_allclose(found.logprobs, expected, atol=1e-5)


def answer(results: Any, name: str) -> Any:
    assert isinstance(results[name], types.SampleOutput), results[name]
    return results[name]


def error(results: Any, name: str) -> str:
    assert isinstance(results[name], types.ErrorResponse), results[name]
    text: str = results[name].error
    return text


def test_samples_are_those_of_generate(sampler: JengineSampler, llm: LLM) -> None:
    """Of the base model, of an adapter from a trainer's arrays, and seeded ones, in one batch."""
    given = adapter("a")
    assert sampler.load("m", "1", config=given.config, tensors=given.tensors).name == "m"
    results = sampler.sample(
        batch(
            base=request(LONG),
            adapted=request(LONG, model="m", checkpoint="1"),
            seeded=request(SHORT, SEEDED, count=3),
            split={**request(LONG), "tokens": [LONG[:4], LONG[4:]]},
        )
    )
    [base], [adapted] = answer(results, "base").sequences, answer(results, "adapted").sequences
    assert_same(base, generated(llm, LONG, temperature=0.0))
    assert_same(adapted, generated(llm, LONG, "m", temperature=0.0))
    assert base.tokens != adapted.tokens
    assert answer(results, "split").sequences[0].tokens == base.tokens
    seeded = answer(results, "seeded").sequences
    assert len({tuple(one.tokens) for one in seeded}) > 1
    for number, one in enumerate(seeded):
        assert_same(one, generated(llm, SHORT, temperature=0.9, top_k=40, top_p=0.9, seed=3 + number))
    assert answer(results, "base").prompt_logprobs is None
    assert sampler.sample(batch()) == {}


def test_log_probabilities_of_prompts(sampler: JengineSampler, llm: LLM) -> None:
    results = sampler.sample(
        batch(
            scored=request(LONG, SEEDED, count=2, prompt_logprobs=True),
            top=request(SHORT, prompt_logprobs=True, top=3),
            only=request(SHORT, top=2),
        )
    )
    entries = generated(llm, LONG, temperature=0.0, prompt_logprobs=0).prompt_logprobs or []
    first, *rest = answer(results, "scored").prompt_logprobs
    expected = [entry[token].logprob for token, entry in zip(LONG[1:], entries[1:], strict=True) if entry]
    assert first is None and len(answer(results, "scored").sequences) == 2
    np.testing.assert_allclose(rest, expected, atol=1e-5)
    assert answer(results, "scored").topk_prompt_logprobs is None

    first, *rest = answer(results, "top").topk_prompt_logprobs
    entries = generated(llm, SHORT, temperature=0.0, prompt_logprobs=3).prompt_logprobs or []
    assert first is None and len(answer(results, "top").prompt_logprobs) == len(SHORT)
    for position, entry in zip(rest, entries[1:], strict=True):
        assert [token for token, _ in position] == sorted(entry, key=lambda one: entry[one].rank)[:3]
        assert position[0][1] >= position[1][1] >= position[2][1]
    assert answer(results, "only").prompt_logprobs is None
    assert [len(one) for one in answer(results, "only").topk_prompt_logprobs[1:]] == [2] * (len(SHORT) - 1)


def test_samples_end_at_stop_tokens_and_strings_and_keep_them(sampler: JengineSampler, llm: LLM) -> None:
    tokens = generated(llm, LONG, temperature=0.0).outputs[0].token_ids
    text = llm.tokenizer.decode(tokens[:3], skip_special_tokens=False)
    results = sampler.sample(
        batch(
            token=request(LONG, GREEDY.model_copy(update={"stop_tokens": [tokens[2]]})),
            string=request(LONG, GREEDY.model_copy(update={"stop_strings": [text[-1]]})),
        )
    )
    [at_token], [at_string] = answer(results, "token").sequences, answer(results, "string").sequences
    assert (at_token.tokens, at_token.stop_reason) == (tokens[: tokens.index(tokens[2]) + 1], "stop")
    assert at_string.stop_reason == "stop" and at_string.tokens == tokens[: len(at_string.tokens)]
    said = llm.tokenizer.decode(at_string.tokens, skip_special_tokens=False)
    before = llm.tokenizer.decode(at_string.tokens[:-1], skip_special_tokens=False)
    assert text[-1] in said and text[-1] not in before
    assert len(at_string.logprobs) == len(at_string.tokens)


def test_checkpoints_are_read_from_their_files(sampler: JengineSampler, llm: LLM, tmp_path: Path) -> None:
    first, second = archive(tmp_path, "first"), archive(tmp_path, "second")
    asked = {"model": "m", "checkpoint": "1", "path": first}
    one = answer(sampler.sample(batch(r=request(LONG, **asked))), "r").sequences[0]
    given = adapter("first")
    llm.loras.load("same", config=given.config, tensors=given.tensors)
    assert_same(one, generated(llm, LONG, "same", temperature=0.0))

    Path(first).unlink()  # it is loaded
    assert answer(sampler.sample(batch(r=request(LONG, **asked))), "r").sequences[0].tokens == one.tokens
    new = {**asked, "checkpoint": "2", "path": second}
    two = answer(sampler.sample(batch(r=request(LONG, **new))), "r").sequences[0]
    assert two.tokens != one.tokens and [info.name for info in llm.loras.list()] == ["same", "m"]

    assert "first.tar.gz: cannot be read" in error(sampler.sample(batch(r=request(LONG, **asked))), "r")
    both = sampler.sample(batch(new=request(LONG, **new), old=request(LONG, **asked)))
    assert "checkpoint_id='1': must be 2: a batch uses one checkpoint of a model" in error(both, "old")
    assert answer(both, "new").sequences[0].tokens == two.tokens
    lost = sampler.sample(batch(old=request(LONG, **asked), new=request(LONG, **new)))
    assert "first.tar.gz: cannot be read" in error(lost, "old")
    assert answer(lost, "new").sequences[0].tokens == two.tokens
    sampler.unload("m")
    sampler.unload("m")
    assert [info.name for info in llm.loras.list()] == ["same"]
    no_archive = tmp_path / "none.tar.gz"
    no_archive.write_text("no archive")
    bad = sampler.sample(batch(r=request(LONG, **{**asked, "path": str(no_archive)})))
    assert "none.tar.gz: cannot be read" in error(bad, "r")


def test_requests_that_cannot_be_answered_fail_alone(sampler: JengineSampler) -> None:
    image = types.ImageAssetPointerChunk(format="png", location="https://example.com/a.png")
    results = sampler.sample(
        batch(
            fine=request(LONG),
            image={**request(LONG), "chunks": [image]},
            empty=request([]),
            long=request(LONG * 20),
            unknown=request([10**6]),
            cold=request(LONG, GREEDY.model_copy(update={"temperature": -1.0})),
            none=request(LONG, GREEDY.model_copy(update={"max_tokens": 0})),
            most=request(LONG, top=10**6),
            no_checkpoint=request(LONG, model="m"),
            no_file=request(LONG, model="m", checkpoint="1"),
            no_samples=request(LONG, count=0),
        )
    )
    assert len(answer(results, "fine").sequences[0].tokens) == 6
    for name, says in {
        "image": "chunks='image_asset_pointer': must be encoded_text",
        "empty": "prompt",
        "long": "max_model_len",
        "unknown": "1000000",
        "cold": "temperature=-1.0",
        "none": "max_tokens=0",
        "most": "prompt_logprobs=1000000",
        "no_checkpoint": "checkpoint_id='': must name a checkpoint of m",
        "no_file": "checkpoint 1 of m is not loaded, and has no file",
        "no_samples": "num_samples=0",
    }.items():
        assert says in error(results, name), (name, results[name])
        assert results[name].status == "error"


def test_a_model_that_is_trained_as_a_whole(sampler: JengineSampler, llm: LLM) -> None:
    base = answer(sampler.sample(batch(r=request(LONG))), "r").sequences[0]
    weights = load_file(DEMO / "model.safetensors")
    weights = {name: array.astype(np.float32) for name, array in weights.items()}
    sampler.update_weights({name: 0.8 * array for name, array in weights.items()}, "m", "1")
    assert llm.weights_version == "m/1"
    results = sampler.sample(batch(new=request(LONG, model="m", checkpoint="1"), base=request(LONG)))
    [new] = answer(results, "new").sequences
    assert_same(new, generated(llm, LONG, temperature=0.0))
    assert new.logprobs != base.logprobs
    assert "must be m/1, whose weights the engine has" in error(results, "base")
    sampler.update_weights(weights)
    assert llm.weights_version == "base"
    again = answer(sampler.sample(batch(r=request(LONG))), "r").sequences[0]
    assert again.tokens == base.tokens


def test_samples_of_a_paused_engine_are_errors(sampler: JengineSampler, llm: LLM) -> None:
    """The engine says why it has ended them."""
    streamed = llm.stream(LONG, SamplingParams(max_tokens=100, ignore_eos=True))
    next(streamed)
    llm.pause()
    ended = [*streamed][-1]
    llm.resume()
    found = _answer([ended], scored=False, top=0)
    assert "abort: paused" in error({"r": found}, "r")
