"""LLM: prompts in every form, results with vLLM's types, and invalid input rejected before anything is
queued.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from jengine import LLM, InvalidArgument, ModelError, RequestOutput, SamplingParams
from jengine.api.metrics import Counter, Gauge, Histogram
from jengine.core.request import MAX_LOGPROBS, CompletionOutput
from jengine.execution.programs import program_keys
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL
from tests.golden.weights import VARIANTS, uniform, weights
from tests.text.conftest import byte_level, write

# 11 pages hold less than a sequence of max_model_len, so that a request can be too large for the pool.
OPTIONS: dict[str, Any] = {**SMALL, "num_pages": 12, "max_model_len": 192}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=60)
TEXT = "The quick brown fox"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a tokenizer and its vocabulary."""
    folder: Path = tmp_path_factory.mktemp("llm")
    tokenizer = byte_level()
    vocab = tokenizer.get_vocab_size()
    config = {**VARIANTS["llama_tied"], "vocab_size": vocab}
    table = 0.5 * uniform("embeddings", vocab * config["hidden_size"]).reshape(vocab, -1)
    save_file(
        {**weights("llama_tied"), "model.embed_tokens.weight": table.astype("float32")},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(config))
    return write(tokenizer, folder)


@pytest.fixture(scope="module")
def shared(folder: Path) -> LLM:
    with on_demand():
        return LLM(folder, progress=False, **OPTIONS)


@pytest.fixture
def llm(shared: LLM) -> LLM:
    """One LLM for all tests. Each must leave it idle."""
    assert_idle(shared)
    return shared


def assert_idle(llm: LLM) -> None:
    llm.engine.scheduler.check_integrity()
    assert not llm.engine.has_work and llm.engine.scheduler.blocks.owned == 0


def complete(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> CompletionOutput:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


# vLLM's names.


def test_a_caller_may_step_the_engine(llm: LLM) -> None:
    """Each kind of outputs, several samples, an abort; then a call of the LLM that steps for both."""
    engine, kinds = llm.llm_engine, ("cumulative", "delta", "final")
    assert engine is llm.llm_engine and engine.step() == [] and not engine.has_unfinished_requests()
    expected = complete(llm, TEXT)
    for number, kind in enumerate(kinds):
        engine.add_request(str(number), TEXT, GREEDY.clone(output_kind=kind))
    engine.add_request("two", "The end", SAMPLED.clone(n=2, seed=9, max_tokens=5), priority=1)
    engine.add_request("never", "The end", SAMPLED)
    with pytest.raises(InvalidArgument, match="request_id='two': is in use"):
        engine.add_request("two", TEXT)
    with pytest.raises(InvalidArgument, match="must be a SamplingParams"):
        engine.add_request("wrong", TEXT, 5)  # type: ignore[arg-type]
    assert engine.get_num_unfinished_requests() == 5
    engine.abort_request(["never", "unknown"])
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    by_id = {name: [output for output in outputs if output.request_id == name] for name in "012"}
    assert len(by_id["0"]) > 3 and len(by_id["2"]) == 1
    texts = [output.outputs[0].text for output in by_id["0"]]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    for name in "02":
        assert by_id[name][-1].outputs[0].token_ids == expected.token_ids and by_id[name][-1].finished
    assert "".join(output.outputs[0].text for output in by_id["1"]) == expected.text
    assert [token for output in by_id["1"] for token in output.outputs[0].token_ids] == expected.token_ids
    [both] = [output for output in outputs if output.request_id == "two" and output.finished]
    assert [len(completion.token_ids) for completion in both.outputs] == [5, 5]
    engine.add_request("0", TEXT, GREEDY)
    assert complete(llm, TEXT).token_ids == expected.token_ids
    assert [output.finished for output in engine.step()] == [True]
    assert_idle(llm)


def test_metrics(llm: LLM) -> None:
    complete(llm, TEXT)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    assert all(name.startswith("vllm:") for name in metrics)
    assert metrics["vllm:num_requests_running"] == Gauge(
        "vllm:num_requests_running", {"model_name": llm.model}, 0
    )
    queries = metrics["vllm:prefix_cache_queries"]
    assert isinstance(queries, Counter) and queries.value > 0
    steps = metrics["vllm:iteration_tokens_total"]
    assert isinstance(steps, Histogram) and steps.count == steps.buckets["+Inf"] > 0 and steps.sum > 0


# Prompts and results.


def test_every_form_of_a_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode(TEXT)
    forms: list[Any] = [TEXT, ids, {"prompt_token_ids": ids}, {"prompt": TEXT}]
    outputs = [llm.generate(form, GREEDY, use_tqdm=False) for form in [*forms, *([form] for form in forms)]]
    outputs.append(llm.generate(forms, GREEDY, use_tqdm=False))
    assert [len(output) for output in outputs] == [1] * 8 + [4]
    flat = [output for several in outputs for output in several]
    assert len({tuple(output.outputs[0].token_ids) for output in flat}) == 1
    assert all(output.prompt_token_ids == ids for output in flat)
    assert [output.prompt for output in flat] == [TEXT, None, None, TEXT] * 3
    assert ids == llm.tokenizer.encode(TEXT), "the caller's list was changed"


def test_no_prompts_no_results(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == []


def test_results_in_the_order_of_the_prompts(llm: LLM) -> None:
    """More than run at once, of lengths such that later ones end first."""
    prompts = [[5 + i] * (1 + 7 * i % 40) for i in range(20)]
    params = [SamplingParams(temperature=0.0, max_tokens=30 - i) for i in range(20)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [30 - i for i in range(20)]
    assert len({output.request_id for output in outputs}) == 20
    for i in (0, 11, 19):
        assert complete(llm, prompts[i], params[i]).token_ids == outputs[i].outputs[0].token_ids


def test_one_params_for_all_or_one_each(llm: LLM) -> None:
    short, long = (SamplingParams(temperature=0.0, max_tokens=n) for n in (2, 5))

    def lengths(params: Any) -> list[int]:
        return [
            len(output.outputs[0].token_ids)
            for output in llm.generate([TEXT, "The end", TEXT], params, use_tqdm=False)
        ]

    assert lengths(short) == [2, 2, 2]
    assert lengths([short, long, short]) == lengths((short, long, short)) == [2, 5, 2]
    assert lengths(None) == [16, 16, 16]


def test_shape_of_a_result(llm: LLM) -> None:
    output = llm.generate(TEXT, GREEDY, use_tqdm=False)[0]
    assert isinstance(output, RequestOutput) and output.finished and len(output.outputs) == 1
    completion = output.outputs[0]
    assert completion.index == 0 and len(completion.token_ids) == 24
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert completion.logprobs is None and completion.cumulative_logprob is None
    assert completion.text == llm.tokenizer.decode(completion.token_ids)


@pytest.mark.parametrize("count", [0, 1, MAX_LOGPROBS])
def test_shape_of_logprobs(count: int, llm: LLM) -> None:
    completion = complete(llm, TEXT, SamplingParams(temperature=1.0, seed=1, max_tokens=20, logprobs=count))
    assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids) == 20
    total = 0.0
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        chosen = entry[token]
        total += chosen.logprob
        assert all(
            one.logprob <= 0 and one.decoded_token == llm.tokenizer.token_text(other)
            for other, one in entry.items()
        )
        assert next(iter(entry)) == token
        assert sorted(one.rank for one in entry.values()) == sorted({*range(1, count + 1), chosen.rank})
        assert [one.logprob for one in sorted(entry.values(), key=lambda one: one.rank)] == sorted(
            (one.logprob for one in entry.values()), reverse=True
        )
    assert completion.cumulative_logprob == pytest.approx(total)


def test_a_model_without_embeddings_names_the_option(llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match="embeddings=False: must be True when the engine starts"):
        llm.embed(TEXT)
    with pytest.raises(
        InvalidArgument,
        match=r"embeddings=False: this model cannot score: .* cross-encoders are not supported",
    ):
        llm.score(TEXT, TEXT)


# Streams.


def test_a_stream_grows_to_what_generate_gives(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, logprobs=1)
    texts, lengths, last = [], [], None
    for output in llm.stream(TEXT, params):
        assert last is None or output is last
        last = output
        texts.append(output.outputs[0].text)
        lengths.append(len(output.outputs[0].token_ids))
        assert output.finished == (lengths[-1] == 40)
    assert lengths == list(range(1, 41))
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert len(set(texts)) > 20, "the text came all at once"
    assert last is not None and last.outputs[0] == complete(llm, TEXT, params)


def test_closing_a_stream_aborts(llm: LLM) -> None:
    stream = llm.stream(TEXT, SamplingParams(temperature=0.0, max_tokens=100))
    seen = [next(stream) for _ in range(5)]
    assert llm.engine.scheduler.blocks.owned > 0
    stream.close()
    assert_idle(llm)
    assert seen[-1].finished and seen[-1].outputs[0].finish_reason == "abort"


def test_leaving_a_stream_aborts(llm: LLM) -> None:
    for _ in llm.stream(TEXT, SamplingParams(temperature=0.0, max_tokens=100)):
        break
    assert_idle(llm)
    with pytest.raises(RuntimeError, match="the reader's own"):
        for _ in llm.stream(TEXT):
            raise RuntimeError("the reader's own")
    assert_idle(llm)


def test_a_stream_that_nobody_reads_queues_nothing(llm: LLM) -> None:
    stream = llm.stream(TEXT)
    assert not llm.engine.has_work
    del stream
    assert_idle(llm)


def test_streams_and_generate_at_once(llm: LLM) -> None:
    """Interleaved in one program: each gives the same as alone."""
    params = SamplingParams(temperature=1.0, seed=8, max_tokens=30)
    alone = [complete(llm, prompt, params).token_ids for prompt in (TEXT, "The end", "of")]
    first, second = llm.stream(TEXT, params), llm.stream("The end", params)
    outputs = [next(first), next(second), next(second)]
    assert complete(llm, "of", params).token_ids == alone[2]
    outputs[1:] = [*list(second), outputs[0]]
    assert outputs[0].outputs[0].finish_reason is None or outputs[0].finished
    (*_, end) = first
    assert end.outputs[0].token_ids == alone[0]
    assert outputs[1].outputs[0].token_ids == alone[1]
    assert_idle(llm)


def test_a_stream_takes_one_prompt(llm: LLM) -> None:
    for prompts in ([TEXT, "The end"], [[1, 2], [3]]):
        with pytest.raises(InvalidArgument, match=r"must be one prompt: .*; generate takes several"):
            llm.stream(prompts)  # type: ignore[arg-type]


def test_what_a_stream_showed_grows_only_when_more_is_asked_for(llm: LLM) -> None:
    stream = llm.stream(TEXT, GREEDY)
    output = next(stream)
    complete(llm, "The end")  # which steps the stream's request, too
    assert len(output.outputs[0].token_ids) == 1
    assert next(stream) is output and len(output.outputs[0].token_ids) > 2
    stream.close()


# Stop strings.


def test_stop_strings_anywhere(llm: LLM) -> None:
    """Every three characters of an output as a stop: within a token, across a border, more than once in the
    text.
    """
    whole = complete(llm, TEXT, SAMPLED)
    stops = sorted({whole.text[i : i + 3] for i in range(len(whole.text) - 2)})
    work = [SamplingParams(temperature=1.0, seed=3, max_tokens=60, stop=stop) for stop in stops]
    crossing = 0
    for stop, output in zip(stops, llm.generate([TEXT] * len(work), work, use_tqdm=False), strict=True):
        got = output.outputs[0]
        assert (got.finish_reason, got.stop_reason) == ("stop", stop)
        assert got.text == whole.text[: whole.text.index(stop)]
        assert got.token_ids == whole.token_ids[: len(got.token_ids)]
        assert stop in llm.tokenizer.decode(got.token_ids)
        # A broken character shows only when the next token has come.
        assert "\ufffd" in stop or stop not in llm.tokenizer.decode(got.token_ids[:-1]), (
            "it ran on after the stop"
        )
        crossing += all(stop not in llm.tokenizer.decode([token]) for token in got.token_ids)
    assert len(stops) > 30 and crossing > 10


def test_the_first_of_several_stop_strings(llm: LLM) -> None:
    text = complete(llm, TEXT, SAMPLED).text
    early, late = text[5:8], text[-6:-2]
    assert text.index(early) < text.index(late)
    for stop in ([early, late], [late, "never in it", early]):
        got = complete(llm, TEXT, SamplingParams(temperature=1.0, seed=3, max_tokens=60, stop=stop))
        assert (got.text, got.finish_reason, got.stop_reason) == (text[: text.index(early)], "stop", early)


def test_text_held_back_for_a_stop_string_comes_in_the_end(llm: LLM) -> None:
    whole = complete(llm, TEXT, SAMPLED)
    got = complete(
        llm,
        TEXT,
        SamplingParams(temperature=1.0, seed=3, max_tokens=60, stop=whole.text[-2:] + "never in it"),
    )
    assert (got.text, got.finish_reason, got.stop_reason) == (whole.text, "length", None)


def test_min_tokens_holds_for_stop_strings(llm: LLM) -> None:
    whole = complete(llm, TEXT, SAMPLED)
    stop = whole.text[1:3]
    early = complete(llm, TEXT, SamplingParams(temperature=1.0, seed=3, max_tokens=60, stop=stop))
    least = len(early.token_ids) + 3
    late = complete(
        llm, TEXT, SamplingParams(temperature=1.0, seed=3, max_tokens=60, stop=stop, min_tokens=least)
    )
    assert len(early.token_ids) < least <= len(late.token_ids)
    assert late.token_ids[:least] == whole.token_ids[:least] and stop in late.text


def test_a_stop_tokens_text_is_left_out(llm: LLM) -> None:
    whole = complete(llm, TEXT, SAMPLED)
    at = next(i for i in range(5, 60) if whole.token_ids[i] not in whole.token_ids[:i])
    token = whole.token_ids[at]
    got = complete(llm, TEXT, SamplingParams(temperature=1.0, seed=3, max_tokens=60, stop_token_ids=[token]))
    assert got.token_ids == whole.token_ids[: at + 1] and (got.finish_reason, got.stop_reason) == (
        "stop",
        token,
    )
    assert got.text == llm.tokenizer.decode(whole.token_ids[:at])


# Bad input.

BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "no ids": ({"prompt_token_ids": []}, "must not be empty"),
    "an empty list": ([[]], "must not be empty"),
    "too long": ([[7] * 192], "192 tokens; at most max_model_len - 1 = 191"),
    "too long a text": ("The end " * 200, "tokens; at most max_model_len - 1 = 191"),
    "outside the vocabulary": ([1, 400, 2], "prompt_token_ids=400: ids must be in [0, 400)"),
    "huge": ([1, 2**70], "ids must be in [0, 400)"),
    "negative": ([3, -1], "prompt_token_ids=-1: ids must be in [0, 400)"),
    "floats": ({"prompt_token_ids": [1.0, 2.0]}, "whole numbers"),
    "texts for ids": ({"prompt_token_ids": ["a"]}, "whole numbers"),
    "bools": ([True, False], "whole numbers"),
    "a number": (5, "must be a prompt or a list of prompts"),
    "nothing": (None, "must be a prompt or a list of prompts"),
    "a list of numbers and texts": ([1, "a"], "must be text, a list of token ids, {"),
    "bytes": ([b"The end"], "must be text, a list of token ids, {"),
    "ids that are no list": ({"prompt_token_ids": 5}, "must be text, a list of token ids, {"),
    "another key": ({"text": "The end"}, "must be text, a list of token ids, {"),
    "a text prompt without text": ({"prompt": b"The end"}, "must be text"),
    "half a character": ("\ud800", "must be text that UTF-8 can encode"),
}


@pytest.mark.parametrize(("prompt", "limit"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_bad_prompts(prompt: Any, limit: str, llm: LLM) -> None:
    def refused(call: Callable[[], object], limit: str = limit) -> None:
        with pytest.raises(InvalidArgument) as caught:
            call()
        assert limit in str(caught.value) and caught.value.field in ("prompt", "prompts", "prompt_token_ids")
        assert_idle(llm)

    refused(lambda: llm.generate(prompt, GREEDY, use_tqdm=False))
    if isinstance(prompt, str | dict):
        refused(lambda: llm.generate([TEXT, prompt, TEXT], GREEDY, use_tqdm=False))
        refused(lambda: llm.stream(prompt, GREEDY))
    assert len(complete(llm, TEXT).token_ids) == 24, "the engine works on"


@pytest.mark.parametrize(
    ("params", "field", "limit"),
    [
        ([GREEDY], "sampling_params", "must be one, or as many as prompts (2)"),
        ([GREEDY] * 3, "sampling_params", "must be one, or as many as prompts (2)"),
        ([], "sampling_params", "must be one, or as many as prompts (2)"),
        ({"temperature": 0.0}, "sampling_params", "must be a SamplingParams"),
        ([GREEDY, 0.5], "sampling_params", "must be a SamplingParams"),
        ([GREEDY, SamplingParams(stop_token_ids=[400])], "stop_token_ids", "ids must be in [0, 400)"),
        (
            [GREEDY, SamplingParams(max_tokens=180)],
            "max_tokens",
            "need 12 pages of 16 tokens; the cache has 11",
        ),
        (
            [GREEDY, SamplingParams(max_tokens=None)],
            "max_tokens",
            "need 12 pages of 16 tokens; the cache has 11",
        ),
    ],
)
def test_bad_parameters_for_prompts(params: Any, field: str, limit: str, llm: LLM) -> None:
    with pytest.raises(InvalidArgument) as caught:
        llm.generate([TEXT, TEXT], params, use_tqdm=False)
    assert caught.value.field == field and limit in str(caught.value)
    assert_idle(llm)
    assert len(complete(llm, TEXT).token_ids) == 24


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_num_seq": 4}, "there is no such option; did you mean max_num_seqs?"),
    ({"quantization": "awq"}, "this checkpoint is not quantized; None keeps weights as they are"),
    ({"max_num_seqs": 0}, "at least 1"),
    ({"max_num_seqs": "8"}, "whole number"),
    ({"max_num_seqs": True}, "whole number"),
    (
        {"max_num_seqs": 8, "tile_size": 64, "max_num_batched_tokens": 71},
        "must be at least max_num_seqs + tile_size = 72",
    ),
    ({"tile_size": 0}, "at least 1"),
    ({"page_size": 0}, "at least 1"),
    ({"num_pages": 1}, "at least 2"),
    ({"max_model_len": 0}, "at least 1"),
    ({"max_model_len": 257}, "must be at most 256, the model's number of positions"),
    ({"dtype": "int8"}, "must be one of auto, float32"),
    ({"policy": "random"}, "must be one of fcfs, priority, fair"),
    ({"priority_ageing": -1.0}, "a finite number, at least 0"),
    ({"strategy": "speed"}, "must be one of throughput, latency, memory, auto"),
    ({"ttft_ms": 0}, "a finite number of milliseconds above 0"),
    ({"tpot_ms": math.inf}, "a finite number of milliseconds above 0"),
    ({"on_late": "drop"}, "must be one of serve, reject"),
    ({"batching": "sometimes"}, "must be one of continuous, dynamic, static"),
    ({"batching": "static", "strategy": "auto"}, "must be continuous with strategy=auto"),
    ({"batch_wait_ms": math.nan}, "a finite number, at least 0"),
    ({"kv_cache_memory": "much"}, "number of bytes"),
    ({"kv_cache_memory": -1}, "number of bytes"),
    ({"gpu_memory_utilization": 1.5}, "in (0, 1]"),
    ({"gpu_memory_utilization": math.nan}, "in (0, 1]"),
    ({"gpu_memory_utilization": "0.9"}, "in (0, 1]"),
    ({"seed": 1.5}, "whole number"),
    ({"overlap": "no"}, "True or False"),
    ({"tokenizer": 5}, "text or a path"),
    ({"cache_dir": 5}, "text or a path"),
    ({"compile_threads": 0}, "at least 1"),
    ({"cpu_threads": 0}, "at least 1"),
    ({"tensor_parallel_size": 0}, "at least 1"),
]


@pytest.mark.parametrize(
    ("options", "limit"), BAD_OPTIONS, ids=lambda case: "-".join(case) if isinstance(case, dict) else None
)
def test_bad_options(options: dict[str, Any], limit: str, folder: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        LLM(folder, progress=False, **options)
    assert limit in str(caught.value) and caught.value.field in options


def test_unreadable_models(folder: Path, tmp_path: Path) -> None:
    def refused(path: Path | str, reason: str, **options: Any) -> None:
        with pytest.raises(ModelError, match=reason) as caught, on_demand():
            LLM(path, progress=False, **OPTIONS, **options)
        assert caught.value.file is not None

    refused(tmp_path / "nowhere", "there is no such folder")
    refused("./nowhere", "there is no such folder")
    refused(tmp_path, "config.json: is missing")
    config = (folder / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    refused(tmp_path, "safetensors")
    data = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    refused(tmp_path, "model.safetensors")
    refused(folder, "tokenizer", tokenizer=str(tmp_path))


# The start.


def test_stats(llm: LLM) -> None:
    stats = llm.stats
    assert stats["programs_compiled"] + stats["programs_loaded"] == len(program_keys(llm.engine.runner.spec))  # type: ignore[attr-defined]
    assert {"weights", "programs", "warm-up", "tokenizer"} <= set(stats["start_seconds"]) and stats[
        "preemptions"
    ] >= 0
