"""The engine's trunks, compiled for absent GPUs."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
import pytest

from jengine.checkpoints.hugging_face import model_config
from jengine.core.config import EngineConfig
from jengine.core.speculation import Speculation
from jengine.engine.setup.shapes import describe
from jengine.execution.kernels import decode_refused, kernels_refused
from jengine.execution.programs import UNTUNED, WHOLE, compile_all, gpu_options, lower, program_keys
from jengine.execution.spec import ExecutionSpec
from jengine.models.moe import MixtureOfExperts
from jengine.parallel.mesh import make_mesh
from jengine.table.program_table import SWAPS, TrunkKey
from pallas_kernels.attention import work_list
from pallas_kernels.compilation import ahead_of_time
from pallas_kernels.products.four_bits import FourBits
from pallas_kernels.products.groups import GRID
from pallas_kernels.products.weights import is_weight
from tests.compiling import compiled_with_thunks
from tests.execution.hlo import parse
from tests.execution.specs import draft_config, partial_sums, temporaries_bound
from tests.extras import compiler_for_gpus
from tests.golden.weights import VARIANTS

compiler_for_gpus()

pytestmark = pytest.mark.usefixtures("optimized")

LAYERS = 2
STATEFUL = {**VARIANTS["qwen3_next"], "head_dim": 64, "hidden_size": 128, "dtype": "bfloat16"}
MODEL = {
    **VARIANTS["llama_gqa"],
    "head_dim": 64,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "dtype": "bfloat16",
}


def described(target: str, devices: int = 1, model: dict[str, Any] = MODEL, **options: Any) -> ExecutionSpec:
    mesh = make_mesh(devices, ahead_of_time.devices(target, devices))
    small = {
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 72,
        "tensor_parallel_size": devices,
    }
    config = EngineConfig.of("MODEL", {**small, **options})
    how = Speculation.of(config.speculative_config)
    draft = None if how is None or not how.on_device else draft_config(how.head, model)
    spec = describe(config, model_config(model), mesh, Path(), draft)
    return dataclasses.replace(spec, num_pages=4096)


def loops_of_unknown_length(text: str) -> list[str]:
    return [
        line for line in text.splitlines() if re.search(r"\bwhile\(", line) and "known_trip_count" not in line
    ]


def check_on_hopper(devices: int) -> None:
    spec = dataclasses.replace(described("h200", devices), host_pages=64)
    assert kernels_refused(spec) is None and spec.table.page_buckets == (0,)
    for key in spec.table.trunks():
        compiled = lower(spec, key).compile()
        text, memory = compiled.as_text(), compiled.memory_analysis()
        assert text is not None and memory is not None
        kernels = 3 if key.tiles else 2  # a layer writes, attends from rows, and attends from tiles
        assert len(re.findall(r'custom_call_target="mosaic_gpu', text)) == kernels * LAYERS
        assert not re.search(r"\b(while|conditional)\(", text)
        assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == (2 * LAYERS + 1 if devices > 1 else 0)
        assert memory.alias_size_in_bytes >= spec.cache_bytes + sum(
            x.size * x.dtype.itemsize for x in jax.tree.leaves(spec.slots)
        )
        assert memory.temp_size_in_bytes <= temporaries_bound(spec, key)
    check_swaps(spec)


def check_swaps(spec: ExecutionSpec) -> None:
    """Pages leave the cache, and come back, without a copy of it."""
    for key in ("spill", "fill"):
        compiled = lower(spec, key).compile()
        text, memory = compiled.as_text(), compiled.memory_analysis()
        assert text is not None and memory is not None
        assert not loops_of_unknown_length(text) and not re.search(
            r"\bconditional\(| all-(reduce|gather|to-all)", text
        )
        assert memory.alias_size_in_bytes >= (spec.cache_bytes if key == "fill" else 0)
        assert memory.temp_size_in_bytes <= 4 * SWAPS * spec.page_bytes + (1 << 16) < spec.cache_bytes // 8


def elsewhere(check: Callable[..., None], *args: Any) -> None:
    """Runs `check` in a separate process, since a process compiles kernels for only one compute
    capability.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(check, *args).result()


@pytest.fixture(scope="module")
def on_hopper() -> Iterator[Callable[..., None]]:
    """The same in one process for all checks, which thus imports and starts once."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda check, *args: pool.submit(check, *args).result()


QWEN3_30B_A3B = {
    **VARIANTS["qwen3_moe"],
    **{
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    **{
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_hidden_layers": 1,
        "mlp_only_layers": [],
    },
    **{"dtype": "bfloat16"},
}


FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def check_experts_on_hopper(quantization: str | None, devices: int = 1) -> None:
    """A layer of Qwen3-30B-A3B. XLA's own form multiplied by all experts, and transposed their weights."""
    how: Any = {"quantization": quantization, "enable_expert_parallel": devices > 1}
    model: Any = QWEN3_30B_A3B
    if quantization == "blocks":
        how["quantization"], model = None, {**QWEN3_30B_A3B, "quantization_config": FP8_BLOCKS}
    spec = described("h200", devices, model, max_num_batched_tokens=136, **how)
    config, most = spec.model.config, spec.table.trunks()[-1]
    experts = config.part(MixtureOfExperts)
    assert most.tiles == 2
    for key in (TrunkKey(8, 0), most):
        compiled, thunks = compiled_with_thunks(lower(spec, key), {**gpu_options(spec), **UNTUNED})
        text, memory = compiled.as_text(), compiled.memory_analysis()
        assert text is not None and memory is not None
        # attention's two weights are read as stored too; fp8 quantizes rows before each, and blocks experts'
        dense = {"int8": 2, "int4": 2, "fp8": 4, "blocks": 6}.get(quantization or "", 0)
        assert len(re.findall(r'custom_call_target="mosaic_gpu', text)) == (5 if key.tiles else 4) + dense
        # few rows: each alone in its expert
        rows = spec.table.tokens(key) * experts.per_token * (1 if key.tiles else GRID)
        # bytes: what goes into both products and comes out
        activations = rows * 2 * (2 * config.hidden_size + 3 * experts.size)
        assert memory.temp_size_in_bytes <= temporaries_bound(spec, key)
        # XLA converts eight-bit weights that all tokens share
        assert quantization or memory.temp_size_in_bytes <= 2 * activations
        assert len(thunks) == 1, "all of it in a command buffer"
        shapes = rf"{128 // devices},(?:768,2|1536|2048),\d+"
        moved = re.findall(rf"= \S*\[{shapes}\]\S* (?!parameter|bitcast|get-tuple-element)(\S+)\(", text)
        assert not moved, "expert weights are read as they lie"


MORE = [("int8", 1), ("fp8", 1), ("blocks", 1), (None, 4), ("int4", 4)]


@pytest.mark.parametrize(
    ("quantization", "devices"), [(None, 1), *(pytest.param(*one, marks=pytest.mark.full) for one in MORE)]
)
def test_on_hopper_experts_take_what_their_rows_take(
    on_hopper: Callable[..., None], quantization: str | None, devices: int
) -> None:
    on_hopper(check_experts_on_hopper, quantization, devices)


def check_four_bit_experts_on_hopper() -> None:
    """A layer of gpt-oss-120b, whose experts are in MXFP4. Without the kernel, XLA dequantizes all of them in
    each step.
    """
    model = json.loads((Path(__file__).parent.parent / "data" / "gpt-oss-120b" / "config.json").read_text())
    model |= {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    spec = described("h200", model=model, max_num_batched_tokens=136)
    config = spec.model.config
    experts = config.part(MixtureOfExperts)
    dequantized = 2 * experts.count * 2 * experts.size * config.hidden_size  # bytes of gate and up
    for key in (TrunkKey(8, 0), spec.table.trunks()[-1]):
        compiled, thunks = compiled_with_thunks(lower(spec, key), UNTUNED)
        text, memory = compiled.as_text(), compiled.memory_analysis()
        assert text is not None and memory is not None
        assert len(re.findall(r'custom_call_target="mosaic_gpu', text)) == (5 if key.tiles else 4)
        assert memory.temp_size_in_bytes <= temporaries_bound(spec, key) < dequantized // 16
        assert len(thunks) == 1, "all of it in a command buffer"
        moved = re.findall(
            r"= \S*\[128,(?:2880,2|5760|2880),\d+\]\S* (?!parameter|bitcast|get-tuple-element)(\S+)\(", text
        )
        assert not moved, "expert weights are read as they lie"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FourBits, "GROUPED", ())  # as before
        before = lower(spec, TrunkKey(8, 0)).compile().memory_analysis()
        assert before is not None and before.temp_size_in_bytes >= dequantized


@pytest.mark.full
def test_on_hopper_four_bit_experts_are_not_dequantized(on_hopper: Callable[..., None]) -> None:
    on_hopper(check_four_bit_experts_on_hopper)


def check_batch_invariant_on_hopper(devices: int) -> None:
    spec = described("h200", devices, batch_invariant=True)
    sums = "all-reduce" if devices == 2 else "all-gather"
    built = {
        one.key: one.program.as_text()
        for one in compile_all(spec, [*program_keys(spec)], threads=2, progress=False, options=UNTUNED)
    }
    for key in spec.table.trunks():
        # writes, and attends from rows or from tiles
        assert len(re.findall(r'custom_call_target="mosaic_gpu', built[key])) == 2 * LAYERS
        assert len(re.findall(rf" {sums}(?:-start)?\(", built[key])) == 2 * LAYERS + 1
        assert devices == 2 or " all-reduce" not in built[key]


@pytest.mark.full
@pytest.mark.parametrize("devices", [2, 4])
def test_batch_invariant_programs_compile_without_nondeterministic_operations(
    on_hopper: Callable[..., None], devices: int
) -> None:
    """XLA rejects operations without a deterministic form."""
    on_hopper(check_batch_invariant_on_hopper, devices)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.full)])
def test_on_hopper_kernels_do_all_that_touches_the_cache(
    on_hopper: Callable[..., None], devices: int
) -> None:
    on_hopper(check_on_hopper, devices)


# Llama 3.1 8B's
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 8192}


KERNELS = {TrunkKey(8, 0): 9, TrunkKey(8, 1): 11}  # of a dense layer
DECODE = "/paged_attention_decode/"


def check_layer(model: dict[str, Any], keys: list[TrunkKey], more: int) -> None:
    """From the second layer's `kv_write` to the third's: what is computed once a step stands in the first."""
    spec = described(
        "h200",
        1,
        {**model, **HEADS, "hidden_size": 256, "num_hidden_layers": 3, "dtype": "bfloat16"},
        max_model_len=8192,
    )
    for key in keys:
        compiled, thunks = compiled_with_thunks(lower(spec, key), {**gpu_options(spec), **UNTUNED})
        instructions = parse(compiled.as_text()).kernels()
        kernels = [f"{instruction.name}: {instruction.source}" for instruction in instructions]
        _, second, third = (i for i, kernel in enumerate(kernels) if "/kv_write/" in kernel)
        assert len(thunks) == 1
        # rows of a sequence read its pages together: a part that ends at a border has eight rows' results
        slots = {call.results[1].shape[0] for call in instructions if DECODE in call.source}
        pages: Any = jax.ShapeDtypeStruct((1, 1, 64, HEADS["head_dim"]), "bfloat16")
        borders = work_list.decode_blocks(pages, None) - 1
        assert slots == {8 * borders + 8 * HEADS["num_key_value_heads"]}
        assert third - second <= KERNELS[key] + more, kernels[second:third]


@pytest.mark.parametrize(
    ("variant", "keys", "more"),
    [
        ("qwen3_untied", [*KERNELS][:1], 0),  # norms of queries and keys
        pytest.param("qwen3_untied", [*KERNELS][1:], 0, marks=pytest.mark.full),
        pytest.param("llama_gqa", [*KERNELS], 0, marks=pytest.mark.full),
        pytest.param("qwen2_untied", [*KERNELS], 0, marks=pytest.mark.full),  # biases
        pytest.param("olmo2", [*KERNELS], 4, marks=pytest.mark.full),  # a norm over all heads, in XLA
    ],
)
def test_a_dense_layer_is_few_kernels(
    on_hopper: Callable[..., None], variant: str, keys: list[TrunkKey], more: int
) -> None:
    on_hopper(check_layer, VARIANTS[variant], keys, more)


DEEPSEEK_V3 = {
    **VARIANTS["deepseek_v3"],
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
LONG = {"rope_scaling": None, "max_position_embeddings": 8192}
LATENT_KERNELS = 21  # of a dense layer of a decode step


# One of eight devices' heads of DeepSeek V3, in dense layers.
SIZES = {"num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 512, "q_lora_rank": 256}
DENSE = {"num_hidden_layers": 3, "first_k_dense_replace": 3, "dtype": "bfloat16"}
LATENT = {**DEEPSEEK_V3, **SIZES, **DENSE, **LONG}


def check_latent_on_hopper() -> None:
    spec = described("h200", model=LATENT, max_model_len=8192)
    assert decode_refused(spec) is None and "compute capability 8.x" in str(kernels_refused(spec))
    rows, mixed = (
        [key for key in spec.table.trunks() if bool(key.tiles) == tiles] for tiles in (False, True)
    )
    assert {key.pages for key in rows} == {0} and len({key.pages for key in mixed}) > 1
    for key in (TrunkKey(8, 0), min(mixed)):
        built, thunks = compiled_with_thunks(lower(spec, key), UNTUNED)
        text, memory = built.as_text(), built.memory_analysis()
        assert text is not None and memory is not None
        assert len(re.findall(r'custom_call_target="mosaic_gpu', text)) == 3  # a layer attends from rows
        assert not loops_of_unknown_length(text) and not re.search(r"\bconditional\(", text)
        assert memory.alias_size_in_bytes >= spec.cache_bytes
        assert memory.temp_size_in_bytes <= temporaries_bound(spec, key)
        assert key.tiles or (len(thunks) == 1 and not re.search(r"\bwhile\(", text)), (
            "all of it in a command buffer"
        )
    compiled, _ = compiled_with_thunks(lower(spec, TrunkKey(8, 0)), {**gpu_options(spec), **UNTUNED})
    kernels = [f"{one.name}: {one.source}" for one in parse(compiled.as_text()).kernels()]
    _, second, third = (i for i, kernel in enumerate(kernels) if "/latent_attention_decode/" in kernel)
    assert third - second <= LATENT_KERNELS, kernels[second:third]


@pytest.mark.full
def test_on_hopper_latent_attention_reads_the_tokens_that_rows_have(on_hopper: Callable[..., None]) -> None:
    on_hopper(check_latent_on_hopper)


# as DeepSeek's and Qwen3's
def check_eight_bit_layer(keys: list[TrunkKey], more: int, quantization: str | None) -> None:
    """Kernels of a layer, beyond those of bfloat16 and of partial sums; no weight is converted or copied."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3, "dtype": "bfloat16"}
    blocks = {} if quantization else {"quantization_config": FP8_BLOCKS}
    model = {**VARIANTS["qwen3_untied"], **HEADS, **sizes, **blocks}
    options = {"quantization": quantization} if quantization else {}
    spec = described("h200", 1, model, max_model_len=8192, **options)
    weights = [leaf for leaf in jax.tree.leaves(spec.params["layers"], is_leaf=is_weight) if is_weight(leaf)]
    assert len(weights) == 3 * 4 and all(leaf.values.dtype.itemsize == 1 for leaf in weights)
    shapes = "|".join(f"{math.prod(leaf.shape[:-1])},{leaf.shape[-1]}" for leaf in weights)
    for key in keys:
        compiled, thunks = compiled_with_thunks(lower(spec, key), UNTUNED)
        text, memory = compiled.as_text(), compiled.memory_analysis()
        assert text is not None and memory is not None
        kernels = [f"{one.name}: {one.source}" for one in parse(text).kernels()]
        _, second, third = (i for i, kernel in enumerate(kernels) if "/kv_write/" in kernel)
        shared = partial_sums(weights[:4], spec.table.tokens(key))
        assert third - second <= KERNELS[key] + more + len(shared), kernels[second:third]
        assert len(thunks) == 1, "all of it in a command buffer"
        moved = re.findall(
            rf"= \S*\[(?:1,)?(?:{shapes})\]\S* (?!parameter|bitcast|get-tuple-element)(\S+)\(", text
        )
        assert not moved, "weights are read as they lie"
        most = 2 * 8192 * 1024 // 2 + 2 * sum(shared)
        assert memory.temp_size_in_bytes < most, "half of the largest weight in bfloat16, and partial sums"


@pytest.mark.parametrize(
    ("keys", "more", "quantization"),
    [
        ([*KERNELS][1:], 1, "fp8"),  # attention's results are quantized
        pytest.param([*KERNELS][:1], 1, "fp8", marks=pytest.mark.full),
        pytest.param([*KERNELS], 1, None, marks=pytest.mark.full),
        pytest.param([*KERNELS], 9, "w8a8", marks=pytest.mark.full),  # and transformed, as all inputs
    ],
)
def test_an_eight_bit_layer_is_few_kernels_and_copies_no_weight(
    on_hopper: Callable[..., None], keys: list[TrunkKey], more: int, quantization: str | None
) -> None:
    on_hopper(check_eight_bit_layer, keys, more, quantization)


def test_what_the_environment_says_of_command_buffers_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_options(described("h200")) == {}
    assert gpu_options(described("h200", 2)) == WHOLE
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    assert gpu_options(described("h200", 2)) == {}


def check_bursts_on_hopper() -> None:
    spec = described("h200", num_scheduler_steps=8)
    for key in spec.table.bursts():
        compiled = lower(spec, key).compile()
        text, memory = compiled.as_text(), compiled.memory_analysis()
        assert text is not None and memory is not None
        assert len(re.findall(r'custom_call_target="mosaic_gpu', text)) == 2 * LAYERS, "in the loop's body"
        assert not loops_of_unknown_length(text) and not re.search(r"\bconditional\(", text)
        assert memory.alias_size_in_bytes >= spec.cache_bytes + sum(
            x.size * x.dtype.itemsize for x in jax.tree.leaves(spec.slots)
        )
        assert memory.temp_size_in_bytes <= temporaries_bound(spec, key.trunk) + temporaries_bound(
            spec, key.sampler
        )


@pytest.mark.full
def test_bursts_on_hopper_copy_no_cache(on_hopper: Callable[..., None]) -> None:
    on_hopper(check_bursts_on_hopper)


def check_drafts_on_hopper(devices: int, method: str) -> None:
    how: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    how |= {} if method == "mtp" else {"model": "DRAFT"}
    model = {**MODEL, "model_type": "mimo"} if method == "mtp" else MODEL
    spec = described("h200", devices, model, speculative_config=how)
    for key in (*spec.table.draft_keys(), *spec.table.trunks()):
        compiled = lower(spec, key).compile()
        text, memory = compiled.as_text(), compiled.memory_analysis()
        assert text is not None and memory is not None
        assert not loops_of_unknown_length(text) and not re.search(r"\bconditional\(", text)
        assert memory.alias_size_in_bytes >= spec.cache_bytes + sum(
            x.size * x.dtype.itemsize for x in jax.tree.leaves(spec.slots)
        )
        assert memory.temp_size_in_bytes <= temporaries_bound(spec, key), key


@pytest.mark.full
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("method", ["draft_model", "mtp", "eagle3"])
def test_drafts_on_hopper_copy_no_cache(on_hopper: Callable[..., None], method: str, devices: int) -> None:
    on_hopper(check_drafts_on_hopper, devices, method)


def check_states_on_hopper(devices: int, drafts: bool) -> None:
    how: dict[str, Any] = {"num_scheduler_steps": 8}
    if drafts:
        how = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    spec = dataclasses.replace(described("h200", devices, STATEFUL, **how), num_states=1 << 16)
    assert (spec.draft_states > 0) == drafts
    for key in (TrunkKey(8, 1),) if drafts else (*spec.table.trunks(), *spec.table.bursts()):
        compiled = lower(spec, key).compile()
        text, memory = compiled.as_text(), compiled.memory_analysis()
        assert text is not None and memory is not None
        assert not loops_of_unknown_length(text) and not re.search(r"\bconditional\(", text)
        assert memory.alias_size_in_bytes >= spec.cache_bytes + sum(
            x.size * x.dtype.itemsize for x in jax.tree.leaves(spec.slots)
        )
        bound = (
            temporaries_bound(spec, key)
            if isinstance(key, TrunkKey)
            else temporaries_bound(spec, key.trunk) << 1
        )
        assert memory.temp_size_in_bytes <= bound < spec.num_states * spec.state_bytes // 4, (
            "a layer's states are not copied"
        )


@pytest.mark.full
@pytest.mark.parametrize(("devices", "drafts"), [(1, False), (2, False), (1, True)])
def test_states_on_hopper_are_updated_in_place(
    on_hopper: Callable[..., None], devices: int, drafts: bool
) -> None:
    """With drafts, in programs for rows that follow others of their sequence."""
    on_hopper(check_states_on_hopper, devices, drafts)


def check_without_hopper(target: str, model: dict[str, Any], kv_cache_dtype: str) -> None:
    spec = described(target, model=model, kv_cache_dtype=kv_cache_dtype)
    assert kernels_refused(spec) is None and spec.table.page_buckets == (0,)
    written = "kv_lora_rank" not in model  # XLA writes latent caches
    for key in spec.table.trunks():
        compiled = lower(spec, key).compile()
        text, memory = compiled.as_text(), compiled.memory_analysis()
        assert text is not None and memory is not None
        kernels = model["num_hidden_layers"] * (written + bool(key.rows) + bool(key.tiles))
        assert len(re.findall(r'custom_call_target="mosaic_gpu', text)) == kernels
        assert not loops_of_unknown_length(text) and not re.search(r"\bconditional\(", text)
        assert memory.alias_size_in_bytes >= spec.cache_bytes
        assert memory.temp_size_in_bytes <= temporaries_bound(spec, key)
    check_swaps(dataclasses.replace(spec, host_pages=64))


@pytest.mark.full
@pytest.mark.parametrize(
    ("target", "model", "kv_cache_dtype"),
    [
        ("a100", MODEL, "auto"),
        ("l4", MODEL, "auto"),
        ("a100", MODEL, "int8"),
        ("a100", LATENT, "auto"),
        ("rtx5090", LATENT, "auto"),
    ],
)
def test_without_hopper_kernels_serve_all_lengths(
    target: str, model: dict[str, Any], kv_cache_dtype: str
) -> None:
    elsewhere(check_without_hopper, target, model, kv_cache_dtype)
