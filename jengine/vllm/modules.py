"""vLLM's modules that scripts import, such as jengine.engine.arg_utils, and what to use instead of names that
jengine does not have. There are no such files: a finder makes each of them from public names of jengine.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

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
    "reset_mm_cache": "embeddings of images are kept by their content; see image_pool_rows",
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
    "ModelRegistry": "families of jengine are registered with jengine.models.register",
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
PACKAGE = "jengine"
SAMPLING = "SamplingParams BeamSearchParams StructuredOutputsParams GuidedDecodingParams RequestOutputKind"
SETTINGS = "CompilationConfig KVEventsConfig KVTransferConfig SpeculativeConfig StructuredOutputsConfig"
MODULES = {  # paths, and the names that each module has
    "beam_search": "BeamSearchOutput BeamSearchSequence",
    "config": SETTINGS,
    "engine.arg_utils": "AsyncEngineArgs EngineArgs",
    "engine.async_llm_engine": "AsyncLLMEngine",
    "engine.llm_engine": "LLMEngine",
    "entrypoints.llm": "LLM",
    "inputs": "EmbedsPrompt PromptType TextPrompt TokensPrompt",
    "inputs.data": "EmbedsPrompt PromptType TextPrompt TokensPrompt",
    "logger": "init_logger",
    "logprobs": "Logprob",
    "lora.request": "LoRARequest",
    "outputs": (
        "CompletionOutput EmbeddingOutput EmbeddingRequestOutput RequestOutput ScoringOutput"
        " ScoringRequestOutput"
    ),
    "pooling_params": "PoolingParams",
    "sampling_params": SAMPLING,
    "tokenizers": "get_tokenizer",
    "transformers_utils.tokenizer": "get_tokenizer",
    "utils": "FlexibleArgumentParser random_uuid",
    "utils.argparse_utils": "FlexibleArgumentParser",
    "v1.engine.async_llm": "AsyncLLM",
    "v1.engine.llm_engine": "LLMEngine",
    "v1.metrics.reader": "Counter Gauge Histogram Metric Vector",
}
METRICS = "jengine.api.metrics"


def missing(of: str, name: str, known: dict[str, str]) -> str:
    """The message of an AttributeError or ImportError."""
    return f"{of} has no {name!r}" + (f": {known[name]}" if name in known else "")


HOMES = {  # names that `jengine` does not have, and where they are
    **{name: (METRICS, name) for name in MODULES["v1.metrics.reader"].split()},
    **dict.fromkeys(SETTINGS.split(), ("builtins", "dict")),  # options take their fields in a dict
    "FlexibleArgumentParser": ("jengine.vllm.flags", "Parser"),
    "GuidedDecodingParams": ("jengine.core.structured_outputs", "StructuredOutputs"),
    "PromptType": ("jengine.api.prompts", "Prompt"),
    "RequestOutputKind": ("jengine.api.request_handle", "RequestOutputKind"),
    "StructuredOutputsParams": ("jengine.core.structured_outputs", "StructuredOutputs"),
    "get_tokenizer": ("jengine.api.vllm_methods", "get_tokenizer"),
    "init_logger": ("logging", "getLogger"),
    "random_uuid": (__name__, "random_uuid"),
}


def random_uuid() -> str:
    """A random id, for a request."""
    return uuid.uuid4().hex


class VllmModules:
    """A finder for sys.meta_path, and the loader of what it finds."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module of this name, or one that has it as a submodule.

        Raises:
            ModuleNotFoundError: vLLM has it, and it is known what to use instead.
        """
        package, _, inner = name.partition(".")
        if package != PACKAGE or not inner:
            return None
        if any(f"{module}.".startswith(f"{inner}.") for module in MODULES):
            return ModuleSpec(name, cls, is_package=True)  # type: ignore[arg-type]  # a loader by its methods
        parts = inner.split(".")
        for prefix in (".".join(parts[:end]) for end in range(len(parts), 0, -1)):
            if prefix in OF_MODULES:
                raise ModuleNotFoundError(f"there is no module {name!r}: {OF_MODULES[prefix]}", name=name)
        return None

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType | None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        names = MODULES.get(module.__name__.removeprefix(f"{PACKAGE}."), "").split()

        def load(name: str) -> Any:
            if name not in names:
                text = missing(module.__name__, name, OF_PACKAGE)
                raise ImportError(text, name=module.__name__) if name in OF_PACKAGE else AttributeError(text)
            home, attribute = HOMES.get(name, (PACKAGE, name))
            return getattr(import_module(home), attribute)

        module.__doc__ = "Names of vLLM's module of the same name."
        module.__dict__.update(__all__=names, __getattr__=load, __dir__=lambda: names)
