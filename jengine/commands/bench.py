"""`jengine bench`: throughput and latency of a model or a server, with the options of `vllm bench`."""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jengine import InvalidArgument, SamplingParams
from jengine.base.progress import progress_bar
from jengine.commands.connection import add_connection, client_options
from jengine.commands.flags import add_engine, add_flags, engine_fields
from jengine.commands.terminal import check_output, json_text, note, write, write_json

if TYPE_CHECKING:
    from jengine.capacity.bench.endpoints import ServerUnderTest
    from jengine.capacity.bench.workload import BenchRequest

BACKENDS = ("openai", "openai-chat", "jengine")
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
INFINITE = float("inf")
METRICS = ("ttft", "tpot", "itl", "e2el")
RANKS = (10, 25, 50, 75, 90, 99)


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure a local model or a server",
        description="Throughput and latency of a local model or a server, with options as in `vllm bench`.",
    )
    parser.set_defaults(run=lambda _: parser.print_help())
    kinds = parser.add_subparsers(metavar="KIND")
    _add_throughput(kinds)
    _add_latency(kinds)
    _add_serve(kinds)
    _add_gpu(kinds)


# --- workload -------------------------------------------------------------------------------------


def _add_dataset(parser: argparse.ArgumentParser, prefix: str) -> None:
    group = parser.add_argument_group("requests")
    text = (
        "random token ids, a ShareGPT file's first turns, or a trace's arrivals and lengths (see "
        "`jengine simulate`)"
    )
    add_flags(
        group,
        ("--num-prompts", "N", "requests", 1000),
        ("--dataset-name", ("random", "sharegpt", "trace"), text, "random"),
        ("--dataset-path", "FILE", "file for sharegpt or trace"),
    )
    for name, default in (("input", 1024), ("output", 128)):
        group.add_argument(
            f"--{prefix}{name}-len",
            dest=f"{name}_len",
            metavar="N",
            type=int,
            default=default,
            help=f"tokens of a random request's {name} (default: {default})",
        )
    add_flags(
        group,
        ("--random-range-ratio", "NUMBER", "relative range of lengths around the mean", 0.0),
        ("--random-prefix-len", "N", "additional tokens of a common prefix", 0),
        ("--sharegpt-output-len", "N", "tokens of each answer (default: as in the file)"),
        ("--seed", "N", "", 0),
    )


def _requests(options: argparse.Namespace, tokens: Any) -> list[BenchRequest]:
    """The requests. tokens: how many a text has."""
    from jengine.capacity.bench.workload import (
        random_requests,
        sharegpt_requests,
        sharegpt_turns,
        trace_requests,
    )

    count, seed, name, path = options.num_prompts, options.seed, options.dataset_name, options.dataset_path
    if count < 1:
        raise InvalidArgument("num_prompts", count, "must be at least 1")
    if (path is None) != (name == "random"):
        raise InvalidArgument(
            "dataset_path",
            path,
            f"{'cannot be used with' if path else 'must be given with'} dataset_name={name}",
        )
    if name == "random":
        lengths = {"input_len": options.input_len, "output_len": options.output_len}
        shape = {"range_ratio": options.random_range_ratio, "prefix_len": options.random_prefix_len}
        return random_requests(count, **lengths, **shape, seed=seed)
    if name == "trace":
        return trace_requests(path, count, seed)
    return sharegpt_requests(sharegpt_turns(path, count, seed), count, tokens, options.sharegpt_output_len)


# --- in this process ----------------------------------------------------------------------------------


def _add_offline(kinds: Any, name: str, help: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(name, help=help, description=help)
    add_flags(
        parser,
        ("--model", "MODEL", "`demo`, a folder in Hugging Face's layout, or a hub id", "demo"),
        ("--n", "N", "completions of each prompt", 1),
        ("--output-json", "FILE", "save the result"),
    )
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bars")
    return parser


def _add_throughput(kinds: Any) -> None:
    parser = _add_offline(
        kinds, "throughput", "tokens a second of a model in this process, with all requests at the same time"
    )
    _add_dataset(parser, prefix="")
    add_engine(parser)
    parser.set_defaults(run=_throughput)


def _throughput(options: argparse.Namespace) -> None:
    fields = engine_fields(options)
    check_output("output_json", options.output_json)
    from jengine import LLM

    show = not options.disable_tqdm
    with LLM(options.model, progress=show, **fields) as llm:
        llm.wait_until_compiled()
        requests = _requests(options, lambda text: len(llm.tokenizer.encode(text)))
        params, start = _params(requests, options.n), time.perf_counter()
        outputs = llm.generate([request.prompt for request in requests], params, use_tqdm=show)
        seconds = time.perf_counter() - start
    for output in outputs:
        output.require_answer()
    prompts = sum(len(output.prompt_token_ids) for output in outputs)
    tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    result = {  # names as in `vllm bench throughput --output-json`
        "elapsed_time": seconds,
        "num_requests": len(requests),
        "total_num_tokens": prompts + tokens,
        "total_output_tokens": tokens,
        "requests_per_second": len(requests) / seconds,
        "tokens_per_second": (prompts + tokens) / seconds,
        "output_tokens_per_second": tokens / seconds,
    }
    rates = (
        f"{result['tokens_per_second']:.2f} total tokens/s, {result['output_tokens_per_second']:.2f} output"
        " tokens/s"
    )
    write(f"Throughput: {result['requests_per_second']:.2f} requests/s, {rates}\n")
    _save(options.output_json, result)


def _add_latency(kinds: Any) -> None:
    parser = _add_offline(kinds, "latency", "seconds of a batch of requests in this process")
    defaults = {"input-len": 32, "output-len": 128, "batch-size": 8, "num-iters-warmup": 10, "num-iters": 30}
    add_flags(parser, *((f"--{name}", "N", "", default) for name, default in defaults.items()))
    add_engine(parser)
    parser.set_defaults(run=_latency)


def _latency(options: argparse.Namespace) -> None:
    fields = engine_fields(options)
    check_output("output_json", options.output_json)
    for name, least in (("batch_size", 1), ("num_iters", 1), ("num_iters_warmup", 0)):
        if getattr(options, name) < least:
            raise InvalidArgument(name, getattr(options, name), f"must be at least {least}")
    import numpy as np

    from jengine import LLM
    from jengine.capacity.bench.workload import random_requests

    show = not options.disable_tqdm
    requests = random_requests(options.batch_size, input_len=options.input_len, output_len=options.output_len)
    params = _params(requests, options.n)
    with LLM(options.model, progress=show, **fields) as llm:
        llm.wait_until_compiled()

        def once() -> float:
            """Runs a batch, without cached pages."""
            llm.reset_prefix_cache()
            start = time.perf_counter()
            llm.generate([request.prompt for request in requests], params, use_tqdm=False)
            return time.perf_counter() - start

        for _ in range(options.num_iters_warmup):
            once()
        rounds = progress_bar(range(options.num_iters), desc="measuring", unit="batch", show=show)
        latencies = [once() for _ in rounds]
    average = float(np.mean(latencies))
    percentiles = {str(rank): float(np.percentile(latencies, rank)) for rank in RANKS}
    write(f"Avg latency: {average:.4f} seconds\n")
    for rank, seconds in percentiles.items():
        write(f"{rank}% percentile latency: {seconds:.4f} seconds\n")
    # names as in `vllm bench latency --output-json`
    result = {"avg_latency": average, "latencies": latencies, "percentiles": percentiles}
    _save(options.output_json, result)


def _params(requests: list[BenchRequest], n: int) -> list[SamplingParams]:
    return [SamplingParams(n=n, temperature=1.0, max_tokens=r.output, ignore_eos=True) for r in requests]


def _add_gpu(kinds: Any) -> None:
    text = "this GPU: kernels' results and speed, and a Llama as large as fits; writes a report to send"
    parser: argparse.ArgumentParser = kinds.add_parser("gpu", help=text, description=text)
    add_flags(
        parser,
        ("--out", "FILE", "the report, without names of users, hosts and folders", Path("jengine-gpu.json")),
        ("--minutes", "NUMBER", "at most", 10.0),
    )
    parser.set_defaults(run=_gpu)


def _gpu(options: argparse.Namespace) -> int:
    if not options.minutes >= 1:
        raise InvalidArgument("minutes", options.minutes, "must be at least 1")
    check_output("out", options.out)
    from jengine.capacity.bench.gpu import report

    code = report(options.out, options.minutes)
    write(f"Please read {options.out}, and attach it to an issue of jengine's repository.\n")
    return code


# --- of a server ----------------------------------------------------------------------------------


def _add_serve(kinds: Any) -> None:
    text = "latencies, throughput and goodput of a server: jengine's, or any with OpenAI's API"
    parser: argparse.ArgumentParser = kinds.add_parser("serve", help=text, description=text)
    add_flags(
        parser,
        ("--backend", BACKENDS, "OpenAI's API, or jengine's gRPC", "openai"),
        ("--base-url", "URL", "http://HOST:PORT (HOST:PORT for gRPC), instead of --host and --port"),
        ("--host", "HOST", "", "127.0.0.1"),
        ("--port", "N", "", 8000),
        ("--endpoint", "PATH", "the path (default: /v1/completions; for openai-chat /v1/chat/completions)"),
        ("--model", "NAME", "the model to request (default: the first that the server lists)"),
        ("--request-rate", "NUMBER", "requests a second", INFINITE),
        ("--burstiness", "NUMBER", "1: Poisson arrivals; less: bursts", 1.0),
        ("--max-concurrency", "N", "maximum number of concurrent requests"),
        ("--percentile-metrics", "LIST", "and e2el", "ttft,tpot,itl"),
        ("--metric-percentiles", "LIST", "such as 50,95,99", "99"),
        ("--result-dir", "DIR", "of --save-result", Path(".")),
        ("--result-filename", "FILE", "of --save-result", Path("bench_serve.json")),
        ("--plot", "FILE", "save a plot, such as a PNG (needs the extra bench)"),
    )
    parser.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="(default: on)"
    )
    parser.add_argument(
        "--goodput", metavar="NAME:MS", nargs="+", default=[], help="limits: ttft:500 tpot:50 e2el:9000"
    )
    parser.add_argument("--save-result", action="store_true", help="save the result as JSON")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    _add_dataset(parser, prefix="random-")
    add_connection(parser.add_argument_group("connection (TLS files: for gRPC)"))
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    goodput, metrics = _goodput(options.goodput), options.percentile_metrics.split(",")
    for name in metrics:
        if name not in METRICS:
            raise InvalidArgument("percentile_metrics", name, f"must be of {', '.join(METRICS)}")
    percentiles = [_rank(text) for text in options.metric_percentiles.split(",")]
    if options.max_concurrency is not None and options.max_concurrency < 1:
        raise InvalidArgument("max_concurrency", options.max_concurrency, "must be at least 1")
    saved = options.result_dir / options.result_filename if options.save_result else None
    check_output("result_filename", saved)
    check_output("plot", options.plot)
    from jengine.capacity.bench.result import Result

    answers, seconds = asyncio.run(_driven(options))
    result = Result(answers, seconds, goodput, percentiles, metrics)
    facts = {
        "backend": options.backend,
        "num_prompts": len(answers),
        "request_rate": str(options.request_rate),
        **result.to_dict(),
    }
    if options.json:
        write_json(facts)
    else:
        write(f"{result}\n")
    _save(saved, facts)
    if options.plot is not None:
        result.save_plot(options.plot)
    failed = [answer for answer in answers if answer.error]
    if failed:
        note(f"{len(failed)} requests failed, the first one: {failed[0].error}")
    return 1 if failed else 0


async def _driven(options: argparse.Namespace) -> Any:
    from jengine.capacity.bench.endpoints import drive
    from jengine.capacity.bench.workload import sharegpt_turns, with_arrivals

    endpoint = _endpoint(options)
    try:
        counts: dict[str, int] = {}
        if options.dataset_name == "sharegpt" and options.dataset_path is not None:
            turns = sharegpt_turns(options.dataset_path, options.num_prompts, options.seed)
            await _reached(endpoint, options)
            counts = {text: await endpoint.tokens(text) for turn in turns for text in turn}
        requests = _requests(options, lambda text: counts[text])
        if options.dataset_name != "trace":
            requests = with_arrivals(requests, options.request_rate, options.burstiness, options.seed)
        elif options.request_rate != INFINITE:
            raise InvalidArgument(
                "request_rate",
                options.request_rate,
                "must not be given with a trace, which has its own arrival times",
            )
        await _reached(endpoint, options)
        with progress_bar(
            total=len(requests), desc="requests", unit="request", show=not options.disable_tqdm
        ) as bar:
            return await drive(endpoint, requests, max_concurrency=options.max_concurrency, done=bar.update)
    finally:
        await endpoint.close()


async def _reached(endpoint: ServerUnderTest, options: argparse.Namespace) -> None:
    """Raises InvalidArgument if there is no server, before thousands of requests fail."""
    from jengine.capacity.bench.endpoints import ERRORS

    try:
        await endpoint.reach()
    except ERRORS as error:
        where = f"{options.host}:{options.port}" if options.base_url is None else options.base_url
        raise InvalidArgument("base_url", where, f"no server of this kind answers there: {error}") from None


def _endpoint(options: argparse.Namespace) -> ServerUnderTest:
    from jengine.capacity.bench.endpoints import JengineEndpoint, OpenAIEndpoint

    client = client_options(options)
    if options.backend == "jengine":
        for name in ("endpoint", "model"):
            if getattr(options, name) is not None:
                raise InvalidArgument(name, getattr(options, name), "is for backend=openai and openai-chat")
        return JengineEndpoint(
            options.base_url or f"{options.host}:{options.port}", ignore_eos=options.ignore_eos, **client
        )
    for name, value in client.items():
        if value and name != "api_key":
            raise InvalidArgument(
                name, value, "is for backend=jengine; an https:// URL uses this machine's certificates"
            )
    url = options.base_url or f"http://{options.host}:{options.port}"
    path = options.endpoint or ENDPOINTS[options.backend]
    return OpenAIEndpoint(url, path, options.model, api_key=client["api_key"], ignore_eos=options.ignore_eos)


def _goodput(pairs: list[str]) -> dict[str, float]:
    out = {}
    for pair in pairs:
        name, _, limit = pair.partition(":")
        try:
            out[name] = float(limit)
        except ValueError:
            name = ""
        if name not in ("ttft", "tpot", "e2el") or not out[name] > 0.0:
            raise InvalidArgument(
                "goodput", pair, "must be such as ttft:500, tpot:50 or e2el:9000, in milliseconds above 0"
            )
    return out


def _rank(text: str) -> float:
    try:
        rank = float(text)
    except ValueError:
        rank = -1.0
    if not 0.0 <= rank <= 100.0:
        raise InvalidArgument("metric_percentiles", text, "must be numbers from 0 to 100")
    return rank


# --- files ------------------------------------------------------------------------------------------


def _save(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json_text(result, indent=1))
