"""How a Ray Data stage's worker processes a batch; without a cluster, thus without ray."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jengine import AsyncLLM, InvalidArgument, Tokenizer
from jengine.api.backend import EngineThread
from jengine.integrations.ray.data import BatchWorker, ProcessorConfig
from tests.mocks.mock_engine import MockEngine

ADDED = {
    "prompt_token_ids",
    "num_input_tokens",
    "generated_text",
    "generated_tokens",
    "num_generated_tokens",
    "finish_reason",
}


def answered(
    folder: Path,
    batch: pa.Table,
    chat: dict[str, Any] | None = None,
    fail_at: int | None = None,
    **options: Any,
) -> pa.Table:
    async def main() -> pa.Table:
        def make(_: object) -> AsyncLLM:
            return AsyncLLM.over(
                EngineThread(MockEngine(vocab_size=501, fail_at=fail_at)), Tokenizer.load(folder)
            )

        worker = BatchWorker(ProcessorConfig(model_source="mock", **options), chat, make)
        async with worker._llm:
            return await worker(batch)

    return asyncio.run(main())


def test_every_kind_of_prompt(model: Path) -> None:
    rows = [
        {
            "key": 0,
            "messages": [{"role": "user", "content": "hello"}],
            "sampling_params": {"max_tokens": 4, "temperature": 0.0},
        },
        {"key": 1, "tokenized_prompt": [5, 6, 7], "sampling_params": {"max_tokens": 2}},
        {"key": 2, "prompt": "text"},
        {"key": 3, "prompt": "x", "sampling_params": {"max_tokens": -1}},
        {"key": 4},
    ]
    batch = pa.Table.from_pylist(rows, pa.Table.from_pylist([{**rows[0], **rows[1], **rows[2]}]).schema)
    table = answered(model, batch, should_continue_on_error=True)
    assert {*table.column_names} == {*batch.column_names} | ADDED | {"__inference_error__"}
    made, tokenizer = table.to_pylist(), Tokenizer.load(model)
    ids = tokenizer.encode("<s>user: hello\n<s>assistant:", add_special_tokens=False)
    assert [row["key"] for row in made] == [0, 1, 2, 3, 4]
    assert (made[0]["prompt_token_ids"], made[0]["generated_tokens"]) == (ids, ids[:4]) and made[0][
        "prompt"
    ].startswith("<s>user: hello")
    assert (made[1]["generated_tokens"], made[1]["num_input_tokens"], made[1]["num_generated_tokens"]) == (
        [5, 6],
        3,
        2,
    )
    assert (
        made[2]["generated_text"] == tokenizer.decode(made[2]["generated_tokens"])
        and made[2]["num_generated_tokens"] == 16
    )
    assert [row["__inference_error__"][:18] for row in made] == [
        "",
        "",
        "",
        "InvalidArgument: m",
        "InvalidArgument: p",
    ]
    assert (made[3]["generated_text"], made[3]["generated_tokens"], made[3]["finish_reason"]) == (
        "",
        [],
        None,
    )
    good = answered(model, batch.slice(0, 1))
    assert good.select(sorted(ADDED)).schema == table.select(sorted(ADDED)).schema, (
        "types do not depend on the rows"
    )
    assert "__inference_error__" not in good.column_names


def test_columns_that_were_there_and_template_variables(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ tone }}{% for m in messages %}{{ m.content }}{% endfor %}")
    batch = pa.table(
        {
            "messages": [[{"role": "user", "content": "hi"}]],
            "generated_text": ["old"],
            "sampling_params": ['{"max_tokens": 3}'],
        }
    )
    [row] = answered(model, batch, {"tone": "kind "}).to_pylist()
    assert row["prompt"] == "kind hi" and row["generated_text"] != "old" and row["num_generated_tokens"] == 3


@pytest.mark.parametrize(
    "params, field",
    [
        ({"n": 2}, "sampling_params.n"),
        ({"temprature": 1}, "temprature"),
        ("[1]", "sampling_params"),
        ("{max_tokens: 1}", "sampling_params"),
    ],
)
def test_wrong_parameters_end_the_job_or_are_reported(params: Any, field: str, model: Path) -> None:
    batch = pa.table({"prompt": ["x"], "sampling_params": [params]})
    with pytest.raises(InvalidArgument, match=field):
        answered(model, batch)
    [row] = answered(model, batch, should_continue_on_error=True).to_pylist()
    assert row["__inference_error__"].startswith("InvalidArgument: ") and field in row["__inference_error__"]


def test_a_dead_engine_ends_the_process(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray then starts another process."""

    class Exited(BaseException):
        pass

    def leave(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(Exited, match="1"):
        answered(model, pa.table({"prompt": ["x"] * 5}), fail_at=2, should_continue_on_error=True)


def test_what_cannot_be() -> None:
    for options in (
        {"concurrency": 0},
        {"concurrency": (3, 2)},
        {"batch_size": 0},
        {"max_concurrent_batches": 0},
    ):
        with pytest.raises(InvalidArgument, match=next(iter(options))):
            ProcessorConfig(model_source="mock", **options)
