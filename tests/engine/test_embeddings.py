"""Embeddings and scores equal transformers': alone, batched, in chunks, cached, preempted, and beside
generation.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jengine import LLM, AsyncLLM, InvalidArgument, PoolingParams, SamplingParams
from jengine.api.backend import EngineThread
from jengine.api.prompts import POOLED
from jengine.api.scoring import scoring_of
from jengine.core.updates import Pooled, TokenUpdate
from jengine.engine.loop.engine import Engine
from jengine.engine.setup import shapes
from jengine.serving.http.embedded import EmbeddedApi
from jengine.spi import Request
from jengine.table.program_table import ProgramTable, ScoreKey
from tests.engine.on_demand import on_demand
from tests.golden import embedding_models
from tests.golden.embedding_models import SIZE, write_embedder, write_reranker
from tests.text.conftest import byte_level, write

PAGE, LENGTH = 16, 192
OPTIONS: dict[str, Any] = {  # a step has one tile, so long prompts take several
    "max_num_seqs": 8,
    "max_num_batched_tokens": 72,
    "tile_size": 64,
    "page_size": PAGE,
    "num_pages": 60,
    "max_model_len": LENGTH,
    "embeddings": True,  # of all, so that they share programs
}
CASES = embedding_models.read()
PROMPTS: list[Any] = [case.prompt for case in CASES]
TEXTS = ["The quick brown fox", "naïve café", "The end of the story"]


@pytest.fixture(scope="module")
def make_llm(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LLM]:
    """make_llm(write, **fields): write is of embedding_models, to a new folder that also gets a tokenizer."""

    def make(write_folder: Callable[..., Path], **fields: Any) -> LLM:
        folder = write_folder(tmp_path_factory.mktemp("model"), **fields)
        with on_demand():
            return LLM(write(byte_level(), folder), progress=False, **OPTIONS)

    return make


@pytest.fixture(scope="module")
def shared(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm(write_embedder)


@pytest.fixture
def llm(shared: LLM) -> LLM:
    shared.reset_prefix_cache()
    assert not shared.engine.has_work and shared.engine.scheduler.blocks.owned == 0
    assert shared.engine.compiles_since_start == 0
    return shared


def vectors(llm: LLM, prompts: Any, **params: Any) -> list[np.ndarray]:
    return [np.array(output.outputs.embedding) for output in llm.embed(prompts, use_tqdm=False, **params)]


def assert_equal(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert 1.0 - got @ expected / (np.linalg.norm(got) * np.linalg.norm(expected)) < 1e-6


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("pooling, dimensions", [("last", None), ("last", 8), ("mean", None), ("mean", 40)])
def test_embeddings_are_transformers(pooling: str, dimensions: int | None, normalize: bool, llm: LLM) -> None:
    params: dict[str, Any] = {"pooling": pooling, "dimensions": dimensions, "normalize": normalize}
    lengths = [*llm.engine.scheduler.acceptance.lengths._latest]
    expected = [case.vector(pooling, normalize, dimensions) for case in CASES]
    for got, want in zip(vectors(llm, PROMPTS, **params), expected, strict=True):
        assert_equal(got, want)
    llm.reset_prefix_cache()
    for prompt, want in zip(PROMPTS, expected, strict=True):  # alone
        assert_equal(vectors(llm, prompt, **params)[0], want)
    assert [*llm.engine.scheduler.acceptance.lengths._latest] == lengths, "nothing is generated"


def test_after_a_prefix_hit(llm: LLM) -> None:
    llm.embed(PROMPTS, use_tqdm=False)
    again = llm.embed(PROMPTS, use_tqdm=False)
    assert [output.num_cached_tokens for output in again] == [
        (len(prompt) - 1) // PAGE * PAGE for prompt in PROMPTS
    ]
    means = llm.embed(PROMPTS, pooling="mean", use_tqdm=False)
    assert [output.num_cached_tokens for output in means] == [0] * len(PROMPTS), "a mean needs every token"
    for last, mean, case in zip(again, means, CASES, strict=True):
        assert_equal(np.array(last.outputs.embedding), case.vector("last", True, None))
        assert_equal(np.array(mean.outputs.embedding), case.vector("mean", True, None))


def run(
    engine: Engine, requests: list[Request], each_step: Callable[[int], object] = lambda step: None
) -> dict[str, list[Any]]:
    """The results for each request."""
    got: dict[str, list[Any]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.limits.validate(request)
        engine.add(request)
    steps = 0
    while engine.has_work:
        for update in engine.step():
            got[update.request_id].append(update)
        steps += 1
        each_step(steps)
        engine.scheduler.check_integrity()
    return got


def test_embeddings_of_an_engine_that_the_caller_steps(llm: LLM) -> None:
    [expected] = llm.embed([5, 6, 7], pooling="mean", normalize=True, use_tqdm=False)
    engine = llm.llm_engine
    engine.add_request("a", [5, 6, 7], PoolingParams(pooling="mean", normalize=True))
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    [output] = outputs
    assert (output.request_id, output.outputs) == ("a", expected.outputs)


def embedding_request(name: str, prompt: list[int], pooling: Any) -> Request:
    return Request(
        request_id=name, prompt_token_ids=prompt, params=POOLED, pooling=PoolingParams(pooling=pooling)
    )


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("when", [1, 2, 3])
def test_preempted(when: int, pooling: str, llm: LLM) -> None:
    """After this many of its prompt's three chunks: their results may be read before or after the
    preemption.
    """
    scheduler = llm.engine.scheduler

    def preempt(step: int) -> None:
        if step == when:
            sequence = scheduler.registry.by_id.get("a")
            assert sequence is not None and sequence.num_computed == min(64 * when, 130)
            scheduler.registry.preempt(sequence)

    (update,) = run(llm.engine, [embedding_request("a", CASES[-1].prompt, pooling)], preempt)["a"]
    assert isinstance(update, Pooled) and update.preemptions == 1
    assert_equal(np.frombuffer(update.embedding, np.float32), CASES[-1].vector(pooling, True, None))


def test_beside_requests_that_generate(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy, use_tqdm=False)]
    llm.reset_prefix_cache()
    generating = [
        Request(request_id=f"g{i}", prompt_token_ids=prompt, params=greedy)
        for i, prompt in enumerate(PROMPTS)
    ]
    embedding = [embedding_request(f"e{i}", prompt, "mean") for i, prompt in enumerate(PROMPTS)]
    got = run(llm.engine, [request for pair in zip(generating, embedding, strict=True) for request in pair])
    for i, case in enumerate(CASES):
        tokens = [update.token for update in got[f"g{i}"] if isinstance(update, TokenUpdate)]
        assert tokens == expected[i]
        (pooled,) = got[f"e{i}"]
        assert_equal(np.frombuffer(pooled.embedding, np.float32), case.vector("mean", True, None))


def test_a_prompt_may_fill_the_length(llm: LLM) -> None:
    """Unlike for a generating request, there need not be room for a token."""
    prompt = [5 + i % 300 for i in range(LENGTH)]
    assert len(vectors(llm, prompt)[0]) == SIZE
    with pytest.raises(InvalidArgument, match=f"193 tokens; at most max_model_len = {LENGTH}"):
        llm.embed([*prompt, 5], use_tqdm=False)
    with pytest.raises(
        InvalidArgument, match=f"at least {LENGTH + 1} tokens; at most max_model_len = {LENGTH}"
    ):
        llm.embed(" " * (LENGTH + 1) * (llm.tokenizer.max_token_bytes or 0), use_tqdm=False)


def test_texts_and_their_ids(llm: LLM) -> None:
    outputs = llm.embed(TEXTS, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [llm.tokenizer.encode(text) for text in TEXTS]
    assert len({output.request_id for output in outputs}) == len(TEXTS) and all(
        output.finished for output in outputs
    )
    ids: list[Any] = [output.prompt_token_ids for output in outputs]
    np.testing.assert_allclose(vectors(llm, ids), [output.outputs.embedding for output in outputs], atol=1e-5)
    assert llm.embed([], use_tqdm=False) == []


@pytest.mark.parametrize(
    "params, message",
    [
        (
            {"dimensions": SIZE + 1},
            f"dimensions={SIZE + 1}: must be at most {SIZE}, the size of this model's embeddings",
        ),
        ({"dimensions": 0}, "dimensions=0: must be a whole number, at least 1"),
        ({"dimensions": True}, "dimensions=True: must be a whole number"),
        ({"pooling": "max"}, "pooling='max': must be one of last, mean"),
        ({"normalize": 1}, "normalize=1: must be True or False"),
    ],
)
def test_what_can_not_be_is_refused(params: dict[str, Any], message: str, llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match=message):
        llm.embed([[5], [6]], use_tqdm=False, **params)
    assert not llm.engine.has_work


def test_scores_of_an_embedding_model(llm: LLM) -> None:
    embeddings = vectors(llm, TEXTS)
    scores = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    np.testing.assert_allclose(scores, [embeddings[0] @ other for other in embeddings], atol=1e-5)
    assert scores[0] == pytest.approx(1.0) and max(scores[1:]) < 0.999
    several = llm.score(TEXTS, TEXTS[::-1], use_tqdm=False)
    np.testing.assert_allclose([one.outputs.score for one in several], [scores[2], 1.0, scores[2]], atol=1e-5)
    assert several[0].prompt_token_ids == llm.tokenizer.encode(TEXTS[0]) + llm.tokenizer.encode(TEXTS[2])
    with pytest.raises(InvalidArgument, match="queries='2 queries': must be one, or as many as documents"):
        llm.score(TEXTS[:2], TEXTS)
    with pytest.raises(InvalidArgument, match=r"documents=\[\]: must be a text, or a list of at least one"):
        llm.score("a", [])
    with pytest.raises(InvalidArgument, match="instruction='x': is for rerankers"):
        llm.score("a", "b", instruction="x")


def test_scores_of_a_reranker(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(write_reranker)
    scoring = scoring_of("q?", "d.", "Be kind.", llm.engine.limits, llm.tokenizer)
    true, false = (task.params for task in scoring.tasks)
    prompt: Any = scoring.tasks[0].prompt()
    assert prompt == scoring.tasks[1].prompt()
    text = "<Instruct>: Be kind.\n<Query>: q?\n<Document>: d.\n<Answer>: "
    assert prompt["prompt_token_ids"] == llm.tokenizer.encode(text, add_special_tokens=False)
    outputs = llm.generate([p for p in PROMPTS for _ in "tf"], [true, false] * len(PROMPTS), use_tqdm=False)
    for i, case in enumerate(CASES):
        assert scoring.scores(outputs[2 * i : 2 * i + 2]) == pytest.approx([case.probability], abs=1e-4)
    assert (outputs[-1].num_cached_tokens or 0) >= 128, "both requests share what is computed"
    (scored,) = llm.score("q?", "d.", instruction="Be kind.", use_tqdm=False)
    assert scored.prompt_token_ids == prompt["prompt_token_ids"] and 0.0 < scored.outputs.score < 1.0
    others = [output.outputs.score for output in llm.score(["q?", "q?"], ["d.", "e."], use_tqdm=False)]
    assert len({scored.outputs.score, *others}) == 3
    assert llm.engine.compiles_since_start == 0
    with pytest.raises(InvalidArgument, match="at most max_model_len - 1 = 191"):
        llm.score("q?", "d. " * 1000)


def test_scores_do_not_depend_on_the_mode_of_log_probabilities(tmp_path: Path) -> None:
    folder = write(byte_level(), write_reranker(tmp_path))
    with on_demand():
        llm = LLM(folder, progress=False, **OPTIONS, logprobs_mode="processed_logprobs")
    scoring = scoring_of("q?", "d.", "Be kind.", llm.engine.limits, llm.tokenizer)
    [task] = scoring.tasks
    outputs = llm.generate(PROMPTS, task.params, use_tqdm=False)
    for output, case in zip(outputs, CASES, strict=True):
        assert scoring.scores([output]) == pytest.approx([case.probability], abs=1e-4)
    scored = llm.score("q?", ["d.", "e."], use_tqdm=False)
    assert scored[0].outputs.score != scored[1].outputs.score
    prompt: Any = task.prompt()
    bare = scoring_of("q?", "d.", None, llm.engine.limits, llm.tokenizer).tasks[0].prompt()
    assert scored[0].prompt_token_ids == bare["prompt_token_ids"] != prompt["prompt_token_ids"]  # type: ignore[call-overload,index]


@pytest.mark.parametrize("path", ["/v1/score", "/v1/rerank"])
@pytest.mark.parametrize("kind", [write_embedder, write_reranker])
def test_scores_over_http(
    kind: Callable[..., Path], path: str, shared: LLM, make_llm: Callable[..., LLM]
) -> None:
    llm = shared if kind is write_embedder else make_llm(kind)
    expected = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    texts = ("text_1", "text_2") if path == "/v1/score" else ("query", "documents")

    async def main() -> dict[str, Any]:
        online = AsyncLLM.over(EngineThread(llm.engine), llm.tokenizer)
        api = EmbeddedApi(online, "tiny")
        try:
            reply = await api.post(
                path, json.dumps(dict(zip(texts, (TEXTS[0], TEXTS), strict=True))).encode()
            )
        finally:
            api.close()
            await online.close()
        answer: dict[str, Any] = json.loads(reply.body)
        return answer

    answer = asyncio.run(main())
    if path == "/v1/score":
        scores = [one["score"] for one in answer["data"]]
    else:
        scores = [
            one["relevance_score"] for one in sorted(answer["results"], key=lambda one: int(one["index"]))
        ]
        assert [one["relevance_score"] for one in answer["results"]] == sorted(scores, reverse=True)
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert len(set(scores)) == len(TEXTS)


def test_a_checkpoint_without_an_output_head_embeds_only(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(write_embedder, pooling="mean_tokens", normalize=False, tie_word_embeddings=False)
    assert_equal(vectors(llm, PROMPTS[1])[0], CASES[1].mean)  # as its files say
    with pytest.raises(
        InvalidArgument, match=r"max_tokens=16: nothing can be generated: this checkpoint has no output head"
    ):
        llm.generate(PROMPTS[1], use_tqdm=False)


def test_async(llm: LLM) -> None:
    async def main() -> None:
        online = AsyncLLM.over(EngineThread(llm.engine), llm.tokenizer)
        outputs = await asyncio.gather(
            *[online.embed(prompt, pooling="mean", request_id=f"r{i}") for i, prompt in enumerate(PROMPTS)]
        )
        for output, case in zip(outputs, CASES, strict=True):
            assert_equal(np.array(output.outputs.embedding), case.vector("mean", True, None))
        assert [output.request_id for output in outputs] == ["r0", "r1", "r2", "r3"]
        with pytest.raises(InvalidArgument, match="dimensions=65"):
            await online.embed(PROMPTS[0], dimensions=65)
        await online.close()

    asyncio.run(main())


def test_trunks_with_few_tiles_share_what_processes_their_hidden_states(
    llm: LLM, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs: one scorer and one pooler serve trunks with one tile and with four."""
    table = ProgramTable((8,), (8,), (1, 4), 16, pooling=True, first_tiles=4, variants=("sample", "full"))
    monkeypatch.setattr(shapes, "make_table", lambda *args: table)
    monkeypatch.setitem(OPTIONS, "tile_size", 16)
    few = make_llm(write_embedder)
    assert few.engine.scheduler.table.scores() == [ScoreKey(4)]
    for pooling in "last", "mean":
        for prompt, case in zip(PROMPTS, CASES, strict=True):
            assert_equal(vectors(few, prompt, pooling=pooling)[0], case.vector(pooling, True, None))
    params = SamplingParams(prompt_logprobs=0, max_tokens=1, temperature=0.0)
    prompts = [{"prompt_token_ids": tokens} for tokens in (PROMPTS[0][:9], PROMPTS[-1])]
    both = [one.generate(prompts, params, use_tqdm=False) for one in (few, llm)]
    for got, want in zip(*both, strict=True):
        assert got.prompt_logprobs is not None and want.prompt_logprobs is not None
        for ours, theirs in zip(got.prompt_logprobs[1:], want.prompt_logprobs[1:], strict=True):
            assert ours is not None and theirs is not None and ours.keys() == theirs.keys()
            assert all(abs(ours[token].logprob - theirs[token].logprob) < 1e-4 for token in ours)
