"""A Ray Data stage that completes prompts, with the column names of Ray Data LLM.

from jengine.integrations.ray.data import ProcessorConfig, build_processor

processor = build_processor(
    ProcessorConfig(model_source="Qwen/Qwen3-0.6B", concurrency=4, num_gpus=1),
    preprocess=lambda row: {"messages": [{"role": "user", "content": row["question"]}], "sampling_params":
    {"max_tokens": 64}}, postprocess=lambda row: {"question": row["question"], "answer":
    row["generated_text"]},
)
dataset = processor(ray.data.read_parquet("questions"))
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jengine import (
    AsyncLLM,
    CompletionOutput,
    EngineDead,
    InvalidArgument,
    JengineError,
    RequestOutput,
    SamplingParams,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from ray.data import Dataset

Row = dict[str, Any]
# possible prompt columns; each row uses its first non-null one
PROMPTS = ("prompt", "messages", "tokenized_prompt")
PARAMS = "sampling_params"
ERROR = "__inference_error__"


@dataclass(frozen=True, kw_only=True)
class ProcessorConfig:
    """Options of a stage, with the names and defaults of Ray Data LLM.

    Args:
        model_source: as `model` in LLM.
        engine_kwargs: options of the engine, as in LLM.
        batch_size: rows in a task's batch. If a worker dies, its batches are repeated.
        concurrency: number of workers, each with an engine; a pair is a pool that scales between these
            numbers.
        max_concurrent_batches: batches that a worker processes at the same time, to keep its engine's batch
            full.
        num_cpus, num_gpus: for each worker.
        accelerator_type: for each worker, with Ray's names.
        runtime_env: for the workers.
        should_continue_on_error: whether to put errors into the column __inference_error__, which is empty
            for other rows. By default, an error ends the job.
    """

    model_source: str
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 32
    concurrency: int | tuple[int, int] = 1
    max_concurrent_batches: int = 8
    num_cpus: float = 1
    num_gpus: float = 0
    accelerator_type: str | None = None
    runtime_env: dict[str, Any] | None = None
    should_continue_on_error: bool = False

    def __post_init__(self) -> None:
        low, high = self.workers
        if not 1 <= low <= high:
            raise InvalidArgument(
                "concurrency", self.concurrency, "must be a number of workers, at least 1, or (fewest, most)"
            )
        for name in ("batch_size", "max_concurrent_batches"):
            if getattr(self, name) < 1:
                raise InvalidArgument(name, getattr(self, name), "must be at least 1")

    @property
    def workers(self) -> tuple[int, int]:
        """Fewest and most workers."""
        return self.concurrency if isinstance(self.concurrency, tuple) else (self.concurrency,) * 2


def build_processor(
    config: ProcessorConfig,
    preprocess: Callable[[Row], Row] | None = None,
    postprocess: Callable[[Row], Row] | None = None,
    *,
    chat_template_kwargs: dict[str, Any] | None = None,
    make_llm: Callable[[ProcessorConfig], AsyncLLM] | None = None,
) -> Callable[[Dataset], Dataset]:
    """A function that adds answers to a dataset. Nothing runs until the dataset is consumed.

    A row has `prompt`, `messages` or `tokenized_prompt`, and may have `sampling_params`: SamplingParams'
    fields. The columns prompt, prompt_token_ids, num_input_tokens, generated_text, generated_tokens,
    num_generated_tokens and finish_reason are added.

    Args:
        preprocess: maps a row to one with these columns.
        postprocess: maps a row with the answer to a row of the result.
        chat_template_kwargs: additional variables for the chat template.
        make_llm: creates a worker's engine, instead of the default.
    """

    def process(dataset: Dataset) -> Dataset:
        from ray.data import ActorPoolStrategy

        low, high = config.workers
        if preprocess is not None:
            dataset = dataset.map(preprocess)
        options = {"accelerator_type": config.accelerator_type, "runtime_env": config.runtime_env}
        dataset = dataset.map_batches(
            BatchWorker,
            fn_constructor_args=(config, chat_template_kwargs, make_llm),
            batch_size=config.batch_size,
            batch_format="pyarrow",
            zero_copy_batch=True,
            compute=ActorPoolStrategy(min_size=low, max_size=high),
            num_cpus=config.num_cpus,
            num_gpus=config.num_gpus,
            max_concurrency=config.max_concurrent_batches,
            **{name: value for name, value in options.items() if value is not None},
        )
        return dataset if postprocess is None else dataset.map(postprocess)

    return process


class BatchWorker:
    """An actor. Returns whole batches in order, so that Ray can repeat a dead worker's tasks."""

    def __init__(
        self,
        config: ProcessorConfig,
        chat_template_kwargs: dict[str, Any] | None = None,
        make_llm: Callable[[ProcessorConfig], AsyncLLM] | None = None,
    ) -> None:
        self._config = config
        self._chat: Any = (
            {} if chat_template_kwargs is None else {"chat_template_kwargs": chat_template_kwargs}
        )
        options = {"progress": False, **config.engine_kwargs}
        self._llm = make_llm(config) if make_llm else AsyncLLM(config.model_source, **options)

    async def __call__(self, batch: pa.Table) -> pa.Table:
        tasks = [asyncio.ensure_future(self._answer(row)) for row in batch.to_pylist()]
        try:
            answers = await asyncio.gather(*tasks)
        except EngineDead:
            # Ray starts another worker and repeats the tasks; after an exception, this worker would stay in
            # the pool
            os._exit(1)
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        return _with_columns(batch, answers, self._config.should_continue_on_error)

    async def _answer(self, row: Row) -> Row:
        """The columns to add."""
        try:
            params = self._params(row.get(PARAMS))
            kind = next((name for name in PROMPTS if row.get(name) is not None), None)
            if kind is None:
                raise InvalidArgument("prompt", None, f"a row must have one of {', '.join(PROMPTS)}")
            prompt = row[kind]
            if kind == "messages":
                outputs = self._llm.chat(prompt, params, output_kind="final", **self._chat)
            else:
                outputs = self._llm.generate(prompt, params, output_kind="final")
            [output] = [output async for output in outputs]
            return _columns(output)
        except JengineError as wrong:
            if isinstance(wrong, EngineDead) or not self._config.should_continue_on_error:
                raise
            return {ERROR: f"{type(wrong).__name__}: {wrong}"}

    def _params(self, asked: object) -> SamplingParams:
        if isinstance(asked, str):
            try:
                asked = json.loads(asked)
            except ValueError as wrong:
                raise InvalidArgument(PARAMS, asked, f"is not JSON: {wrong}") from None
        if not isinstance(asked, dict | None):
            raise InvalidArgument(PARAMS, asked, "must be an object of sampling parameters")
        # Arrow adds nulls
        fields = {name: value for name, value in (asked or {}).items() if value is not None}
        if fields.get("n", 1) != 1:
            raise InvalidArgument(f"{PARAMS}.n", fields["n"], "must be 1: a row has one text")
        return self._llm.get_default_sampling_params().clone(**fields)


def _columns(output: RequestOutput) -> Row:
    output.require_answer()
    completion: CompletionOutput = output.outputs[0]
    return {
        "prompt": output.prompt or "",
        "prompt_token_ids": output.prompt_token_ids,
        "num_input_tokens": len(output.prompt_token_ids),
        "generated_text": completion.text,
        "generated_tokens": completion.token_ids,
        "num_generated_tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        ERROR: "",
    }


def _with_columns(batch: pa.Table, answers: list[Row], errors: bool) -> pa.Table:
    """Uses types that do not depend on the values, so that all blocks have the same schema."""
    import pyarrow as pa

    tokens = pa.list_(pa.int64())
    kinds: dict[str, tuple[Any, Any]] = {  # and the value of a row with an error
        "prompt": (pa.string(), ""),
        "prompt_token_ids": (tokens, None),
        "num_input_tokens": (pa.int64(), 0),
        "generated_text": (pa.string(), ""),
        "generated_tokens": (tokens, []),
        "num_generated_tokens": (pa.int64(), 0),
        "finish_reason": (pa.string(), None),
        **({ERROR: (pa.string(), None)} if errors else {}),
    }
    for name, (kind, empty) in kinds.items():
        values = [answer.get(name, empty) for answer in answers]
        if name == "prompt" and name in batch.column_names:  # use the row's own column
            values = [
                existing if existing is not None else value
                for existing, value in zip(batch.column(name).to_pylist(), values, strict=True)
            ]
        column = pa.array(values, kind)
        place = batch.schema.get_field_index(name)
        batch = batch.append_column(name, column) if place < 0 else batch.set_column(place, name, column)
    return batch
