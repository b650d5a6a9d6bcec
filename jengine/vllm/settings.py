"""vLLM's settings: arguments of its `LLM` and flags of `vllm serve`, sampling parameters, and arguments of
methods that jengine does not have under this name.
"""

from __future__ import annotations

import json
from typing import Any

from jengine.vllm.setting import Setting, at_most, no_effect, renamed, unsupported, whole_number

PROGRAMS = (
    "a fixed table of programs is compiled before the first request; see max_num_seqs, max_num_batched_tokens"
    " and warm_up"
)
TEXT = "not supported for images: leave it out"
SPECULATION = "see speculative_config, with method ngram, suffix, draft_model, mtp or eagle3"
EXCHANGE = "devices exchange through collectives of XLA; see enable_expert_parallel"
REPLICAS = (
    "`jengine serve --data-parallel-size N` runs replicas on one machine, jengine.integrations.ray on several"
)
PROCESSES = "start a process on each machine, with coordinator, num_processes and process_id"
CODE = "code that comes with a model is never run; model families are part of jengine"
FACTS = "is read from the model's config.json; edit the file in a copy of the folder"
GRAMMARS = "structured outputs always use llguidance"
KERNELS = "kernels are chosen by device, dtype and shape"
NUMA = "start the command with numactl; cpu_threads is the number of threads on a CPU"
STATES = "the number format of recurrent states is fixed"
ENCODERS = "embeddings of images are not sent to other engines; kv_transfer_config sends pages of prompts"
OFFLOADING = "swap_space keeps evicted pages in host memory, kv_transfer_config on a disk or elsewhere"
EMBEDS = {"embeddings": True}
BEAMS = "BeamSearchParams do this: LLM.beam_search, AsyncLLM.generate, completions over gRPC and HTTP"
MASKS = "use logit_bias, allowed_token_ids, bad_words or structured_outputs"
STRATEGY = "the strategy decides how many prompts a step computes; see strategy"
PARTS = "the parts of a message are joined to text"
ALWAYS = "it is always so"
CORS = "CORS headers allow what the API needs; see allowed_origins"
PROMPTS = (
    "prompts and outputs are never logged; request_log writes a line of JSON for each request without them"
)
ONE_PROCESS = "one process answers all clients, beside that of the engine"
PROXY = "paths begin with /v1: let the proxy remove its prefix"


def _usual_grammars(value: Any) -> bool:
    """Whether a JSON object, perhaps as text, asks for what is so anyway, such as any backend."""
    try:
        fields = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return False
    if not isinstance(fields, dict) or fields.get("disable_additional_properties") is False:
        return False
    return {name for name in fields if fields[name]} <= {"backend", "disable_additional_properties"}


ENGINE: tuple[Setting, ...] = (
    # --- renamed
    renamed("block_size", "page_size"),
    renamed("num_gpu_blocks_override", "num_pages"),
    renamed("kv_cache_memory_bytes", "kv_cache_memory",
        read=lambda value: whole_number(value) if isinstance(value, str) else value),
    renamed("scheduling_policy", "policy", "also `fair`, the default of `jengine serve`"),
    Setting("download_dir", "renamed", "sets the environment variable HF_HUB_CACHE", variable="HF_HUB_CACHE"),
    Setting("hf_token", "renamed", "sets the environment variable HF_TOKEN; True: that of `hf auth login`",
        fits=(True,), variable="HF_TOKEN", secret=True),
    renamed("async_scheduling", "overlap", "on by default", switch=True),
    Setting("task", "renamed", "models generate and embed, without a task", fits=("auto", "generate"),
        gives=dict.fromkeys(("embed", "embedding", "score"), EMBEDS)),
    Setting("runner", "renamed", "models generate and embed, without a task", fits=("auto", "generate"),
        gives={"pooling": EMBEDS}),
    Setting("convert", "renamed", "models generate and embed, without a task", fits=("auto", "none"),
        gives={"embed": EMBEDS}),
    unsupported("kv_offloading_size",
        "it is called swap_space here: GiB for each device, not for all together", "0"),
    unsupported("nnodes", f"it is called num_processes here: {PROCESSES}", 1, flags=("-n",)),
    unsupported("node_rank", f"it is called process_id here: {PROCESSES}", 0, flags=("-r",)),
    unsupported("master_addr", f"it is called coordinator here: {PROCESSES}", "127.0.0.1"),
    unsupported("master_port", f"it is a part of coordinator here: {PROCESSES}"),
    unsupported("use_tqdm_on_load", "LLM(progress=False) and --quiet hide progress bars", True),
    # --- no effect
    no_effect("enable_sleep_mode", "every engine can sleep", True, False),
    no_effect("enforce_eager", "programs are always compiled, before the first request", False),
    no_effect("disable_log_stats", "see LLM.stats and the metrics of `jengine serve`", False, True),
    no_effect("trust_remote_code", CODE, False),
    no_effect("code_revision", CODE),
    no_effect("enable_chunked_prefill", "prompts are always computed in chunks; see max_num_batched_tokens",
        True),
    no_effect(
        "prefix_caching_hash_algo",
        "cached pages are found by their tokens, without a hash; see enable_prefix_caching",
        "builtin", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor",
    ),
    no_effect("compilation_config", PROGRAMS, flags=("-cc",)),
    no_effect("optimization_level", PROGRAMS, flags=("-O",)),
    no_effect("performance_mode", PROGRAMS, "balanced"),
    no_effect("max_seq_len_to_capture", PROGRAMS),
    no_effect("cudagraph_capture_sizes", PROGRAMS),
    no_effect("max_cudagraph_capture_size", PROGRAMS),
    no_effect("attention_backend", KERNELS, "auto"),
    no_effect("attention_config", KERNELS, flags=("-ac",)),
    no_effect("kernel_config", KERNELS),
    no_effect("moe_backend", KERNELS, "auto"),
    no_effect("disable_cascade_attn", "there is no cascade attention", False, True),
    no_effect("disable_custom_all_reduce", "XLA performs all-reduces", False),
    no_effect("disable_hybrid_kv_cache_manager", "layers with a window always keep the window only", False),
    no_effect("all2all_backend", EXCHANGE),
    no_effect("enable_eplb", "each device keeps its experts", False),
    no_effect("enable_dbo", "steps are not split into two batches", False),
    no_effect("calculate_kv_scales", "kv_cache_dtype=fp8 has a scale for each token, computed from it",
        False),
    no_effect("guided_decoding_backend", GRAMMARS, "auto", "guidance"),
    no_effect("numa_bind", NUMA, False),
    no_effect("numa_bind_nodes", NUMA),
    no_effect("numa_bind_cpus", NUMA),
    no_effect("max_parallel_loading_workers", "weights are read by several threads"),
    no_effect("safetensors_load_strategy", "weights are read from mapped files", "lazy"),
    no_effect("model_loader_extra_config", "weights are read from local files"),
    no_effect("pt_load_map_location", "weights go to the device directly", "cpu"),
    no_effect("max_num_partial_prefills", STRATEGY, 1),
    no_effect("max_long_partial_prefills", STRATEGY, 1),
    no_effect("long_prefill_token_threshold", STRATEGY, 0),
    no_effect("num_lookahead_slots", "drafts lie on free rows", 0),
    no_effect("use_v2_block_manager", "there is one manager of pages", True, False),
    no_effect("collect_detailed_traces", "every step is recorded; see LLM.trace and `jengine explain`"),
    no_effect("show_hidden_metrics_for_version", "no metric is hidden"),
    no_effect("aggregate_engine_logging", "one engine logs", False),
    no_effect("ray_workers_use_nsight", "see `jengine profile`", False),
    no_effect("lora_dtype", "adapters have the model's dtype", "auto"),
    no_effect("fully_sharded_loras", "adapters are sharded as the weights that they change", False),
    Setting("language_model_only", "renamed", "a model with images serves text alone",
        gives={True: {"limit_mm_per_prompt": {"image": 0}}, False: {}}, switch=True),
    no_effect("skip_mm_profiling", "encoders are measured as all programs are", False, True),
    no_effect("mm_processor_cache_gb", "embeddings of images are kept on the device; see image_pool_rows"),
    no_effect("disable_mm_preprocessor_cache", "there is none", False, True),
    no_effect("model_impl", "model families are part of jengine", "auto", "vllm"),
    # --- not supported
    unsupported(
        "load_format",
        "weights are read in the format that they have: safetensors, PyTorch's .bin, GGUF, or a folder of "
        "`jengine convert`",
        "auto", "safetensors", "hf", "pt", "gguf", "fastsafetensors",
    ),
    unsupported("tokenizer_mode", "the tokenizer is read in the format that it has", "auto", "hf", "mistral"),
    unsupported("config_format", "config.json is read, or a GGUF file's metadata", "auto", "hf"),
    unsupported("skip_tokenizer_init",
        "the tokenizer is always loaded; prompts may be token ids all the same", False),
    unsupported("tokenizer_revision",
        "the tokenizer has the model's revision; for another one, pass its folder as tokenizer"),
    unsupported("hf_config_path", f"the configuration {FACTS}"),
    unsupported("hf_overrides", f"the configuration {FACTS}"),
    unsupported("rope_scaling", f"rope_scaling {FACTS}"),
    unsupported("rope_theta", f"rope_theta {FACTS}"),
    unsupported("override_attention_dtype", "attention has the model's dtype; see dtype and kv_cache_dtype"),
    unsupported("pooler_config",
        "LLM.embed takes pooling, normalize and dimensions; by default, the model's files decide"),
    unsupported("override_pooler_config", "LLM.embed takes pooling, normalize and dimensions"),
    unsupported("cpu_offload_gb", "weights are not offloaded; quantization makes them smaller", 0),
    unsupported("data_parallel_size_local", REPLICAS, 1, flags=("-dpl",)),
    unsupported("data_parallel_rank", REPLICAS, 0, flags=("-dpn",)),
    unsupported("data_parallel_address", REPLICAS, flags=("-dpa",)),
    unsupported("data_parallel_rpc_port", REPLICAS, flags=("-dpp",)),
    unsupported("data_parallel_backend", REPLICAS, "mp", flags=("-dpb",)),
    unsupported("decode_context_parallel_size", "a sequence's cache is split by kv heads only", 1,
        flags=("-dcp",)),
    unsupported("prefill_context_parallel_size", "a prompt is computed by all devices together", 1,
        flags=("-pcp",)),
    unsupported("distributed_executor_backend",
        f"one process uses all of its devices; for several machines, {PROCESSES}", "mp", "uni"),
    unsupported("device", "JAX chooses the device; JAX_PLATFORMS=cpu or JAX_PLATFORMS=cuda selects one",
        "auto"),
    unsupported("disable_sliding_window",
        "windows are part of the model; max_model_len can be set to the window's length", False),
    unsupported("max_logprobs", "at most 20 log probabilities are returned for a token", accepts=at_most(20)),
    unsupported("default_mm_loras", TEXT),
    unsupported("speculative_model", SPECULATION),
    unsupported("num_speculative_tokens", SPECULATION, 0),
    unsupported("structured_outputs_config",
        f"{GRAMMARS}; only backend may be set. A request opens its objects with"
        " disable_additional_properties=False, a schema with additionalProperties",
        accepts=_usual_grammars),
    unsupported("logits_processors", MASKS),
    unsupported("logits_processor_pattern", MASKS),
    unsupported("media_io_kwargs", "images are read as transformers does it"),
    unsupported("enable_mm_embeds", TEXT, False),
    unsupported("ec_transfer_config", ENCODERS),
    unsupported("kv_offloading_backend", OFFLOADING, "native"),
    unsupported("kv_sharing_fast_prefill", "models that share caches between layers compute prompts in full",
        False),
    unsupported("mamba_cache_dtype", STATES, "auto"),
    unsupported("mamba_ssm_cache_dtype", STATES, "auto"),
    unsupported("mamba_block_size", "snapshots of states are placed by jengine"),
    unsupported("worker_cls", "there are no workers to replace", "auto"),
    unsupported("worker_extension_cls", "there are no workers to replace"),
    unsupported("scheduler_cls", "the scheduler cannot be replaced; see policy, strategy and batching"),
    unsupported("io_processor_plugin", "plugins are not loaded"),
    unsupported("additional_config", "plugins are not loaded"),
    unsupported("ignore_patterns",
        "a model's folder is downloaded without PyTorch's files if it has safetensors"),
    unsupported("enable_return_routed_experts", "the experts of a token are not returned", False),
)  # fmt: skip

REQUESTS = "prompts and outputs are never logged; `jengine serve` has request_log, without them"
FETCHED = "give images as Pillow images, bytes, paths or data URLs; `jengine serve` has this option"
# Arguments of `LLM` that are options of the server here.
LIBRARY: tuple[Setting, ...] = (
    no_effect("disable_log_requests", REQUESTS, True, False),
    no_effect("enable_log_requests", REQUESTS, False),
    unsupported("allowed_media_domains", FETCHED),
    unsupported("allowed_local_media_path", FETCHED, ""),
)


SAMPLING: tuple[Setting, ...] = (
    renamed("guided_decoding", "structured_outputs"),
    no_effect("spaces_between_special_tokens", "the tokenizer decides about spaces", True),
    no_effect("skip_clone", "parameters are never changed", False, True),
    no_effect("stream_interval", "set stream_interval for the engine", 1),
    unsupported("flat_logprobs", "log probabilities are dicts by token id", False),
    unsupported("logits_processors", MASKS),
    unsupported("logprob_token_ids",
        "logprobs returns the likeliest tokens; allowed_token_ids restricts the choice"),
    unsupported("prompt_logprob_token_ids", "prompt_logprobs returns the likeliest tokens"),
    unsupported("prompt_logprob_start", "prompt_logprobs scores the whole prompt", 0),
    unsupported("skip_reading_prefix_cache", "a request with another cache_salt finds no pages of others",
        False),
    unsupported("repetition_detection", "use repetition_penalty or frequency_penalty"),
    unsupported("extra_args", "there are no plugins that would read them"),
    unsupported("best_of", "vLLM has removed it; n gives several completions", 1),
    unsupported("use_beam_search", BEAMS, False),
    unsupported("early_stopping", BEAMS, False),
    unsupported("length_penalty", BEAMS, 1.0),
    unsupported("truncate_prompt_tokens", "pass prompt_token_ids, cut to what you want"),
    unsupported("guided_json", 'structured_outputs={"json": ...} does this'),
    unsupported("guided_regex", 'structured_outputs={"regex": ...} does this'),
    unsupported("guided_choice", 'structured_outputs={"choice": ...} does this'),
    unsupported("guided_grammar", 'structured_outputs={"grammar": ...} does this'),
    unsupported("response_format", "structured_outputs does this"),
    unsupported("max_completion_tokens", "max_tokens does this"),
    unsupported("max_new_tokens", "max_tokens does this"),
)  # fmt: skip

STRUCTURED: tuple[Setting, ...] = (
    Setting("json_object", "renamed", fits=(False,), gives={True: {"json": {"type": "object"}}}, switch=True),
    no_effect("backend", "structured outputs always use llguidance", "auto", "guidance"),
    no_effect("disable_fallback", "there is one backend", False),
    unsupported("structural_tag", "use a grammar"),
)

CALLS: tuple[Setting, ...] = (  # of generate, chat, embed, score, ...
    unsupported("prompt_adapter_request", "prompt adapters are not supported"),
    unsupported("tokenization_kwargs", "pass prompt_token_ids, made as you want"),
    unsupported("truncate_prompt_tokens", "pass prompt_token_ids, cut to what you want"),
    unsupported("chat_template_content_format", PARTS, "auto", "string"),
    unsupported("pooling_params", "pass pooling, normalize and dimensions themselves"),
    unsupported("trace_headers", "spans are made by `jengine serve`; see otlp_traces_endpoint"),
    unsupported("data_parallel_rank", "run several engines", 0),
    no_effect("return_context_logits", "there are none", False),
    no_effect("encoding_format", "embeddings are numpy arrays", "float"),
)


SERVER: tuple[Setting, ...] = (
    # --- renamed
    renamed("ssl_keyfile", "tls_key"),
    renamed("ssl_certfile", "tls_cert"),
    renamed("trust_request_chat_template", "client_chat_templates", switch=True),
    renamed("shutdown_timeout", "drain_seconds"),
    unsupported("ssl_ca_certs",
        "it is called tls_client_ca here, and requires a certificate of every client"),
    unsupported("ssl_cert_reqs",
        "tls_client_ca requires client certificates (2); otherwise they are not asked for (0)", 0),
    Setting("enable_log_requests", "renamed", "or a file; without prompts and outputs",
        gives={True: {"request_log": "-"}, False: {}}, switch=True),
    unsupported("h11_max_incomplete_event_size", "it is called max_message_bytes here", 4194304),
    Setting("disable_log_stats", "renamed", "or `--no-log-stats`",
        gives={True: {"log_stats": False}, False: {"log_stats": True}}, switch=True),
    # --- no effect
    no_effect("enable_auto_tool_choice", f"{ALWAYS}; see tool_call_parser", True),
    no_effect("enable_reasoning", f"{ALWAYS}; see reasoning_parser", True),
    no_effect("disable_log_requests", PROMPTS, True, False),
    no_effect("disable_uvicorn_access_log", "no access log is written; see request_log", True, False),
    no_effect("disable_access_log_for_endpoints", "no access log is written; see request_log"),
    no_effect("uvicorn_log_level", "see log_level", "info"),
    no_effect("max_log_len", PROMPTS),
    no_effect("log_error_stack", "see log_level", False),
    no_effect("disable_fastapi_docs", "no such pages are served", True, False),
    no_effect("enable_offline_docs", "no such pages are served", False),
    no_effect("disable_frontend_multiprocessing", ONE_PROCESS, False),
    no_effect("api_server_count", ONE_PROCESS, 1, flags=("-asc",)),
    no_effect("enable_ssl_refresh", "SIGHUP reads the certificates again", False),
    no_effect("h11_max_header_count", "headers are limited to 16 KiB"),
    no_effect("enable_prompt_tokens_details", ALWAYS, True),
    no_effect("enable_request_id_headers", ALWAYS, True),
    no_effect("enable_server_load_tracking", "see metrics_port", False),
    no_effect("enable_per_request_metrics", "see request_log", False),
    no_effect("grpc", "gRPC is on, see grpc_port; smg_api adds the service for smg", True),
    no_effect("max_lora_modules", "see max_cpu_loras"),
    # --- not supported
    unsupported("http_port", "HTTP's port is called port, and gRPC's grpc_port"),
    unsupported("allowed_methods", CORS, ["*"], '["*"]'),
    unsupported("allowed_headers", CORS, ["*"], '["*"]'),
    unsupported("allow_credentials", CORS, False),
    unsupported("root_path", PROXY, "/"),
    unsupported("uds", "sockets in the file system are not served; see host and port"),
    unsupported("ssl_ciphers", "the ciphers are the defaults of OpenSSL and gRPC"),
    unsupported("middleware", "middleware cannot be added; put a reverse proxy in front of the server"),
    unsupported("chat_template_content_format", PARTS, "auto", "string"),
    unsupported("response_role", "answers have the role assistant", "assistant"),
    unsupported("return_tokens_as_token_ids", "log probabilities name tokens by their text", False),
    unsupported("exclude_tools_when_tool_choice_none", "requests that want no tools can omit them", False),
    unsupported("tool_parser_plugin", "parsers cannot be added; see tool_call_parser"),
    unsupported("reasoning_parser_plugin", "parsers cannot be added; see reasoning_parser"),
    unsupported("tool_server", "tools are called by clients"),
    unsupported("enable_force_include_usage", "clients ask for it with stream_options", False),
    unsupported("enable_tokenizer_info_endpoint",
        "there is no such path; the model's files have this information", False),
    unsupported("enable_log_outputs", PROMPTS, False),
    unsupported("log_config_file", "see log_level and request_log"),
    unsupported("tokens_only", "every path is served", False),
    unsupported("headless", PROCESSES, False),
)  # fmt: skip
