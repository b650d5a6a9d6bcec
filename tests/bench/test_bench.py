"""`jengine bench`: its requests, measurements and protocols."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jengine import InvalidArgument, JengineError, cli
from jengine.capacity.bench.endpoints import JengineEndpoint, OpenAIEndpoint, drive
from jengine.capacity.bench.result import ClientRecord, Result
from jengine.capacity.bench.workload import (
    BenchRequest,
    random_requests,
    sharegpt_requests,
    sharegpt_turns,
    trace_requests,
    with_arrivals,
)

# --- what is asked for ------------------------------------------------------------------------------


def test_random_requests() -> None:
    requests = random_requests(200, input_len=100, output_len=20, range_ratio=0.5, prefix_len=7, seed=3)
    assert requests == random_requests(
        200, input_len=100, output_len=20, range_ratio=0.5, prefix_len=7, seed=3
    )
    lengths = [len(request.prompt) - 7 for request in requests]
    assert (
        50 <= min(lengths) < 60
        and 140 < max(lengths) <= 150
        and {10, 30} <= {request.output for request in requests} <= {*range(10, 31)}
    )
    assert (
        len({tuple(request.prompt[:7]) for request in requests}) == 1
        and len({tuple(request.prompt) for request in requests}) == 200
    )
    assert {
        (len(request.prompt), request.output) for request in random_requests(5, input_len=9, output_len=4)
    } == {(9, 4)}
    for bad in ({"input_len": 0}, {"output_len": 0}, {"prefix_len": -1}, {"range_ratio": 1.0}):
        with pytest.raises(InvalidArgument, match=next(iter(bad))):
            random_requests(1, **{"input_len": 5, "output_len": 5, **bad})  # type: ignore[arg-type]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals(burstiness: float) -> None:
    requests = with_arrivals([BenchRequest([1], 1)] * 20_000, rate=50.0, burstiness=burstiness, seed=1)
    pauses = np.diff([request.at for request in requests])  # type: ignore[arg-type]
    assert requests[0].at == 0.0 and pauses.min() >= 0.0
    assert pauses.mean() == pytest.approx(1 / 50, rel=0.1)
    assert (pauses.std() / pauses.mean()) ** 2 == pytest.approx(1 / burstiness, rel=0.15), (
        "gamma: the less, the burstier"
    )


def test_arrivals_at_once() -> None:
    assert {request.at for request in with_arrivals([BenchRequest([1], 1, 5.0)] * 3, rate=float("inf"))} == {
        None
    }
    for bad in ({"rate": 0.0}, {"rate": -1.0}, {"rate": 1.0, "burstiness": 0.0}):
        with pytest.raises(InvalidArgument, match="must be above 0"):
            with_arrivals([BenchRequest([1], 1)], **bad)


def test_sharegpt(tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.json"
    turns = [
        ("a b c d e", "f g h i"),
        ("too short", "a b c d"),
        ("a b c d", "no"),
        ("b c d e f g", "h i j k l"),
    ]
    file.write_text(json.dumps([{"conversations": [{"from": "human", "value": q},
        {"from": "gpt", "value": a}]} for q, a in turns]
                               + [{"conversations": [{"from": "human",
                                   "value": "alone in here it is"}]}]))  # fmt: skip

    def tokens(text: str) -> int:
        return len(text.split())

    found = sharegpt_turns(file, 10)
    assert sorted(found) == sorted(turns)
    assert {(request.prompt, request.output) for request in sharegpt_requests(found, 5, tokens)} == {
        ("a b c d e", 4),
        ("b c d e f g", 5),
    }
    assert len(sharegpt_requests(found, 5, tokens)) == 5
    assert {request.output for request in sharegpt_requests(found, 5, tokens, output_len=2)} == {2}
    with pytest.raises(InvalidArgument, match="no conversation"):
        sharegpt_requests(found, 5, lambda text: 5000)
    file.write_text("[1]")
    with pytest.raises(InvalidArgument, match="must be a ShareGPT file"):
        sharegpt_turns(file, 1)


def test_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000 * i, "input_length": 5 + i, "output_length": 2 + i, "hash_ids": [i]}
        for i in range(3)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [(len(request.prompt), request.output, request.at) for request in trace_requests(file, 2)] == [
        (5, 2, 0.0),
        (6, 3, 1.0),
    ]


# --- what is measured -------------------------------------------------------------------------------


def test_latencies() -> None:
    one = ClientRecord(1.0, [1.5, 1.6, 2.0], [1, 1, 2], prompt_tokens=10)
    assert (one.ttft, one.e2el, one.output_tokens) == (0.5, 1.0, 4)
    assert one.tpot == pytest.approx(0.5 / 3) and one.itl == pytest.approx([0.1, 0.2, 0.2])
    single = ClientRecord(0.0, [0.25], [1], prompt_tokens=3)
    assert single.tpot is None and single.itl == []
    result = Result(
        [one, single, ClientRecord(0.0, error="gone")],
        2.0,
        {"ttft": 300.0, "tpot": 100.0},
        (50, 99),
        ("ttft", "tpot", "e2el"),
    )
    facts = result.to_dict()
    assert (
        facts["completed"],
        facts["failed"],
        facts["total_input_tokens"],
        facts["total_output_tokens"],
    ) == (2, 1, 13, 5)
    assert (facts["request_throughput"], facts["output_throughput"], facts["request_goodput"]) == (
        1.0,
        2.5,
        0.5,
    )
    assert (
        facts["mean_ttft_ms"] == 375.0
        and facts["p99_ttft_ms"] == pytest.approx(497.5)
        and facts["median_tpot_ms"] == pytest.approx(500 / 3)
    )
    assert (
        "mean_itl_ms" not in facts and "P99 E2EL (ms):" in str(result) and "Failed requests:" in str(result)
    )


def test_a_plot(tmp_path: Path) -> None:
    result = Result([ClientRecord(0.0, [0.5, 0.6], [1, 2])], 1.0)
    result.save_plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidArgument, match=r"plot=.*cannot be written"):
        result.save_plot(tmp_path / "plot.nothing")


class Counting:
    """Answers with two tokens, and rejects prompts that begin with 13."""

    def __init__(self) -> None:
        self.running = self.most = 0

    async def stream(self, request: BenchRequest) -> AsyncIterator[tuple[int, int]]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if request.prompt[0] == 13:
                raise JengineError("refused")
            for _ in range(request.output):
                await asyncio.sleep(0.001)
                yield 1, 0
        finally:
            self.running -= 1

    async def tokens(self, text: str) -> int:
        return 1

    async def close(self) -> None:
        pass


def test_driving() -> None:
    endpoint, ended = Counting(), []
    requests = [BenchRequest([i, 5], 2) for i in range(20)]
    answers, seconds = asyncio.run(drive(endpoint, requests, max_concurrency=4, done=lambda: ended.append(1)))
    assert endpoint.most == 4 and len(ended) == 20 and endpoint.running == 0
    assert [bool(answer.error) for answer in answers] == [
        i == 13 for i in range(20)
    ] and "refused" in answers[13].error
    assert all(
        answer.tokens == [1, 1] and answer.prompt_tokens == 2 and answer.times[-1] <= seconds
        for answer in answers
        if not answer.error
    )
    timed, _ = asyncio.run(drive(Counting(), [BenchRequest([1], 1, 0.0), BenchRequest([1], 1, 0.05)]))
    assert [answer.due for answer in timed] == [0.0, 0.05] and timed[1].times[0] > 0.05


# --- servers ----------------------------------------------------------------------------------------


def test_a_server_by_each_protocol(
    make_server: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with make_server(server={"port": 0}) as server:
        url = server.http.removesuffix("/v1")
        for arguments in (
            ["--base-url", url],
            ["--base-url", url, "--backend", "openai-chat"],
            ["--base-url", server.address, "--backend", "jengine"],
        ):
            more = [
                "--num-prompts",
                "6",
                "--random-input-len",
                "20",
                "--random-output-len",
                "5",
                "--request-rate",
                "500",
            ]
            files = ["--save-result", "--result-dir", str(tmp_path), "--goodput", "ttft:60000"]
            assert cli.main(["bench", "serve", *arguments, *more, *files, "--json", "--disable-tqdm"]) == 0
            facts = json.loads(capsys.readouterr().out)
            assert (facts["completed"], facts["failed"], facts["total_output_tokens"]) == (
                6,
                0,
                30,
            ), arguments
            assert facts["request_goodput"] == facts["request_throughput"] > 0.0
            assert json.loads((tmp_path / "bench_serve.json").read_text()) == facts
            if "openai-chat" not in arguments:
                assert facts["total_input_tokens"] == 120
        assert (
            cli.main(
                [
                    "bench",
                    "serve",
                    "--base-url",
                    url,
                    "--num-prompts",
                    "2",
                    "--model",
                    "other",
                    "--disable-tqdm",
                ]
            )
            == 1
        )
        shown = capsys.readouterr()
        assert "Failed requests:" in shown.out and "404" in shown.err

        async def tokens() -> list[int]:
            endpoints = OpenAIEndpoint(url, "/v1/completions", None), JengineEndpoint(server.address)
            try:
                return [await endpoint.tokens("some words") for endpoint in endpoints]
            finally:
                for endpoint in endpoints:
                    await endpoint.close()

        assert len({*asyncio.run(tokens())}) == 1
        server.wait_until_idle()


def test_hosts_of_ipv6_have_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    async def opened(host: str, port: int, **options: object) -> tuple[asyncio.StreamReader, Any]:
        reader = asyncio.StreamReader()
        reader.feed_data(b"HTTP/1.1 200 OK\r\n\r\n{}")
        reader.feed_eof()
        return reader, SimpleNamespace(write=sent.append, close=lambda: None)

    sent: list[bytes] = []
    monkeypatch.setattr(asyncio, "open_connection", opened)
    for url in ("http://[::1]:8000", "http://localhost:8000"):
        with pytest.raises(KeyError):
            asyncio.run(OpenAIEndpoint(url, "/v1/completions", "m").tokens("x"))
    assert b"\r\nHost: [::1]:8000\r\n" in sent[0] and b"\r\nHost: localhost:8000\r\n" in sent[1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["serve", "--base-url", "nowhere"], "base_url='nowhere'"),
        (["serve", "--goodput", "itl:5"], "goodput='itl:5'"),
        (["serve", "--goodput", "ttft:-5"], "goodput='ttft:-5'"),
        (["serve", "--percentile-metrics", "speed"], "percentile_metrics='speed'"),
        (["serve", "--metric-percentiles", "101"], "metric_percentiles='101'"),
        (["serve", "--max-concurrency", "0"], "max_concurrency=0"),
        (["serve", "--num-prompts", "0"], "num_prompts=0"),
        (["serve", "--port", "9"], "base_url='127.0.0.1:9': no server of this kind answers there: "),
        (["serve", "--port", "9", "--backend", "jengine"], "base_url='127.0.0.1:9': no server of this kind"),
        (["serve", "--base-url", "http://localhost:80x"], "base_url='http://localhost:80x': must be http://"),
        (["serve", "--dataset-name", "sharegpt"], "dataset_path=None"),
        (["serve", "--dataset-path", "x"], "dataset_path="),
        (["serve", "--tls"], "tls=True"),
        (["serve", "--backend", "jengine", "--model", "m"], "model='m'"),
        (["serve", "--save-result", "--result-dir", "/nowhere"], "result_filename="),
        (["latency", "--num-iters", "0"], "num_iters=0"),
        (["throughput", "--output-json", "/nowhere/x"], "output_json="),
    ],
)
def test_what_cannot_be_measured(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err
