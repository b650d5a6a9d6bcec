"""Estimates the time of decode steps on GPUs that are not available, from compiled programs, with shares by
cause.

    JAX_PLATFORMS=cpu python -m benchmarks.estimates [--models 8b 8b-int4 8b-fp8 ...] [--rows 1 8]
        [--together 2 4 8] [--prompts 1024] [--sampler truncated] [--quick]

Needs the extra `aot`. A step consists of a trunk and a sampler, the smallest programs for its rows. Each
sequence has one row, or several (`--together`), as where drafts are verified. Models are compiled with one
layer and with two; each further layer is assumed to take as long as the second. Each compiled program is
saved in `.cache/estimates` and reused while the sources are unchanged. So an interrupted run continues where
it ended, and a run with other rows compiles only the missing programs. Results are saved after each model and
merged with those of other rows. The estimates depend on `planning.estimate.Assumptions`, which have not been
verified on a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import jax

from benchmarks.machine import RESULTS, ROOT, save
from jengine.capacity.planning.compiled import Compiled, compiled
from jengine.capacity.planning.estimate import CAUSES, Assumptions, Estimate, Step, longer, together
from jengine.checkpoints.hugging_face import model_config
from jengine.core.config import EngineConfig
from jengine.devices.device_spec import device_spec
from jengine.engine.setup.shapes import describe
from jengine.execution.sources import source_digest
from jengine.execution.spec import ExecutionSpec
from jengine.parallel.mesh import make_mesh
from jengine.table.program_table import SamplerKey, TrunkKey
from pallas_kernels.compilation import ahead_of_time
from tools.make_model import COMMON, SHAPES

LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN3_30B_A3B = {
    **{
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "head_dim": 128,
    },
    **{
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "hidden_act": "silu",
    },
    **{
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "rope_theta": 1e6,
    },
    **{
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    },
}
# as DeepSeek's and Qwen3's
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # config.json and options
    "8b": ({**COMMON, **SHAPES["8b"]}, {}),
    "8b-int4": ({**COMMON, **SHAPES["8b"]}, {"quantization": "int4"}),
    "8b-fp8": ({**COMMON, **SHAPES["8b"]}, {"quantization": "fp8"}),
    "8b-w8a8": ({**COMMON, **SHAPES["8b"]}, {"quantization": "w8a8"}),
    "8b-fp8-blocks": ({**COMMON, **SHAPES["8b"], "quantization_config": FP8_BLOCKS}, {}),
    "70b": ({**COMMON, **SHAPES["8b"], **LLAMA_70B}, {"tensor_parallel_size": 8}),
    "30b-a3b": (QWEN3_30B_A3B, {}),
    "30b-a3b-on-2": (QWEN3_30B_A3B, {"tensor_parallel_size": 2}),
}
KEPT = ROOT / ".cache" / "estimates"
TARGET, ROWS, CONTEXTS = "h200", (1, 8, 32, 128, 256), (1024, 8192, 32768)


def described(config: dict[str, Any], options: dict[str, Any], layers: int) -> ExecutionSpec:
    devices = options.get("tensor_parallel_size", 1)
    mesh = make_mesh(devices, ahead_of_time.devices(TARGET, devices))
    options = {"max_num_seqs": max(ROWS), "max_model_len": max(CONTEXTS), **options}
    return describe(
        EngineConfig.of("MODEL", options), model_config({**config, "num_hidden_layers": layers}), mesh, Path()
    )


def kept(name: str, spec: ExecutionSpec, key: Any, folder: Path = KEPT) -> Compiled:
    """Loads a program from the folder, or compiles and saves it. Files of other sources are kept: branches
    may share the folder.

    Args:
        name: the model's name, which together with the sources and the key identifies the program.
    """
    file = folder / f"{name}-{key}-{sources()}.pickle"
    if not file.is_file():
        [program] = compiled(spec, [key], threads=1, progress=True)
        folder.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_bytes(pickle.dumps(program))
        new.replace(file)
    program = pickle.loads(file.read_bytes())
    assert isinstance(program, Compiled)
    return program


@functools.cache
def sources() -> str:
    """A digest of the sources that determine programs and estimates."""
    digest = hashlib.sha256(f"{source_digest()} {jax.__version__} {TARGET}".encode())
    for file in [Path(__file__), *sorted((ROOT / "jengine" / "capacity" / "planning").glob("*.py"))]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def measure(
    name: str, sampler: Any, batches: list[int], of_each: list[int], prompts: list[int]
) -> dict[str, Any]:
    """Milliseconds, shares, and bytes of the cache by rows and context, and for prompts of these lengths,
    each computed in one step.

    Args:
        batches: numbers of sequences.
        of_each: numbers of rows of each sequence.
    """
    config, options = MODELS[name]
    one, two = (described(config, options, layers) for layers in (1, 2))
    trunks, samplers = dict[int, TrunkKey](), dict[int, SamplerKey]()
    steps = [(count, each) for count in batches for each in of_each if count * each <= max(ROWS)]
    for rows in {count * each: None for count, each in steps}:
        trunks[rows] = next(key for key in one.table.trunks() if key.rows >= rows and not key.tiles)
        samplers[rows] = next(
            key for key in one.table.samplers() if key.rows >= rows and key.variant == sampler
        )
    whole = {
        tokens: next(key for key in one.table.trunks() if key.tiles * one.table.tile_size >= tokens)
        for tokens in prompts
    }
    needed = [*trunks.values(), *whole.values()]
    built = [
        {key: kept(f"{name}-{layers}", spec, key) for key in dict.fromkeys(keys)}
        for layers, spec, keys in ((1, one, [*needed, *samplers.values()]), (2, two, needed))
    ]
    device, layers = device_spec(TARGET), int(config["num_hidden_layers"])

    def trunk(key: TrunkKey, what: Step) -> tuple[Estimate, int]:
        """And the kernels of a layer."""
        shallow, deep = (programs[key].estimate(one, device, what) for programs in built)
        return longer(shallow, deep, layers), deep.kernels - shallow.kernels

    def step(count: int, each: int, context: int) -> tuple[Estimate, int]:
        rows, what = count * each, Step(count * each, context, each)
        own, of_layer = trunk(trunks[rows], what)
        return together([own, built[0][samplers[rows]].estimate(one, device, what)]), of_layer

    found = {
        f"{count} x {context}" if each == 1 else f"{count} of {each} x {context}": step(count, each, context)
        for count, each in steps
        for context in CONTEXTS
    }
    for tokens in prompts:  # with one decode row; a tile attends to half of the tokens on average
        found[f"prompt of {tokens}"] = trunk(whole[tokens], Step(1, (tokens + one.table.tile_size) // 2))
    results: dict[str, Any] = {}
    for case, (estimate, of_layer) in found.items():
        results[case] = {
            "ms": round(1e3 * estimate.total, 3),
            "kernels": estimate.kernels,
            "kernels_of_a_layer": of_layer,
            "cache_gb": round(estimate.moved["cache"] / 1e9, 3),
            "shares": {cause: round(estimate.seconds[cause] / estimate.total, 3) for cause in CAUSES},
        }
    return {
        "devices": one.mesh.size,
        "launches": {str(key): program.launches for key, program in built[1].items()},
        "steps": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--rows", type=int, nargs="*", default=[*ROWS], help="sequences")
    parser.add_argument("--together", type=int, nargs="+", default=[1], help="rows of each sequence")
    parser.add_argument(
        "--prompts",
        type=int,
        nargs="*",
        default=[],
        help="tokens of prompts, each in one step beside one row, without sampler",
    )
    parser.add_argument("--sampler", default="truncated", choices=["greedy", "sample", "truncated", "full"])
    parser.add_argument(
        "--quick", action="store_true", help="the first model alone, with a greedy sampler; nothing saved"
    )
    options = parser.parse_args()
    if options.quick:
        options.models, options.sampler = options.models[:1], "greedy"
    for name in options.models:
        result = measure(name, options.sampler, options.rows, options.together, options.prompts)
        show(name, result)
        if not options.quick:
            file = RESULTS / "estimates.json"
            before = json.loads(file.read_text())["models"] if file.exists() else {}
            for part in ("launches", "steps"):  # keep steps that were not estimated in this run
                result[part] = before.get(name, {}).get(part, {}) | result[part]
            facts = {
                "target": TARGET,
                "sampler": options.sampler,
                "assumed": dataclasses.asdict(Assumptions()),
            }
            save("estimates", facts | {"models": before | {name: result}})


def show(name: str, result: dict[str, Any]) -> None:
    causes = "".join(f"{cause:>13}" for cause in CAUSES)
    print(
        f"\n{name} on {result['devices']} x {TARGET}\n"
        f"{'rows x context':>15} {'ms':>9} {'kernels':>8} {'a layer':>8} {'cache GB':>9}{causes}"
    )
    for step, figures in result["steps"].items():
        shares = "".join(f"{figures['shares'][cause]:13.0%}" for cause in CAUSES)
        counts = f"{figures['kernels']:8,} {figures['kernels_of_a_layer']:8}"
        print(f"{step:>15} {figures['ms']:9.2f} {counts} {figures['cache_gb']:9.2f}{shares}", flush=True)


if __name__ == "__main__":
    main()
