"""A Ray Data stage: Ray Data LLM's columns, and every row once when a worker is killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jengine import AsyncLLM, Tokenizer
from tests.integrations.ray.conftest import wait_until

# ray's warnings
pytestmark = [pytest.mark.full, pytest.mark.usefixtures("cluster"), pytest.mark.filterwarnings("ignore")]
PARAMS = {"max_tokens": 4, "temperature": 0.0}


def killed_once(dataset: Any, pids: Path) -> list[dict[str, Any]]:
    """The dataset's rows; a worker is killed after the first ones."""
    rows: list[dict[str, Any]] = []
    first: set[str] = set()

    def kill() -> None:
        wait_until(lambda: len(rows) >= 100 and len([*pids.iterdir()]) >= 2)
        first.update(path.name for path in pids.iterdir())
        os.kill(int(min(first)), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    for row in dataset.iter_rows():
        rows.append(row)
    killer.join()
    assert len({path.name for path in pids.iterdir()} - first) >= 1, "no other worker came"
    return rows


def test_every_row_once_when_a_worker_is_killed(
    make_llm: Callable[..., AsyncLLM], pids: Path, model: Path
) -> None:
    import ray

    from jengine.integrations.ray.data import ProcessorConfig, build_processor

    config = ProcessorConfig(model_source="mock", concurrency=(2, 2), batch_size=16, max_concurrent_batches=2)
    processor = build_processor(
        config,
        preprocess=lambda row: {**row, "prompt": f"row {row['id']}", "sampling_params": PARAMS},
        make_llm=make_llm,
    )
    rows = killed_once(processor(ray.data.range(2000, override_num_blocks=40)), pids)
    assert sorted(row["id"] for row in rows) == [*range(2000)]
    tokenizer = Tokenizer.load(model)
    for row in rows:
        ids = tokenizer.encode(row["prompt"])
        assert list(row["generated_tokens"]) == (ids * 4)[:4] and row["generated_text"] == tokenizer.decode(
            (ids * 4)[:4]
        )
        assert (row["num_input_tokens"], row["num_generated_tokens"], row["finish_reason"]) == (
            len(ids),
            4,
            "length",
        )


def test_columns(make_llm: Callable[..., AsyncLLM], model: Path) -> None:
    """Every kind of prompt, Ray's column names, and rows that fail among others."""
    import ray

    from jengine.integrations.ray.data import ProcessorConfig, build_processor

    given = [
        {
            "key": 0,
            "messages": [{"role": "user", "content": "hello"}],
            "tokenized_prompt": None,
            "prompt": None,
            "sampling_params": PARAMS,
        },
        {
            "key": 1,
            "messages": None,
            "tokenized_prompt": [5, 6, 7],
            "prompt": None,
            "sampling_params": {"max_tokens": 2},
        },
        {"key": 2, "messages": None, "tokenized_prompt": None, "prompt": "text", "sampling_params": None},
        {"key": 3, "messages": None, "tokenized_prompt": None, "prompt": None, "sampling_params": PARAMS},
        {
            "key": 4,
            "messages": None,
            "tokenized_prompt": None,
            "prompt": "x",
            "sampling_params": {"max_tokens": -1},
        },
    ]
    config = ProcessorConfig(model_source="mock", should_continue_on_error=True)
    processor = build_processor(
        config,
        postprocess=lambda row: {name: value for name, value in row.items() if name != "messages"},
        make_llm=make_llm,
    )
    rows = {row["key"]: row for row in processor(ray.data.from_items(given)).take_all()}
    tokenizer = Tokenizer.load(model)
    ids = tokenizer.encode("<s>user: hello\n<s>assistant:", add_special_tokens=False)
    assert list(rows[0]["prompt_token_ids"]) == ids and list(rows[0]["generated_tokens"]) == ids[:4]
    assert list(rows[1]["generated_tokens"]) == [5, 6] and rows[1]["num_input_tokens"] == 3
    assert rows[2]["prompt"] == "text" and rows[2]["num_generated_tokens"] == 16
    assert (
        "a row must have one of prompt" in rows[3]["__inference_error__"]
        and "max_tokens" in rows[4]["__inference_error__"]
    )
    assert [rows[key]["__inference_error__"] for key in range(3)] == ["", "", ""]
    failing = build_processor(ProcessorConfig(model_source="mock"), make_llm=make_llm)(
        ray.data.from_items(given[4:])
    )
    with pytest.raises(Exception, match="max_tokens"):
        failing.take_all()


def test_a_model(pids: Path) -> None:
    """A worker is killed during 2,000 prompts, and the answers equal those of one engine."""
    import ray

    from jengine import LLM, SamplingParams
    from jengine.integrations.ray.data import ProcessorConfig, build_processor

    def make(config: ProcessorConfig) -> AsyncLLM:
        (pids / str(os.getpid())).touch()
        return AsyncLLM(config.model_source, progress=False, **config.engine_kwargs)

    options = {"dtype": "float32", "warm_up": "all"}
    config = ProcessorConfig(model_source="demo", engine_kwargs=options, concurrency=(2, 2))
    processor = build_processor(
        config,
        preprocess=lambda row: {**row, "prompt": f"def f{row['id']}(", "sampling_params": PARAMS},
        make_llm=make,
    )
    rows = killed_once(processor(ray.data.range(2000, override_num_blocks=40)), pids)
    assert sorted(row["id"] for row in rows) == [*range(2000)]
    some = sorted(rows, key=lambda row: row["id"])[:50]
    expected = LLM("demo", progress=False, **options).generate(
        [row["prompt"] for row in some], SamplingParams(**PARAMS), use_tqdm=False
    )  # type: ignore[arg-type]
    assert [list(row["generated_tokens"]) for row in some] == [
        list(one.outputs[0].token_ids) for one in expected
    ]
