"""vLLM's modules that scripts import, such as jengine.engine.arg_utils. There are no such files: a finder
makes each of them from public names of jengine.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from jengine.vllm.names import OF_MODULES, OF_PACKAGE, missing

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
    "inputs": "PromptType TextPrompt TokensPrompt",
    "inputs.data": "PromptType TextPrompt TokensPrompt",
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
HOMES = {  # names that `jengine` does not have, and where they are
    **{name: (METRICS, name) for name in MODULES["v1.metrics.reader"].split()},
    **dict.fromkeys(SETTINGS.split(), ("builtins", "dict")),  # options take their fields in a dict
    "FlexibleArgumentParser": ("jengine.vllm.arguments", "Parser"),
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
