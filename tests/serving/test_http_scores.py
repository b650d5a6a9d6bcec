"""/v1/score and /v1/rerank, in the forms of vLLM's, Jina's and Cohere's clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from jengine import RequestOutput
from jengine.spi import Embedder, Limits, Reranker, SequenceLimits, scoring_of
from tests.golden.embedding_models import TEMPLATE
from tests.serving.conftest import MockServer, serve_mock
from tests.text.conftest import byte_level, write

SIZE = 8
QUERY, DOCUMENTS = "The quick brown fox", ["zzzz zzz", "The quick brown dog", "a"]


@pytest.fixture(scope="module")
def server(tokenizer_folder: Path) -> Iterator[MockServer]:
    options = {"port": 0, "max_waiting": 5, "max_streams_per_client": 6}
    with serve_mock(
        tokenizer_folder, server=options, embedding_size=SIZE, max_num_seqs=1, max_model_len=10_000
    ) as server:
        yield server
        server.wait_until_idle()


def post(server: MockServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.http[:-3]}{path}", json=body, timeout=60)


def cosine(server: MockServer, one: str, other: str) -> float:
    """Of the mock engine's embeddings."""
    a, b = (
        np.bincount(np.array(server.llm.tokenizer.encode(text)) % SIZE, minlength=SIZE)
        for text in (one, other)
    )
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def lengths(server: MockServer, *texts: str) -> int:
    return sum(len(server.llm.tokenizer.encode(text)) for text in texts)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
def test_scores(path: str, names: tuple[str, str], server: MockServer) -> None:
    forms: list[tuple[Any, Any, list[tuple[str, str]]]] = [
        (QUERY, "a", [(QUERY, "a")]),
        (QUERY, DOCUMENTS, [(QUERY, document) for document in DOCUMENTS]),
        ([QUERY], DOCUMENTS, [(QUERY, document) for document in DOCUMENTS]),
        ([QUERY, "b", "c"], DOCUMENTS, [*zip([QUERY, "b", "c"], DOCUMENTS, strict=True)]),
    ]
    for left, right, pairs in forms:
        answer = post(server, path, {"model": "mock", names[0]: left, names[1]: right}).json()
        assert (answer["object"], answer["model"], answer["id"][:6]) == ("list", "mock", "score-"), answer
        assert [(one["index"], one["object"]) for one in answer["data"]] == [
            (i, "score") for i in range(len(pairs))
        ]
        expected = [cosine(server, *pair) for pair in pairs]
        assert [one["score"] for one in answer["data"]] == pytest.approx(expected, rel=1e-6)
        texts = {text for pair in pairs for text in pair}
        used = answer["usage"]
        assert (used["prompt_tokens"], used["completion_tokens"]) == (lengths(server, *texts), 0), (
            "each text is computed once"
        )


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_ranking(path: str, server: MockServer) -> None:
    body: dict[str, Any] = {
        "model": "mock",
        "query": QUERY,
        "documents": DOCUMENTS,
        "request_id": "mine",
        "user": "me",
    }
    answer = post(server, path, body)
    assert answer.headers["x-request-id"] == "mine"
    reply = answer.json()
    scores = [cosine(server, QUERY, document) for document in DOCUMENTS]
    order = sorted(range(len(DOCUMENTS)), key=lambda i: -scores[i])
    assert (reply["id"], reply["model"], order[0]) == ("rerank-mine", "mock", 1)
    assert [one["index"] for one in reply["results"]] == order
    assert [one["document"] for one in reply["results"]] == [{"text": DOCUMENTS[i]} for i in order]
    assert [one["relevance_score"] for one in reply["results"]] == pytest.approx(
        [scores[i] for i in order], rel=1e-6
    )
    assert reply["usage"]["total_tokens"] == lengths(server, QUERY, *DOCUMENTS)
    objects = [{"text": document} for document in DOCUMENTS]
    assert post(server, path, {**body, "documents": objects}).json()["results"] == reply["results"]
    best = post(server, path, {**body, "top_n": 2, "return_documents": False}).json()["results"]
    assert best == [
        {name: one[name] for name in ("index", "relevance_score")} for one in reply["results"][:2]
    ]
    for top in (0, 3, 100):
        assert post(server, path, {**body, "top_n": top}).json()["results"] == reply["results"]


def test_more_texts_than_a_client_may_have_at_once(server: MockServer) -> None:
    documents = [f"text {i}" for i in range(16)]
    scores = post(server, "/score", {"text_1": QUERY, "text_2": documents}).json()["data"]
    expected = [cosine(server, QUERY, document) for document in documents]
    assert [one["score"] for one in scores] == pytest.approx(expected)
    ranks = post(server, "/rerank", {"query": QUERY, "documents": documents}).json()["results"]
    assert ranks[0]["relevance_score"] == pytest.approx(max(expected))
    long = post(server, "/score", {"text_1": QUERY, "text_2": [*documents, " ".join("c" * 11_000)]})
    assert (long.status_code, long.json()["error"]["param"]) == (400, "text_2[16]"), long.text
    server.wait_until_idle()


def test_a_score_is_at_most_one() -> None:
    vectors = np.random.default_rng(0).normal(size=(999, 3)).astype(np.float32)
    outputs = [RequestOutput(request_id="", prompt=None, prompt_token_ids=[], outputs=[]) for _ in vectors]
    for output, vector in zip(outputs, vectors, strict=True):
        output.embedding = vector / np.linalg.norm(vector)
    limits = Limits(
        sequence=SequenceLimits(max_model_len=8, page_size=1, pages=8),
        max_num_seqs=1,
        vocab_size=9,
        eos_token_ids=(),
        embedder=Embedder(size=3),
    )
    scoring = scoring_of("a", "b", None, limits, None)  # type: ignore[arg-type]
    assert all(-1.0 <= scoring.score(one, one) <= 1.0 for one in outputs)


PAIR = {"text_1": "a", "text_2": "b"}
RANK = {"query": "a", "documents": ["b", "c"]}


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/score", {}, "text_1"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"queries": "a"}, "documents"),
        ("/score", {**PAIR, "queries": "a"}, "queries"),
        ("/score", {**PAIR, "text_2": []}, "text_2"),
        ("/score", {**PAIR, "text_2": ["b", 5]}, "text_2[1]"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        ("/score", {**PAIR, "text_1": ""}, "text_1"),
        ("/score", {**PAIR, "text_2": ["b", ""]}, "text_2[1]"),
        ("/score", {**PAIR, "text_2": ["b"] * 2049}, "text_2"),
        ("/score", {**PAIR, "temperature": 1.0}, "temperature"),
        ("/score", {**PAIR, "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ("/score", {**PAIR, "instruction": "Be kind."}, "instruction"),
        ("/rerank", {"documents": ["b"]}, "query"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {**RANK, "documents": []}, "documents"),
        ("/rerank", {**RANK, "documents": "b"}, "documents"),
        ("/rerank", {**RANK, "documents": ["b", {"text": "c", "image": "d"}]}, "documents[1].image"),
        ("/rerank", {**RANK, "documents": ["b", " ".join("c" * 11_000)]}, "documents[1]"),
        ("/rerank", {**RANK, "documents": ["b"] * 2049}, "documents"),
        ("/rerank", {**RANK, "query": ["a"]}, "query"),
        ("/rerank", {**RANK, "top_n": -1}, "top_n"),
        ("/rerank", {**RANK, "top_n": True}, "top_n"),
        ("/rerank", {**RANK, "max_tokens_per_doc": 5}, "max_tokens_per_doc"),
    ],
)
def test_what_is_refused(path: str, body: dict[str, Any], param: str, server: MockServer) -> None:
    answer = post(server, path, {"model": "mock", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    server.wait_until_idle()


def test_another_model(server: MockServer) -> None:
    assert post(server, "/score", {"model": "other", **PAIR}).status_code == 404


def test_limits_of_a_client(tokenizer_folder: Path) -> None:
    """Every text takes a place, so one client's documents leave room for others."""
    options = {"port": 0, "max_streams_per_client": 6}
    long = {"model": "mock", "prompt": "a", "n": 4, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with serve_mock(
        tokenizer_folder, server=options, embedding_size=SIZE, max_num_seqs=1, seconds=0.005
    ) as server:
        with httpx.stream("POST", f"{server.http}/completions", json=long, timeout=60) as stream:
            lines = stream.iter_lines()  # kept, since its end closes the connection
            next(lines)
            answer = post(server, "/rerank", {**RANK, "documents": ["b", "c"]})
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1, answer.text
            late = post(server, "/rerank", {**RANK, "documents": ["b"], "timeout": 0.0})
            assert late.status_code == 504 and "timeout" in late.json()["error"]["message"], late.text
        server.wait_until_idle()
        assert post(server, "/rerank", {**RANK, "documents": ["b", "c"]}).status_code == 200


def test_a_model_that_cannot_score(tokenizer_folder: Path) -> None:
    with serve_mock(tokenizer_folder, server={"port": 0}) as server:
        for path, body in (("/v1/score", PAIR), ("/v1/rerank", RANK)):
            error = post(server, path, body).json()["error"]
            assert (
                error["param"] == "embeddings" and "cross-encoders are not supported" in error["message"]
            ), error


def test_a_reranker(tmp_path: Path) -> None:
    folder: Path = write(byte_level(), tmp_path)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    reranker = Reranker(true_token_id=5, false_token_id=7)
    with serve_mock(folder, server={"port": 0, "max_message_bytes": 12_000}, reranker=reranker) as server:
        answer = post(server, "/v1/rerank", {**RANK, "instruction": "Be kind."}).json()
        assert [(one["index"], one["relevance_score"]) for one in answer["results"]] == [
            (0, 0.5),
            (1, 0.5),
        ], answer
        prompts = [f"<Instruct>: Be kind.\n<Query>: a\n<Document>: {document}" for document in "bc"]
        tokens = sum(len(server.llm.tokenizer.encode(prompt, add_special_tokens=False)) for prompt in prompts)
        assert answer["usage"]["prompt_tokens"] == tokens, "each prompt counts once"
        long = post(server, "/v1/score", {"text_1": "a", "text_2": ["b", "c " * 5000]})
        assert (long.status_code, long.json()["error"]["param"]) == (400, "text_2[1]"), long.text
        many = post(server, "/v1/rerank", {"query": "a" * 1000, "documents": ["b"] * 12})
        assert (many.status_code, many.json()["error"]["param"]) == (400, "query"), many.text
        assert "12012 characters in all prompts" in many.json()["error"]["message"], many.text
        server.wait_until_idle()
