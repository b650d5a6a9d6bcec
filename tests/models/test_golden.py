"""Models compared with transformers, using reference attention."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jengine.checkpoints import load, read_config
from jengine.execution.programs import CompilerOptions
from jengine.models import FAMILIES, Params, build
from jengine.parallel.collectives import TENSOR
from jengine.parallel.layout import Layout
from jengine.parallel.mesh import shard_mapped, stage_meshes
from tests.compiling import OPTIMIZED
from tests.golden.weights import VARIANTS, Golden, max_model_len, write_model
from tests.models.dense import DenseCausal

ROOT = Path(__file__).parent.parent.parent
TOLERANCE = 1e-4


def differences(
    variant: str,
    folder: Path,
    tensor_parallel_size: int = 1,
    *,
    options: CompilerOptions | None = None,
    expert_parallel: bool = False,
) -> list[float]:
    """Maximum difference of logits from the recorded ones, for each prompt. Also checks the greedy tokens."""
    layout = Layout(tensor=tensor_parallel_size, expert_parallel=expert_parallel)
    golden, [mesh] = Golden.read(variant), stage_meshes(layout)
    write_model(folder, variant)
    model = build(
        read_config(folder),
        "float32",
        max_model_len(variant),
        shards=layout.tensor,
        expert_shards=layout.expert_shards,
    )
    params = load(folder, model, mesh, progress=False)
    texts = [np.concatenate([case.prompt, case.tokens[:-1]]) for case in golden.cases]
    sequence = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    positions = np.concatenate([np.arange(len(text)) for text in texts])

    def run(params: Params, tokens: jax.Array, positions: jax.Array, sequence: jax.Array) -> jax.Array:
        module = model.bind(params)
        return module.logits(module.hidden(tokens, positions, DenseCausal(sequence, positions)))

    everywhere = NamedSharding(mesh, P())
    args = params, *(jax.device_put(x, everywhere) for x in (np.concatenate(texts), positions, sequence))
    forward = jax.jit(shard_mapped(mesh, run, args, P(None, TENSOR)), compiler_options=options)
    logits = np.asarray(forward(*args))[:, : model.config.vocab_size]
    assert logits.dtype == np.float32
    out = []
    for i, case in enumerate(golden.cases):
        mine, last = logits[sequence == i], len(case.prompt) - 1
        assert mine[last:].argmax(1).tolist() == case.tokens.tolist()
        out.append(float(np.abs(mine[last:] - case.logits).max()))
        if case.everywhere is not None:
            out.append(float(np.abs(mine[: last + 1] - case.everywhere).max()))
    return out


FURTHER = {
    "smollm3_window",
    "granite_biases",
    "starcoder2_window",
    "stablelm_parallel",
    "gpt_neox_serial",
    "gpt_oss_wide_sinks",
}
FURTHER |= {
    "gpt_oss_ties",
    "deepseek_v2_lite",
    "deepseek_v3_ties",
    "falcon_7b",
    "falcon_11b",
    "falcon_serial",
}
FURTHER |= {
    "qwen3_next_mixed",
    "exaone4_full",
    "cohere2_wide",
    "granitemoe_ties",
    "minimax_ties",
    "olmoe_ties",
    "phimoe_ties",
}
FURTHER |= {
    "qwen2_moe_ties",
    "phimoe_longrope_inside",
    "phimoe_longrope_beyond",
    "llama_mha",
    "llama_mqa",
    "llama_tied",
}
FURTHER |= {
    "llama_attention_bias",
    "llama_head_dim",
    "rope_dynamic_inside",
    "rope_yarn",
    "rope_yarn_mscale",
    "qwen3_untied",
}
FURTHER |= {
    "qwen2_untied",
    "qwen2_tied",
    "mistral_head_dim",
    "phi3_window",
    "phi3_longrope_inside",
    "opt_125m",
    "opt_1.3b",
}
FURTHER |= {"qwen3_moe", "cohere_norms", "gemma4_images"}
# of model types that have another variant here
IN_CI = [variant for variant in VARIANTS if variant not in FURTHER]
# these are compiled as users' programs are
FIRST = {str(VARIANTS[variant]["model_type"]): variant for variant in reversed(IN_CI)}
CASES = [pytest.param(variant, marks=[] if variant in IN_CI else [pytest.mark.full]) for variant in VARIANTS]


@pytest.mark.parametrize("variant", CASES)
def test_logits_match_transformers(variant: str, tmp_path: Path) -> None:
    options = OPTIMIZED if variant in FIRST.values() else None
    assert max(differences(variant, tmp_path, options=options)) < TOLERANCE


def test_each_model_type_is_compared_in_ci() -> None:
    """Without the marker `full`."""
    [mark] = [mark for mark in test_logits_match_transformers.pytestmark if mark.name == "parametrize"]
    compared = [case.values[0] for case in mark.args[1] if not case.marks]
    assert {VARIANTS[variant]["model_type"] for variant in compared} == {*FAMILIES} == {*FIRST}
    assert {*FIRST.values()} <= {*compared}


ONE_EACH = [
    "mistral_window", "phi3_window", "gemma2", "gemma3", "gpt2", "opt_125m", "qwen2_untied", "qwen3_tied",
    "mixtral", "qwen3_moe",
]  # fmt: skip
ONE_EACH += [
    "smollm3",
    "olmo2",
    "olmo3",
    "granite",
    "glm",
    "glm4",
    "gemma",
    "gemma3_images",
    "mistral3",
    "ministral3",
]
ONE_EACH += ["starcoder2", "stablelm_parallel", "phi", "gpt_neox", "falcon_40b"]
ONE_EACH += ["gpt_oss", "gpt_oss_wide_sinks", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"]
ONE_EACH += ["qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"]
ONE_EACH += [
    "gemma3n",
    "gemma3n_text",
    "gemma4",
    "gemma4_text",
    "bloom",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "glm4_moe",
    "gptj",
]
ONE_EACH += ["lfm2", "llama4", "llama4_text", "minimax_m2", "nemotron"]
ONE_EACH += [
    "cohere_norms",
    "cohere2",
    "granitemoe",
    "minimax",
    "minimax_m1",
    "minimax_text_01",
    "minimax_ties",
    "olmoe_ties",
    "phimoe",
    "qwen2_moe",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
]
SHARDED = ["llama_attention_bias", *(pytest.param(variant, marks=pytest.mark.full) for variant in ONE_EACH)]


@pytest.mark.parametrize("variant", SHARDED)
def test_sharded_over_two_devices(variant: str, tmp_path: Path) -> None:
    """Runs in a separate process, since the number of CPU devices is fixed when JAX starts."""
    code = "import sys, pathlib; from tests.models.test_golden import differences; "
    code += f"print(max(differences('{variant}', pathlib.Path(sys.argv[1]), 2)))"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    run = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < TOLERANCE


def test_goldens_are_what_they_claim() -> None:
    for variant in VARIANTS:
        golden = Golden.read(variant)
        assert golden.config == VARIANTS[variant], f"{variant} has changed since it was recorded"
        assert golden.smallest_margin > 1e-3
        assert sum(case.everywhere is not None for case in golden.cases) >= 1
