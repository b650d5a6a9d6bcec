"""vLLM's settings with the same name and meaning here, and what differs in detail."""

from __future__ import annotations

SAME: dict[str, str] = {
    "model": "also a GGUF file, or `demo`",
    "revision": "",
    "tokenizer": "",
    "generation_config": "`auto` or `vllm`",
    "override_generation_config": "also other sampling parameters",
    "dtype": "`half`, `float` and `bf16` too",
    "quantization": (
        "quantizes on load; `awq`, `gptq` and other formats are accepted for checkpoints that have them"
    ),
    "kv_cache_dtype": "`fp8` is `fp8_e4m3`, with a scale for each token",
    "max_model_len": (
        "`auto` is the default; `4k` is 4,000, `4K` is 4,096, on the command line and in variables"
    ),
    "max_num_seqs": "",
    "max_num_batched_tokens": "chunked prefill is always on",
    "gpu_memory_utilization": "",
    "enable_prefix_caching": "",
    "seed": "",
    "logprobs_mode": "`raw_logprobs` or `processed_logprobs`",
    "stream_interval": "",
    "tensor_parallel_size": "`-tp`",
    "pipeline_parallel_size": "`-pp`; `pipeline_layers` takes the place of `VLLM_PP_LAYER_PARTITION`",
    "data_parallel_size": "`-dp`; without `enable_expert_parallel`, of the service alone",
    "enable_expert_parallel": "",
    "chat_template": "a file or the template itself",
    "swap_space": (
        "vLLM has removed it (0.18); here GiB of host memory for each device that hold evicted cached pages"
    ),
    "num_scheduler_steps": "vLLM has removed it (2025); here decode steps that run as one program",
    "enable_lora": "",
    "max_loras": "",
    "max_lora_rank": "any up to 512",
    "max_cpu_loras": "by default, there is no limit",
    "lora_target_modules": "by default all linear layers but those of experts",
    "limit_mm_per_prompt": "for images; video and audio must be 0",
    "kv_events_config": "with publisher zmq or null; there is no snapshot_endpoint",
    "kv_transfer_config": "connectors are disk, remote and sockets; a page that is lost is recomputed",
    "mm_processor_kwargs": "`min_pixels`, `max_pixels`, `size`, `do_image_splitting`, as the model has them",
    "speculative_config": (
        "auto, or methods ngram, suffix, draft_model, mtp and eagle3; it changes no output"
    ),
    "host": "default 127.0.0.1",
    "port": "HTTP; gRPC has `grpc_port`",
    "served_model_name": "",
    "default_chat_template_kwargs": "",
    "lora_modules": "paths are folders or hub ids",
    "api_key": (
        "also the variable `JENGINE_API_KEY`; `api_keys` is a file with hashes and limits for each key"
    ),
    "allowed_origins": "default none; a comma-separated list or JSON",
    "allowed_media_domains": "default none; also `*.NAME` and `*`, with public addresses",
    "allowed_local_media_path": "default none",
    "tool_call_parser": "detected by default",
    "reasoning_parser": "detected by default",
    "otlp_traces_endpoint": "",
    "config": "a TOML file instead of YAML",
}
