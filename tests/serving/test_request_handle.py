"""AsyncLLM.submit: valid and queued when it returns; outputs, aborts and ends belong to its handle."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from jengine import (
    AsyncLLM,
    EngineDead,
    InvalidArgument,
    JengineError,
    SamplingParams,
    Tokenizer,
    chat_prompt,
)
from jengine.api.backend import EngineThread
from jengine.text import completion
from tests.mocks.mock_engine import MockEngine
from tests.serving.leaks import wait_until

LONG = SamplingParams(max_tokens=None, ignore_eos=True)


@pytest.fixture
def run(tokenizer_folder: Path) -> Callable[..., None]:
    """Runs a test with an AsyncLLM over a mock engine."""

    def run(test: Callable[[AsyncLLM], Awaitable[Any]], **options: Any) -> None:
        async def main() -> None:
            engine = MockEngine(**{"vocab_size": 501, "seconds": 0.001, **options})
            async with AsyncLLM.over(EngineThread(engine), Tokenizer.load(tokenizer_folder)) as llm:
                await test(llm)
                wait_until(lambda: not engine.has_work)
                assert not llm._requests._handles and not llm._requests._live._live

        asyncio.run(main())

    return run


def test_it_is_queued_when_submit_returns(run: Callable[..., None]) -> None:
    async def test(llm: AsyncLLM) -> None:
        with pytest.raises(InvalidArgument):
            llm.submit([501])
        handle = llm.submit([1, 2], LONG, request_id="mine")
        with pytest.raises(InvalidArgument, match="request_id"):
            llm.submit([1], LONG, request_id="mine")
        wait_until(lambda: llm.load.running == 1)  # the event loop has had no turn
        handle.close()
        llm.submit([1], LONG, request_id="mine").close()

    run(test)


def test_outputs_come_after_so_many_tokens(run: Callable[..., None]) -> None:
    async def test(llm: AsyncLLM) -> None:
        llm._requests._interval = 4
        outputs = [
            output async for output in llm.submit([7, 8], SamplingParams(max_tokens=30), output_kind="delta")
        ]
        counts = [len(output.outputs[0].token_ids) for output in outputs]
        assert sum(counts) == 30 and min(counts[1:-1]) >= 4 and len(counts) > 2

    run(test)


def test_reading_to_the_end(run: Callable[..., None]) -> None:
    async def test(llm: AsyncLLM) -> None:
        handle = llm.submit([7, 8], SamplingParams(max_tokens=5), output_kind="delta")
        outputs = [output async for output in handle]
        assert [token for output in outputs for token in output.outputs[0].token_ids] == [7, 8, 7, 8, 7]
        assert outputs[-1].finished and handle.finished and not handle.abort()
        assert [output async for output in handle] == []
        handle.close()

    run(test)


def test_aborts(run: Callable[..., None]) -> None:
    async def test(llm: AsyncLLM) -> None:
        async with llm.submit([7], LONG) as handle:
            await anext(handle)
            assert handle.abort("enough") and not handle.abort()
            [*_, last] = [output async for output in handle]
            assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("abort", "enough")
        async with llm.submit([7], LONG, timeout=0.01, output_kind="final") as handle:
            assert (await anext(handle)).outputs[0].stop_reason == "timeout"
        handle = llm.submit([7], LONG, request_id="named")
        assert await llm.abort("named") and handle.finished
        handle.close()

    run(test)


def test_waiting_in_vain_loses_nothing(run: Callable[..., None]) -> None:
    async def test(llm: AsyncLLM) -> None:
        async with llm.submit([7], SamplingParams(max_tokens=3), output_kind="delta") as handle:
            tokens: list[int] = []
            ended = False
            while not ended:
                try:
                    output = await asyncio.wait_for(anext(handle), 0.005)
                except TimeoutError:
                    continue
                tokens += output.outputs[0].token_ids
                ended = output.finished
            assert tokens == [7, 7, 7]

    run(test, seconds=0.02)


def test_the_engines_death(run: Callable[..., None]) -> None:
    async def test(llm: AsyncLLM) -> None:
        handle = llm.submit([7], LONG)
        with pytest.raises(EngineDead):
            _ = [output async for output in handle]
        with pytest.raises(EngineDead):
            llm.submit([7], LONG)
        llm.backend.engine._running.clear()  # type: ignore[attr-defined]

    run(test, fail_at=2)


def test_samples_share_one_stop_automaton(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    made, of = [], completion.StopAutomaton.of
    monkeypatch.setattr(completion.StopAutomaton, "of", lambda stops: (made.append(stops), of(stops))[1])

    async def test(llm: AsyncLLM) -> None:
        [*_, last] = [
            output
            async for output in llm.generate(
                [70, 71], SamplingParams(n=64, max_tokens=4, stop=["never", "met"])
            )
        ]
        assert len(last.outputs) == 64 and made == [("never", "met")]

    run(test)


def test_ids_are_checked_once_a_prompt(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    from jengine.spi import Limits

    checked, validate = [], Limits.validate
    monkeypatch.setattr(
        Limits, "validate", lambda self, request: (checked.append(request), validate(self, request))[1]
    )

    async def test(llm: AsyncLLM) -> None:
        llm.submit([70, 71], SamplingParams(n=64, max_tokens=4)).close()
        assert len(checked) == 1

    run(test)


def test_text_that_cannot_fit_is_not_tokenized(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(llm: AsyncLLM) -> None:
        encoded: list[int] = []
        encode = llm.tokenizer.encode
        monkeypatch.setattr(
            llm.tokenizer,
            "encode",
            lambda text, *special: (encoded.append(len(text)), encode(text, *special))[1],
        )
        per_token = llm.tokenizer.max_token_bytes or 0
        with pytest.raises(
            InvalidArgument,
            match=(
                r"^prompt='a{70,}.*: 27622 bytes are at least 1024 tokens; at most max_model_len - 1 = 1023"
            ),
        ):
            llm.submit("a" * (1023 * per_token + 1))
        with pytest.raises(InvalidArgument, match="at least 2047 tokens"):
            chat_prompt(
                llm.tokenizer,
                [{"role": "user", "content": "é" * (1023 * per_token - 8)}],
                max_model_len=llm.max_model_len,
            )
        assert not encoded
        with pytest.raises(InvalidArgument, match="tokens; at most max_model_len - 1"):
            llm.submit("a" * (1023 * per_token))  # which might fit
        assert encoded == [1023 * per_token]
        llm.submit("é" * 100).close()

    run(test)


def test_an_embedding_that_is_aborted_is_an_error(run: Callable[..., None]) -> None:
    async def test(llm: AsyncLLM) -> None:
        async with llm.submit([1], LONG):  # takes the only place
            with pytest.raises(
                JengineError, match="ended without its embedding, with finish_reason 'abort': timeout"
            ):
                await llm.embed([5], timeout=0.0)
            waiting = asyncio.create_task(llm.embed([5]))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert (await llm.embed([5, 6], normalize=False)).outputs.embedding == [
            0.0,
            0.0,
            0.0,
            0.0,
            0.0,
            1.0,
            1.0,
            0.0,
        ]

    run(test, embedding_size=8, max_num_seqs=1, max_model_len=100_000, pages=100_000)


def test_embeddings_go_through_handles_too(run: Callable[..., None]) -> None:
    """Services submit embedding requests this way."""

    async def test(llm: AsyncLLM) -> None:
        handle = llm.submit(
            llm.prepare_embedding({"prompt_token_ids": [5, 6], "cache_salt": "a"}, dimensions=6),
            output_kind="final",
        )
        (output,) = [output async for output in handle]
        assert (
            output.finished
            and output.outputs[0].finish_reason == "stop"
            and output.outputs[0].token_ids == []
        )
        assert output.embedding is not None and output.embedding.tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
        with pytest.raises(
            InvalidArgument, match="dimensions=9: must be at most 8, the size of this model's embeddings"
        ):
            llm.prepare_embedding([5], dimensions=9)

    run(test, embedding_size=8)


def test_an_engine_without_embeddings_names_the_option(run: Callable[..., None]) -> None:
    async def test(llm: AsyncLLM) -> None:
        with pytest.raises(InvalidArgument, match="embeddings=False: must be True when the engine starts"):
            await llm.embed("a")

    run(test)
