"""Disposable processes: a crash, hang or excessive memory only affects its own request."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import decoders

from jengine import AsyncLLM, InvalidArgument, SamplingParams, StructuredOutputs, Tokenizer
from jengine.serving.calls.errors import Refusal
from jengine.serving.guards import sandbox as sandbox_module
from jengine.serving.guards import worker, workers
from jengine.serving.guards.sandbox import Sandbox
from jengine.text import masks
from tests.serving.children import started
from tests.serving.conftest import TEMPLATE
from tests.serving.leaks import alive, wait_until
from tests.serving.sandboxes import within
from tests.text.conftest import byte_level, write
from tests.text.test_grammars import schema

MESSAGES = [{"role": "user", "content": "Hello"}]
ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% if b < 0 %}x{% endif %}{% endfor %}{% endfor %}"
)
GOOD = StructuredOutputs(regex="[ab]+")


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


def pids(sandbox: Sandbox) -> list[int]:
    return [worker._process.pid for worker in (*sandbox.texts._idle, *sandbox.texts._running)]


def test_grammars_are_checked_once(tokenizer: Tokenizer) -> None:
    async def work(sandbox: Sandbox) -> None:
        await sandbox.check("a", None, tokenizer)
        assert pids(sandbox) == [], "a worker starts with the first job"
        await sandbox.check("a", GOOD, tokenizer)
        [pid] = pids(sandbox)
        bad = StructuredOutputs(regex="(")
        for _ in range(2):
            with pytest.raises(InvalidArgument, match="llguidance cannot read it") as wrong:
                await sandbox.check("a", bad, tokenizer)
            assert (wrong.value.field, wrong.value.value) == ("structured_outputs", bad.regex)
            os.kill(pid, signal.SIGSTOP)  # what follows is remembered
        await sandbox.check("b", GOOD, tokenizer)

    within(work)


def test_a_verdict_belongs_to_a_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """One that llguidance cannot read used to decide for all models."""
    odd = byte_level()
    odd.decoder = decoders.Fuse()
    write(odd, tmp_path)
    other = Tokenizer.load(tmp_path)

    async def work(sandbox: Sandbox) -> None:
        with pytest.raises(InvalidArgument, match="tokenizer"):
            await sandbox.check("a", GOOD, other)
        await sandbox.check("a", GOOD, tokenizer)
        with pytest.raises(InvalidArgument, match="tokenizer"):
            await sandbox.check("a", GOOD, other)

    within(work)


def test_refusals_are_forgotten(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may have made the check slow."""
    now = [1000.0]
    monkeypatch.setattr(sandbox_module.time, "monotonic", lambda: now[0])

    async def work(sandbox: Sandbox) -> None:
        jobs: list[str] = []
        run = sandbox.texts.run

        async def counting(client: str, arguments: Any, job: Any) -> Any:
            jobs.append(job.arguments)
            return await run(client, arguments, job)

        sandbox.texts.run = counting  # type: ignore[method-assign]
        for seconds in (0.0, sandbox_module.REFUSAL_SECONDS - 1.0, 2.0):
            now[0] += seconds
            await sandbox.check("a", GOOD, tokenizer)
            with pytest.raises(InvalidArgument):
                await sandbox.check("a", StructuredOutputs(regex="("), tokenizer)
        assert len(jobs) == 3, "the good one is checked once, the refused one again after a minute"

    within(work)


def test_each_model_keeps_a_process_for_its_conversations(tmp_path: Path) -> None:
    """Starting one takes a second."""
    tokenizers = []
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        write(byte_level(), tmp_path / name)
        (tmp_path / name / "chat_template.jinja").write_text(f"{name}: {{{{ messages[0].content }}}}")
        tokenizers.append(Tokenizer.load(tmp_path / name))

    async def work(sandbox: Sandbox) -> None:
        for _ in range(2):
            texts = [(await sandbox.render("x", MESSAGES, {}, one, trusted=True)).text for one in tokenizers]
            assert texts == ["a: Hello", "b: Hello", "c: Hello"]
            idle = [worker._process.pid for worker in sandbox.chats._idle]
            assert len(idle) == 3 and idle == (kept or idle)
            kept[:] = idle

    kept: list[int] = []
    within(work, workers=1)


def test_a_crash_costs_one_request(tokenizer: Tokenizer) -> None:
    async def work(sandbox: Sandbox) -> None:
        await sandbox.check("a", GOOD, tokenizer)
        before = pids(sandbox)
        with pytest.raises(InvalidArgument, match=r"too complex: .* signal 11 ") as wrong:
            await sandbox.check("a", schema(900), tokenizer)
        assert wrong.value.field == "structured_outputs"
        await sandbox.check("a", StructuredOutputs(regex="c"), tokenizer)
        assert before != pids(sandbox)

    within(work, workers=1, module="tests.serving.small_stack_worker")


def test_a_hanging_template_is_ended_and_others_go_on(tokenizer: Tokenizer) -> None:
    async def work(sandbox: Sandbox) -> None:
        text, ids = rendered = await sandbox.render("b", MESSAGES, {"chat_template": TEMPLATE}, tokenizer)
        assert ids == tokenizer.encode(text, False) and text == "<s>user: Hello\n<s>assistant:"
        hanging = asyncio.create_task(sandbox.render("a", MESSAGES, {"chat_template": ENDLESS}, tokenizer))
        again = asyncio.create_task(sandbox.render("a", MESSAGES, {"chat_template": ENDLESS}, tokenizer))
        await asyncio.sleep(0)
        assert await sandbox.render("b", MESSAGES, {"chat_template": TEMPLATE}, tokenizer) == rendered, (
            "a client has one job at a time"
        )
        assert not hanging.done()
        for task in (hanging, again):
            with pytest.raises(InvalidArgument, match=r"more than 2\.0 s of processor time") as wrong:
                await task
            assert wrong.value.field == "chat_template"

    within(work)


@pytest.mark.parametrize(
    "template, field, why",
    [
        ("{% if %}", "chat_template", "not a valid Jinja template"),
        ("{{ 'x' * 10**11 }}", "messages[0]", "MemoryError"),
        ("{{ raise_exception('no') }}", "messages[0]", "rejects"),
        ("{{ 'x ' * 10**7 }}", "", "processor time|too complex|tokens|memory"),
    ],
)
def test_templates_that_fail(template: str, field: str, why: str, tokenizer: Tokenizer) -> None:
    async def work(sandbox: Sandbox) -> None:
        with pytest.raises(InvalidArgument, match=why) as wrong:
            await sandbox.render("a", MESSAGES, {"chat_template": template}, tokenizer)
        assert wrong.value.field == field or not field

    within(work)


def test_the_queue_is_bounded(tokenizer: Tokenizer) -> None:
    async def work(sandbox: Sandbox) -> None:
        sandbox.texts._most_waiting = 1
        first = asyncio.create_task(sandbox.check("a", GOOD, tokenizer))
        await asyncio.sleep(0)
        with pytest.raises(Refusal) as busy:
            await sandbox.check("b", StructuredOutputs(regex="b"), tokenizer)
        assert busy.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        await first
        await sandbox.check("b", StructuredOutputs(regex="b"), tokenizer)

    within(work)


def test_a_worker_inherits_no_socket_but_its_own(tokenizer: Tokenizer) -> None:
    async def work(sandbox: Sandbox) -> None:
        await sandbox.check("a", GOOD, tokenizer)
        [pid] = pids(sandbox)
        links = [os.readlink(descriptor) for descriptor in Path(f"/proc/{pid}/fd").iterdir()]
        assert len([link for link in links if link.startswith("socket:")]) == 1, links

    within(work)


ORPHAN = f"""
import asyncio, sys
from pathlib import Path
from jengine import Tokenizer
from jengine.serving.guards.sandbox import Sandbox

async def main():
    sandbox, tokenizer = Sandbox(), Tokenizer.load(Path(sys.argv[1]))
    await sandbox.render("a", {MESSAGES}, {{"chat_template": "x"}}, tokenizer)
    print(sandbox.texts._idle[0]._process.pid, flush=True)
    await sandbox.render("a", {MESSAGES}, {{"chat_template": {ENDLESS!r}}}, tokenizer)

asyncio.run(main())
"""


def test_workers_die_with_the_server(tokenizer_folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(tokenizer_folder)], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        worker = int(server.stdout.readline())
        server.kill()
    wait_until(lambda: not alive(worker))


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, jengine.serving.guards.worker;"
        " from jengine.spi import ChatTemplate, judging_text, probe_structure, rendered_chat;"
        " print({'jax', 'grpc', 'transformers', 'llvmlite'}"
        " & set(sys.modules))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "set()\n"
    )


def test_no_grammar_is_compiled_in_the_event_loop(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's process makes the masks."""

    def never(*_: Any) -> Any:
        raise AssertionError("compiled here")

    async def ask() -> None:
        async with AsyncLLM.over(process, Tokenizer.load(tokenizer_folder)) as llm:
            params = SamplingParams(n=3, max_tokens=4, structured_outputs=StructuredOutputs(regex="a+"))
            outputs = [output async for output in llm.generate("abc", params, output_kind="final")]
            assert [len(completion.token_ids) for completion in outputs[-1].outputs] == [4, 4, 4]

    monkeypatch.setattr(masks, "make_masks", never)
    with started(tokenizer_folder=str(tokenizer_folder), vocab_size=501) as process:
        asyncio.run(ask())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_from_outside_costs_nothing(tokenizer: Tokenizer, number: int) -> None:
    """An idle one and a busy one. The grammar used to be refused for good."""

    async def work(sandbox: Sandbox) -> None:
        await sandbox.check("a", GOOD, tokenizer)
        for regex in ("idle", "busy"):
            [pid] = pids(sandbox)
            if regex == "busy":
                os.kill(pid, signal.SIGSTOP)
                checking = asyncio.create_task(sandbox.check("a", StructuredOutputs(regex=regex), tokenizer))
                await asyncio.sleep(0.1)
                os.kill(pid, number)
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.kill(pid, signal.SIGCONT)
                await checking
            else:
                os.kill(pid, number)
                await sandbox.check("a", StructuredOutputs(regex=regex), tokenizer)
            assert pids(sandbox) != [pid]

    within(work, workers=1)


def test_nothing_is_remembered_of_processes_that_are_always_killed(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    call = workers._Worker.call

    def killed(self: Any, job: Any) -> Any:
        calls.append(self._process.pid)
        self._process.kill()
        return call(self, job)

    async def work(sandbox: Sandbox) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(workers._Worker, "call", killed)
            with pytest.raises(Refusal) as busy:
                await sandbox.check("a", GOOD, tokenizer)
        assert busy.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED and busy.value.retry_seconds
        assert len(calls) == workers.ATTEMPTS and not sandbox._verdicts
        await sandbox.check("a", GOOD, tokenizer)

    within(work)


def test_many_addresses_do_not_keep_a_client_waiting(tokenizer: Tokenizer) -> None:
    """Thirty clients with hanging templates: a new client's job is the next to start, and so is its second
    one.
    """

    async def work(sandbox: Sandbox) -> None:
        started: list[str] = []
        do = sandbox.texts.do

        def counting(arguments: Any, job: Any) -> Any:
            started.append("victim" if "victim" in job.arguments else "attacker")
            return do(arguments, job)

        sandbox.texts.do = counting  # type: ignore[method-assign]
        attackers = [
            asyncio.create_task(sandbox.render(f"a{i}", MESSAGES, {"chat_template": ENDLESS}, tokenizer))
            for i in range(30)
        ]
        await asyncio.sleep(0)
        for regex in ("victim 1", "victim 2"):
            await sandbox.check("victim", StructuredOutputs(regex=regex), tokenizer)
        first, second = (i for i, who in enumerate(started) if who == "victim")
        assert first <= workers.WORKERS and second <= 2 * workers.WORKERS + 1, started
        for task in attackers:
            task.cancel()
        await asyncio.gather(*attackers, return_exceptions=True)
        assert not len(sandbox.texts._turns)

    within(work)


def test_work_is_charged_to_the_client(tokenizer: Tokenizer) -> None:
    charged: list[tuple[str, float]] = []

    async def work(sandbox: Sandbox) -> None:
        await sandbox.check("a", GOOD, tokenizer)
        [(client, seconds)] = charged
        assert client == "a" and 0 < seconds <= worker.TEXT_SECONDS
        await sandbox.check("b", GOOD, tokenizer)
        assert charged[1:] == [("b", seconds)], "the engine compiles it once more"
        with pytest.raises(InvalidArgument):
            await sandbox.render("c", MESSAGES, {"chat_template": ENDLESS}, tokenizer)
        assert charged[2:] == [("c", worker.TEXT_SECONDS)]

    within(work, charge=lambda *one: charged.append(one))
