"""EngineConfig's options as keywords of LLM and AsyncLLM, for type checkers and editors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypedDict

from jengine.core.model_options import CheckpointFormat, Dtype, LogprobsMode
from jengine.core.quantization import Quantization
from jengine.core.scheduling_options import Batching, OnLate, Policy, StrategyName


class EngineOptions(TypedDict, total=False):
    """EngineConfig's fields but the model. Type checkers reject vLLM's names, which it takes too."""

    revision: str | None
    tokenizer: str | None
    chat_template: str | Path | None
    generation_config: Literal["auto", "vllm"] | None
    override_generation_config: dict[str, Any] | str | None
    dtype: Dtype
    quantization: Quantization | CheckpointFormat | None
    quantization_group_size: int
    calibration_data: str | Path | None
    kv_cache_dtype: Literal["auto", "int8", "fp8"]
    embeddings: bool | None
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int | None
    lora_target_modules: list[str] | tuple[str, ...] | str | None
    limit_mm_per_prompt: dict[str, Any] | str | None
    mm_processor_kwargs: dict[str, Any] | str | None
    image_pool_rows: int | None
    enable_prompt_embeds: bool
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    page_size: int | None
    tile_size: int
    kv_cache_memory: int | str | None
    gpu_memory_utilization: float
    num_pages: int | None
    logprobs_mode: LogprobsMode
    weight_updates: bool
    enable_prefix_caching: bool
    swap_space: float
    batch_invariant: bool
    policy: Policy
    priority_ageing: float
    strategy: StrategyName
    ttft_ms: float | None
    tpot_ms: float | None
    on_late: OnLate
    batching: Batching
    batch_wait_ms: float
    record_trace: str | Path | None
    overlap: bool
    num_scheduler_steps: int | str | None
    speculative_config: dict[str, Any] | str | None
    stream_interval: int
    kv_events_config: dict[str, Any] | str | None
    kv_transfer_config: dict[str, Any] | str | None
    seed: int
    cache_dir: str | Path | None
    cache_max_size: int | str | None
    programs: str | Path | None
    warm_up: Literal["progressive", "all"]
    compile_threads: int | None
    cpu_threads: int | None
    tensor_parallel_size: int
    data_parallel_size: int
    enable_expert_parallel: bool
    pipeline_parallel_size: int
    pipeline_layers: str | None
    coordinator: str | None
    num_processes: int
    process_id: int
