"""Several models in one server: loads on demand, who leaves for whom, failures, and traffic on all."""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from jengine import InvalidArgument, OutOfMemory, SamplingParams
from jengine.client import Client
from jengine.serving.calls.model_provider import NotReady
from jengine.serving.config import resolve_models
from jengine.serving.models.pool import (
    MEMORY,
    MemoryNeed,
    ModelPool,
    PooledModel,
    Usage,
    fits_gpu,
    fits_on,
)
from tests.serving.leaks import alive, wait_until
from tests.serving.processes import ServerProcess, mock_process


class Request:
    """A user of models until it is done."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def done(self) -> None:
        for callback in self._callbacks:
            callback(self)


@contextmanager
def request() -> Iterator[Request]:
    user = Request()
    try:
        yield user
    finally:
        user.done()


class Facts:
    devices = "1 cpu"


class StandIn:
    """A Supervisor whose engine starts at once, or fails."""

    retry_seconds = 1.0

    def __init__(self, failures: Sequence[Exception] = (), seconds: float = 0.0) -> None:
        self.loaded = self.serving = False
        self.facts: Any = None
        self.failures, self.seconds, self.starts, self.pid = list(failures), seconds, 0, None

    @property
    def info(self) -> Any:
        if self.facts is None:
            raise NotReady("starting")
        return self.facts

    async def start(self) -> None:
        self.starts += 1
        await asyncio.sleep(self.seconds)
        if self.failures:
            raise self.failures.pop(0)
        self.loaded, self.facts = True, Facts()

    async def unload(self) -> None:
        self.loaded = False
        await asyncio.sleep(0)

    async def close(self, drain: float) -> None:
        self.loaded = False


def pool(*names: str, stand_ins: dict[str, StandIn] | None = None, **options: Any) -> ModelPool:
    made = {name: (stand_ins or {}).get(name) or StandIn() for name in names}
    return ModelPool([PooledModel(name, made[name]) for name in names], **options)  # type: ignore[arg-type]


def loaded(models: ModelPool) -> list[str]:
    return [model.name for model in models if model.loaded]


async def used(models: ModelPool, name: str) -> None:
    with request() as user:
        assert await models.use(name, user) is not None


def test_usage_is_recency_and_rate() -> None:
    often, lately = Usage(0.0), Usage(0.0)
    for second in range(10):
        often.add(second)
    lately.add(60.0)
    assert often.expected(60.0) > lately.expected(60.0)
    assert often.expected(5 * MEMORY) < 0.1
    lately.add(5 * MEMORY)
    assert lately.expected(5 * MEMORY) > often.expected(5 * MEMORY)


def test_further_names_are_those_of_the_default_model() -> None:
    async def main() -> None:
        models = pool("a", "b", aliases=("gpt", "o"))
        await models.start()
        for name in ("", "a", "gpt", "o"):
            with request() as user:
                assert await models.use(name, user) is models.default.supervisor
        with request() as user:
            assert await models.use("p", user) is None
        assert [model.name for model in models.listed()] == ["a", "b", "gpt", "o"]
        assert [model.name for model in models] == ["a", "b"]

    asyncio.run(main())


def test_the_least_expected_model_without_requests_leaves() -> None:
    async def main() -> None:
        models = pool("a", "b", "c", "d", max_loaded=3)
        with request() as early:
            await models.use("b", early)
            assert models.default.supervisor.starts == 0, "no one waits for the server's own start"
        await models.start()
        for name in ("b", "b", "b", "", "", "c"):
            await used(models, name)
        with request() as user:
            await models.use("c", user)
            await used(models, "d")
            assert loaded(models) == ["b", "c", "d"], "c is used least, but has a request"
            assert models.serving, "the default model comes back when a request names it"
            assert await models.use("e", user) is None
        await used(models, "a")
        assert loaded(models) == ["a", "b", "c"]
        await models.close()

    asyncio.run(main())


def test_a_busy_model_leaves_when_its_requests_have_ended() -> None:
    async def main() -> None:
        models = pool("a", "b", max_loaded=1)
        await models.start()
        users = [Request() for _ in range(3)]
        await models.use("a", users[0])
        waiting = asyncio.create_task(models.use("b", users[1]))
        while not models.default.leaving:
            await asyncio.sleep(0.001)
        late = asyncio.create_task(models.use("a", users[2]))
        await asyncio.sleep(0.01)
        assert loaded(models) == ["a"] and not waiting.done() and not late.done(), "its request runs"
        users[0].done()
        await waiting
        assert loaded(models) == ["b"] and not late.done()
        users[1].done()
        await late
        assert loaded(models) == ["a"]
        users[2].done()
        await models.close()

    asyncio.run(main())


def test_no_model_leaves_for_a_client_that_has_gone() -> None:
    async def main() -> None:
        models = pool("a", "b", max_loaded=1)
        await models.start()
        users = [Request() for _ in range(3)]
        await models.use("a", users[0])
        waiting = asyncio.create_task(models.use("b", users[1]))
        while not models.default.leaving:
            await asyncio.sleep(0.001)
        late = asyncio.create_task(models.use("a", users[2]))
        await asyncio.sleep(0.01)
        waiting.cancel()
        users[1].done()
        assert await asyncio.wait_for(late, 10) is models.default.supervisor, "while the first request runs"
        users[0].done()
        users[2].done()
        await asyncio.sleep(0.01)
        assert loaded(models) == ["a"] and models.listed()[1].why is None
        await used(models, "b")
        assert loaded(models) == ["b"]
        await models.close()

    asyncio.run(main())


def test_memory_makes_models_leave() -> None:
    assert fits_on("2 NVIDIA H200") is fits_gpu
    needs = [MemoryNeed(share=share) for share in (0.4, 0.5, 0.3)]
    assert fits_gpu(needs[0], needs[1:2]) and not fits_gpu(needs[0], needs[1:])

    async def main() -> None:
        full = StandIn([OutOfMemory("no room"), OutOfMemory("no room")])
        models = pool("a", "b", "c", stand_ins={"c": full})
        await models.start()
        await used(models, "b")
        await used(models, "c")
        assert loaded(models) == ["c"] and full.starts == 3, "each time another one leaves"
        await models.close()

    asyncio.run(main())


def test_a_model_that_fails_and_one_that_idles() -> None:
    async def main() -> None:
        wrong = StandIn([InvalidArgument("model", "b", "is wrong")], seconds=0.01)
        models = pool("a", "b", stand_ins={"b": wrong}, unload_after=0.05)
        await models.start()
        asked = await asyncio.gather(*(used(models, "b") for _ in range(3)), return_exceptions=True)
        assert [str(error) for error in asked] == ["b cannot be loaded: model='b': is wrong"] * 3
        with pytest.raises(NotReady, match="is wrong"):
            await used(models, "b")
        assert wrong.starts == 1, "not tried again at once"
        assert models.listed()[1].status == "failed" and "is wrong" in (models.listed()[1].why or "")
        models._models["b"].again = 0.0
        await used(models, "b")
        assert "b" in loaded(models) and models.listed()[1].why is None
        while loaded(models):
            await asyncio.sleep(0.01)
        await used(models, "")
        assert loaded(models) == ["a"]
        await models.close()

    asyncio.run(main())


def test_options_of_each_model(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(
        '[models.small]\nmodel = "some/small:Q4_K_M"\nmax-model-len = 512\n[models.big]\nmodel = "some/big"\n'
        "gpu_memory_utilization = 0.5\n"
    )
    flags = {"model_config": str(file), "max_num_seqs": 3, "revision": None}
    _, models = resolve_models(flags, environ={})
    small, big = models
    assert (small.name, small.engine.model, small.engine.max_model_len) == ("small", "some/small:Q4_K_M", 512)
    assert (big.name, big.engine.gpu_memory_utilization, big.engine.max_model_len) == ("big", 0.5, None)
    assert small.engine.max_num_seqs == big.engine.max_num_seqs == 3
    _, models = resolve_models({**flags, "model": "demo", "revision": "v1"}, ["other/one"], {})
    assert [model.name for model in models] == ["demo", "other/one", "small", "big"]
    assert [model.engine.revision for model in models] == ["v1", None, None, None]
    for text, message in (
        ("[models.a]\n", r'must be given as model = "\.\.\."'),
        ('[models.a]\nmodel = "x"\nport = 1\n', "there is no such option"),
        ('[models.a]\nmodel = "x"\nssl_keyfile = "k"\n', "is no option of an engine"),
        ('[models.a]\nmodel = "x"\nmax_num_seqs = 0\n', r"model a\)"),
        ('[models.a]\nmodel = "x"\nblock_size = 8\npage_size = 16\n', "is given as 8 too"),
        ('[models.a]\nmodel = "x"\nmax-model-len = 8\nmax_model_len = 9\n', "is given as 8 too"),
        ("port = 1\n", r"must have tables \[models\.NAME\] only"),
        ('[models.demo]\nmodel = "x"\n', "is the name of two models"),
        (
            '[models.a]\nmodel = "x"\nkv_events_config = \'{"enable_kv_cache_events": true}\'\n'
            '[models.b]\nmodel = "x"\nkv_events_config = {enable_kv_cache_events = true}\n',
            "is the endpoint of two models",
        ),
    ):
        file.write_text(text)
        with pytest.raises(InvalidArgument, match=message):
            resolve_models({"model": "demo", "model_config": str(file)}, environ={})
    file.write_text('[models.a]\nmodel = "x"\nenable_lora = true\n')
    server, [default] = resolve_models({"model_config": str(file), "lora_dir": "l"}, environ={})
    assert server.lora_dir == "l" and default.engine.enable_lora
    with pytest.raises(InvalidArgument, match=r"lora_dir='l': needs enable_lora \(command line\)"):
        resolve_models({"model": "demo", "model_config": str(file), "lora_dir": "l"}, environ={})


def test_traffic_on_several_models_of_one_server(tokenizer_folder: Path) -> None:
    """Loads, evictions, a model that cannot be loaded, and an engine that is killed; nothing is lost."""
    own = {"tokenizer_folder": str(tokenizer_folder), "vocab_size": 501, "seconds": 0.001}
    models = [("a", own), ("b", {**own, "max_model_len": 300}), ("c", own), ("d", {**own, "nonsense": 1})]
    server = {"port": 0, "metrics_port": 0, "max_loaded_models": 2}
    with mock_process(tokenizer_folder, server=server, models=models) as process:
        process.wait_until_ready()
        client = OpenAI(base_url=process.http, api_key="none", max_retries=0)

        def ask(i: int) -> tuple[str, int]:
            answer = client.completions.create(
                model="abc"[i % 3], prompt=f"request {i}", max_tokens=5 + i % 7, stream=False
            )
            return answer.model, answer.usage.completion_tokens if answer.usage else 0

        assert [(m.id, m.status["value"]) for m in client.models.list()] == [  # type: ignore[attr-defined]
            ("a", "loaded"), *((name, "unloaded") for name in "bcd")
        ]  # fmt: skip
        with ThreadPoolExecutor(12) as threads:
            asked = list(threads.map(ask, range(60)))
        assert asked == [("abc"[i % 3], 5 + i % 7) for i in range(60)]
        assert process.log.count("unloading") >= 1 and len(process.children()) <= 2 + 4
        with pytest.raises(openai.InternalServerError) as failed:
            client.completions.create(model="d", prompt="x")
        assert failed.value.status_code == 503 and "d cannot be loaded: " in str(failed.value)
        assert "nonsense" in str(failed.value)
        with pytest.raises(openai.NotFoundError, match="this server has 4 models: a, b, c, d"):
            client.completions.create(model="e", prompt="x")

        def status() -> dict[str, str]:
            return {m.id: m.status["value"] for m in client.models.list()}  # type: ignore[attr-defined]

        assert status()["d"] == "failed"
        absent = next(name for name, state in status().items() if state == "unloaded")
        before = engines(process)
        assert ask("abc".index(absent))[0] == absent
        [pid] = engines(process) - before
        other = next(name for name, state in status().items() if state == "loaded" and name != absent)
        with Client(process.address) as grpc_client:
            stream = grpc_client.stream("x", SamplingParams(max_tokens=200, ignore_eos=True), model=other)
            next(stream)
            assert grpc_client.generate("x", SamplingParams(max_tokens=2), model=absent).outputs[0].token_ids
            os.kill(pid, signal.SIGKILL)
            assert sum(len(out.outputs[0].token_ids) for out in stream) > 150, "the other one goes on"
        wait_until(lambda: answers(lambda: ask("abc".index(absent))), lambda: process.log)
        text = urllib.request.urlopen(process.metrics, timeout=10).read().decode()
        assert f'jengine:engine_restarts_total{{model_name="{absent}"}} 1.0' in text
        assert all(f'jengine:generation_tokens_total{{model_name="{name}"}}' in text for name in "abc")
        assert text.count("# TYPE jengine:generation_tokens_total") == 1
        assert 'jengine:engine_up{model_name="d"} 0.0' in text


def engines(process: ServerProcess) -> set[int]:
    """Process ids of its engines."""
    return {
        pid
        for pid in process.children()
        if b"engine_main" in Path(f"/proc/{pid}/cmdline").read_bytes() and alive(pid)
    }


def answers(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except openai.InternalServerError:
        return False
    return True
