"""vLLM's names in Python that jengine does not have, and what to use instead."""

from __future__ import annotations

OF_LLM: dict[str, str] = {  # attributes of its LLM and AsyncLLM
    "apply_model": "a model's modules are not accessible",
    "add_lora": "use loras.load",
    "add_request": "use generate, LLM.llm_engine or AsyncLLM.submit",
    "check_health": "every call raises EngineDead once the engine has stopped",
    "classify": "models that classify are not supported; score compares a query with documents",
    "collective_rpc": "there are no workers to call; LLM.engine is the engine, for tools",
    "do_log_stats": "use LLM.stats or AsyncLLM.load",
    "encode": "embed gives embeddings, score gives scores",
    "engine_core": "LLM.engine is the engine, for tools",
    "get_metrics": "use AsyncLLM.load; `jengine serve --metrics-port` exports metrics to Prometheus",
    "get_world_size": "the option tensor_parallel_size is the number of devices",
    "list_loras": "use loras.list",
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
    "ModelConfig": "LLM takes options; llm.max_model_len and get_tokenizer() have what most scripts need",
    "ModelRegistry": "model families are part of jengine and cannot be registered",
    "PoolingOutput": "use EmbeddingOutput",
    "PoolingRequestOutput": "use EmbeddingRequestOutput",
    "VllmConfig": "use EngineConfig",
    "initialize_ray_cluster": "see jengine.integrations.ray",
}

IMAGES = (
    "give images as Pillow images, bytes, paths or data URLs in multi_modal_data, or as parts of a message"
)
SERVER = "run `jengine serve`; jengine.serving has its parts"
OF_MODULES: dict[str, str] = {  # its modules, from `vllm` on
    "assets": "it downloads test data of vLLM; open a file of yours, an image with Pillow",
    "attention": "kernels are in pallas_kernels",
    "benchmarks": "use `jengine bench`",
    "distributed": "devices exchange through XLA's collectives; LLM.close frees a model's memory",
    "entrypoints": SERVER,
    "forward_context": "jengine.Forward is a model's forward function",
    "model_executor": "model families are part of jengine; jengine.Forward is a model's forward function",
    "multimodal": IMAGES,
    "platforms": "jax.devices() has the devices",
    "plugins": "plugins are not loaded",
    "reasoning": SERVER,
    "tool_parsers": SERVER,
    "v1": "use LLM, LLMEngine or AsyncLLM",
    "worker": "there are no workers to replace",
}


def missing(of: str, name: str, known: dict[str, str]) -> str:
    """The message of an AttributeError or ImportError."""
    return f"{of} has no {name!r}" + (f": {known[name]}" if name in known else "")
