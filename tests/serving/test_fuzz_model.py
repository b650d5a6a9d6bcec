"""Random requests, short prompts in large batches among them, against a server with a model. A probe beside
them is delayed by a few steps of the engine.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from jengine import Trace
from jengine.serving.grpc.client import AsyncClient, Client
from jengine.serving.guards.security import hash_line
from tests.serving import test_fuzz, test_http_fuzz
from tests.serving.leaks import wait_until
from tests.serving.processes import ServerProcess, process

KEYS = {name: name[0] * 32 for name in ("fuzz", "many", "probe", "root")}
SETTINGS = {"fuzz": "max_streams=16", "many": "max_streams=256", "probe": "min_priority=0", "root": "admin=1"}
# Steps that may begin between the time at which the engine has a probe and its first step, for 99 % of probes
# and for all.
FEW_STEPS, MOST_STEPS = 4, 16
Seen = Counter[tuple[str, Any]]


@contextmanager
def serving(folder: Path) -> Iterator[ServerProcess]:
    keys = folder / "keys"
    keys.write_text("\n".join(hash_line(key, name, SETTINGS[name]) for name, key in KEYS.items()))
    flags = [
        "--grpc-port=0",
        "--port=0",
        "--metrics-port=0",
        "--lame-duck-seconds=0",
        "--policy=fair",
        f"--api-keys={keys}",
    ]
    with process([sys.executable, "-m", "jengine.cli", "serve", "demo", *flags]) as server:
        server.wait_until_ready()
        yield server


def short(rng: random.Random) -> dict[str, Any]:
    """Prompts of one to three tokens, up to 250 of them, and a few tokens for each."""
    prompts: list[Any] = [
        rng.choice(["a", "ab", [rng.randrange(500)], [rng.randrange(500) for _ in range(rng.randint(1, 3))]])
        for _ in range(rng.choice([1, 1, 1, 2, 8, 32, 125, 250]))
    ]
    body: dict[str, Any] = {"prompt": prompts, "max_tokens": rng.randint(1, 4)}
    for name, value in (
        ("n", 2),
        ("stream", True),
        ("logprobs", 2),
        ("echo", True),
        ("prompt_logprobs", 1),
        ("priority", 1),
        ("ttft_ms", 100),
        ("structured_outputs", {"regex": rng.choice(["a+", "b?c"])}),
        ("temperature", 0),
    ):
        if rng.random() < 0.08:
            body[name] = value
    return body


def metric(server: ServerProcess, name: str) -> float:
    text = urllib.request.urlopen(server.metrics, timeout=60).read().decode()
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if re.match(rf"(jengine|vllm):{name}[{{ ]", line)
    )


class Probe:
    """Generates a token again and again, as a separate client.

    Attributes:
        delays: for each probe, by its number in the engine, the steps that began between the time at which
            the engine queued it and its first step. How long the server's process takes to pass it on
            depends on what else the machine does.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self.delays: dict[int, int] = {}
        self.sent = 0

    async def run(self, done: asyncio.Event) -> None:
        async with (
            AsyncClient(self._address, api_key=KEYS["probe"]) as client,
            AsyncClient(self._address, api_key=KEYS["root"]) as root,
        ):
            while not done.is_set():
                for _ in range(20):
                    await client.generate([1, 2], max_tokens=1)
                    self.sent += 1
                    await asyncio.sleep(0.02)
                self._read(await root.trace(10.0))

    def _read(self, trace: Trace) -> None:
        begun = sorted(step.begun for step in trace.steps)
        for request in trace.requests:
            if request.client == "key probe" and request.scheduled and begun and request.arrival > begun[0]:
                self.delays[request.number] = sum(request.queued < at < request.scheduled for at in begun)


async def ask_short(client: httpx.AsyncClient, rng: random.Random, seen: Seen) -> None:
    answer = await client.post("/v1/completions", json=short(rng))
    assert answer.status_code in (200, 400, 429), (answer.status_code, answer.text[:500])
    seen["short", answer.status_code] += 1


async def fuzz(server: ServerProcess, seed: int, requests: int, seen: Seen) -> Probe:
    done, probe = asyncio.Event(), Probe(server.address)
    http = server.http.removesuffix("/v1")
    metadata = [("authorization", f"Bearer {KEYS['fuzz']}")]

    async def worker(own: random.Random) -> None:
        headers = {name: {"authorization": f"Bearer {KEYS[name]}"} for name in ("fuzz", "many")}
        async with (
            httpx.AsyncClient(base_url=http, timeout=300, headers=headers["fuzz"]) as client,
            httpx.AsyncClient(base_url=http, timeout=300, headers=headers["many"]) as many,
            grpc.aio.insecure_channel(server.address, [("grpc.max_receive_message_length", -1)]) as channel,
        ):
            for _ in range(requests // 10):
                kind = own.random()
                if kind < 0.4:
                    await ask_short(many, own, seen)
                elif kind < 0.7:
                    await test_http_fuzz.ask(client, own, seen)
                else:
                    await test_fuzz.ask(channel, own, seen, metadata)

    rng = random.Random(seed)
    probing = asyncio.create_task(probe.run(done))
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(10):
                group.create_task(worker(random.Random(rng.random())))
    finally:
        done.set()
        await probing
    return probe


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("requests", [20_000])
def test_random_requests_against_a_model(requests: int, tmp_path: Path) -> None:
    seen: Seen = Counter()
    with serving(tmp_path) as server:
        [engine] = [
            pid
            for pid in server.children()
            if "jengine.serving.processes.engine_" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        probe = asyncio.run(fuzz(server, 0, requests, seen))
        with Client(server.address, api_key=KEYS["root"]) as client:
            wait_until(lambda: not client.load().running and not client.load().waiting)
            load = client.load()
            assert load.free_pages == load.pages
            assert client.generate("def f(", max_tokens=4).usage.completion_tokens == 4
        assert engine in server.children(), "the engine was replaced"
        counted = {
            name: metric(server, f"{name}_total") for name in ("engine_restarts", "compiles_since_start")
        }
        assert counted == {"engine_restarts": 0, "compiles_since_start": 0}
        assert "Traceback" not in server.log, server.log[-5000:]
        delays = sorted(probe.delays.values())
        print(
            json.dumps(
                {
                    "requests": sum(seen.values()),
                    "answers": {str(key): count for key, count in sorted(seen.items(), key=str)},
                }
            )
        )
        print(
            json.dumps(
                {
                    "probes": probe.sent,
                    "measured": len(delays),
                    "steps": Counter(delays),
                    "slowest": delays[-1],
                }
            )
        )
        assert sum(seen.values()) >= 0.9 * requests and seen["short", 200]
        assert len(delays) > 0.5 * probe.sent
        assert delays[len(delays) * 99 // 100] <= FEW_STEPS, delays[-20:]
        assert delays[-1] <= MOST_STEPS, delays[-20:]
