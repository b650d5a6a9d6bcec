"""vLLM's names in Python that jengine does not have, and what to use instead."""

from __future__ import annotations

OF_LLM: dict[str, str] = {  # attributes of its LLM and AsyncLLM
    "apply_model": "a model's modules are not accessible",
    "add_lora": "use loras.load",
    "add_request": "use generate, or AsyncLLM.submit",
    "check_health": "every call raises EngineDead once the engine has stopped",
    "classify": "models that classify are not supported; score compares a query with documents",
    "collective_rpc": "there are no workers to call; LLM.engine is the engine, for tools",
    "do_log_stats": "use LLM.stats or AsyncLLM.load",
    "encode": "embed gives embeddings, score gives scores",
    "engine_core": "LLM.engine is the engine, for tools",
    "get_metrics": (
        "LLM.stats has counters, LLM.trace() has steps; `jengine serve --metrics-port` exports metrics to"
        " Prometheus"
    ),
    "get_world_size": "the option tensor_parallel_size is the number of devices",
    "list_loras": "use loras.list",
    "llm_engine": (
        "LLM.engine is the engine, for tools; most scripts need generate, chat, stream and stats only"
    ),
    "log_stats": "use LLM.stats or AsyncLLM.load",
    "model_config": "max_model_len and get_tokenizer() have what most scripts need",
    "pause_generation": "use pause",
    "preprocess_chat": "use chat_prompt",
    "remove_lora": "use loras.unload",
    "reset_mm_cache": "only text is supported",
    "resume_generation": "use resume",
    "reward": "reward models are not supported",
    "set_tokenizer": "the option tokenizer takes another model's tokenizer",
    "start_profile": "use LLM.trace(), LLM.explain() or `jengine profile`",
    "stop_profile": "use LLM.trace(), LLM.explain() or `jengine profile`",
    "wait_for_requests_to_drain": "close(drain=SECONDS) does this",
}

OF_PACKAGE: dict[str, str] = {  # what `import vllm` has
    "ClassificationOutput": "models that classify are not supported",
    "ClassificationRequestOutput": "models that classify are not supported",
    "FlexibleArgumentParser": "use argparse; EngineConfig.of(model, options) checks options",
    "LLMEngine": "use LLM (generate, stream, chat), or AsyncLLM for requests that arrive over time",
    "ModelRegistry": "model families are part of jengine and cannot be registered",
    "PoolingOutput": "use EmbeddingOutput",
    "PoolingRequestOutput": "use EmbeddingRequestOutput",
    "PromptType": "a prompt is text, a list of token ids, TextPrompt or TokensPrompt",
    "initialize_ray_cluster": "see jengine.integrations.ray",
}


def missing(of: str, name: str, known: dict[str, str]) -> str:
    """The message of an AttributeError or ImportError."""
    return f"{of} has no {name!r}" + (f": {known[name]}" if name in known else "")
