"""Tests that need eight devices. The number of CPU devices is fixed when JAX starts, so test_many_devices.py
runs them in a process."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.restart import restart_scheduler
from jengine.checkpoints import load, read_config
from jengine.core.config import EngineConfig
from jengine.core.request import MAX_LOGPROBS, SamplingParams
from jengine.core.updates import TokenUpdate
from jengine.engine.loop.engine import Engine
from jengine.engine.operations import ResetPrefixCache
from jengine.engine.start import start_engine
from jengine.execution.programs import Programs, QuickCall, lower, memory_of
from jengine.execution.spec import ExecutionSpec
from jengine.models import build
from jengine.parallel.collectives import (
    DATA,
    TENSOR,
    all_gather,
    all_reduce,
    all_to_all,
    own_rows,
    shard_index,
)
from jengine.parallel.layout import Layout
from jengine.parallel.mesh import make_mesh, shard_mapped, stage_meshes
from jengine.scheduling.costs.draft_costs import all_of_them
from jengine.scheduling.costs.step_costs import SwapCosts
from jengine.table.program_table import SamplerKey
from pallas_kernels.quantization.quantized import dequantize
from tests.checkpoints.quantized_models import gptq, write_quantized
from tests.engine.invariance import OPTIONS, check_invariance
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL, Answer, requests_of, run
from tests.engine.test_golden import assert_equal
from tests.execution.specs import make_spec, temporaries_bound
from tests.golden.heads import following, write_followers
from tests.golden.weights import Golden, max_model_len, write_model

# Of the families, what differs between devices: kv heads (1, 2, 4), biases, norms, windows, learned
# positions, projections, experts.
QUICK = ["llama_mqa"]
REST = [
    "llama_attention_bias", "llama_mlp_bias", "mistral_window", "phi3_window", "gemma2", "gemma3", "gpt2",
    "opt_125m", "opt_350m",
]  # fmt: skip
REST += ["qwen2_tied", "qwen3_untied", "mixtral", "qwen3_moe", "qwen3_moe_mixed", "llama_mha"]
REST += [
    "olmo2",
    "glm4",
    "ministral3",
    "stablelm_parallel",
    "phi",
    "gpt_neox",
    "falcon_7b",
    "falcon_40b",
    "gpt_oss",
    "deepseek_v3",
]
REST += ["qwen3_next", "qwen3_5"]
EVERY = [*QUICK, *(pytest.param(variant, marks=pytest.mark.full) for variant in REST)]
SIZES = [2, pytest.param(4, marks=pytest.mark.full), 8]
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
    "collective-broadcast",
)


def answers(folder: Path, variant: str, devices: int, **options: Any) -> list[Answer]:
    config = EngineConfig.of(
        str(folder),
        {
            **SMALL,
            "max_model_len": max_model_len(variant),
            "tensor_parallel_size": devices,
            "dtype": "float32",
            **options,
        },
    )
    with nullcontext() if "cache_dir" in options else on_demand():
        engine, _ = start_engine(config, progress=False)
    work = [
        (
            case.prompt.tolist(),
            SamplingParams(
                temperature=0.0, max_tokens=len(case.tokens), ignore_eos=True, logprobs=MAX_LOGPROBS
            ),
        )
        for case in Golden.read(variant).cases
    ]
    work += [
        (prompt, SamplingParams(temperature=0.0, max_tokens=params.max_tokens, ignore_eos=True))
        for prompt, params in work
    ]
    work += [
        (work[0][0], SamplingParams(temperature=0.9, seed=i, max_tokens=9, prompt_logprobs=1))
        for i in range(3)
    ]
    found = run(engine, work)
    longest = max(work, key=lambda one: len(one[0]))[0]
    check_samples(engine, [*longest[:63], 2 if longest[63] == 1 else 1, 2])
    assert engine.compiles_since_start == 0
    return found


def check_samples(engine: Engine, prompt: list[int]) -> None:
    """Samples that begin with a hit and copy a shared page equal those of requests that share nothing."""
    how = SamplingParams(temperature=0.9, seed=7, max_tokens=9, n=3)
    together = run(engine, [(prompt, how)])
    hit = 48 if engine.scheduler.blocks.states is None else 0  # the first snapshot comes after a tile
    assert [answer.sequence.num_cached for answer in together] == [hit, len(prompt), len(prompt)]
    for number, answer in enumerate(together):
        engine.do(ResetPrefixCache())
        engine.add(requests_of("alone", prompt, how)[number])
        alone = []
        while engine.has_work:
            alone += engine.step()
        assert [update.token for update in alone if isinstance(update, TokenUpdate)] == answer.tokens


@pytest.mark.parametrize("devices", [2, *(pytest.param(size, marks=pytest.mark.full) for size in (4, 8))])
@pytest.mark.parametrize("variant", EVERY)
def test_greedy_tokens_do_not_depend_on_the_devices(variant: str, devices: int, tmp_path: Path) -> None:
    """Heads and kv heads that the devices do not divide are among them: tiny models have four of one and one
    to four of the other.
    """
    write_model(tmp_path, variant)
    found, cases = answers(tmp_path, variant, devices), Golden.read(variant).cases
    for answer, case in zip(found, cases, strict=False):
        assert_equal(answer, case)
    for answer, case in zip(found[len(cases) :], cases, strict=False):
        assert answer.tokens == case.tokens.tolist()


@pytest.mark.full
@pytest.mark.parametrize("devices", [2, 4])
def test_a_draft_model(devices: int, tmp_path: Path) -> None:
    """Its weights, keys and values are cut as the model's; the same model is always right."""
    write_model(tmp_path, "llama_mqa")
    how = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}
    options = {**SMALL, "tensor_parallel_size": devices, "dtype": "float32", "speculative_config": how}
    with on_demand():
        config = {**options, "max_model_len": max_model_len("llama_mqa")}
        engine, _ = start_engine(EngineConfig.of(str(tmp_path), config), progress=False)
    restart_scheduler(engine, how_many_drafts=all_of_them)
    cases = Golden.read("llama_mqa").cases[:2]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    found = run(engine, [(case.prompt.tolist(), params) for case in cases])
    assert [answer.tokens for answer in found] == [case.tokens.tolist() for case in cases]
    speculation = engine.scheduler.speculation
    assert sum(speculation.accepted) == speculation.tokens > 20 and engine.compiles_since_start == 0


@pytest.mark.full
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_a_head(method: str, devices: int, tmp_path: Path) -> None:
    """A head that follows the model's rule is always right, also with parts of its heads and vocabulary."""
    options = {**SMALL, "dtype": "float32", "speculative_config": write_followers(tmp_path, method)}
    with on_demand():
        every = {**options, "tensor_parallel_size": devices}
        engine, _ = start_engine(EngineConfig.of(str(tmp_path), every), progress=False)
    restart_scheduler(engine, how_many_drafts=all_of_them)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for answer in run(engine, [([*range(start, 60)], params) for start in (3, 40, 59)]):
        assert answer.tokens == following(64)[[59, *answer.tokens[:-1]]].tolist()
    right, drafted = engine.scheduler.speculation.right, engine.scheduler.speculation.tokens
    assert right == drafted > 40 and engine.compiles_since_start == 0


@pytest.mark.full
def test_seeds_and_prompt_logprobs_do_not_either(tmp_path: Path) -> None:
    write_model(tmp_path, "llama_gqa")
    one, many = (answers(tmp_path, "llama_gqa", devices)[-3:] for devices in (1, 4))
    for a, b in zip(one, many, strict=True):
        assert a.tokens == b.tokens
        for x, y in zip(a.scores, b.scores, strict=True):
            mine, theirs = ([token for token in score.logprobs if token is not None] for score in (x, y))
            assert len(mine) == len(theirs) > 0
            for p, q in zip(mine, theirs, strict=True):
                assert abs(p.logprob - q.logprob) < 1e-4 and p.rank == q.rank


@pytest.mark.full
@pytest.mark.parametrize("variant", ["llama_gqa", "deepseek_v3"])
def test_pages_travel_between_numbers_of_devices(variant: str, tmp_path: Path) -> None:
    """A page is stored as it is on all devices together."""
    write_model(tmp_path / "model", variant)
    where = {"kv_connector": "disk", "kv_connector_extra_config": {"root_dir": str(tmp_path / "pages")}}
    prompt, found = [(7 * i + 3) % 90 for i in range(70)], list[tuple[list[int], int]]()
    for devices, fresh in ((1, False), (2, False), (2, True), (1, False)):
        if fresh:
            shutil.rmtree(tmp_path / "pages")
        own = {"kv_transfer_config": where, "swap_space": 0.05, "tensor_parallel_size": devices}
        options = {"max_model_len": max_model_len(variant), "dtype": "float32", **SMALL, **own}
        with on_demand():
            engine = start_engine(EngineConfig.of(str(tmp_path / "model"), options), progress=False)[0]
        engine.scheduler.predictor.costs.swaps = SwapCosts(0.0, 0.0, 0.0)
        assert engine.pages is not None
        engine.pages._rates[None] = 0.0  # loading is free at first
        [answer] = run(engine, [(prompt, SamplingParams(temperature=0.0, max_tokens=8))])
        found.append((answer.tokens, answer.updates[-1].cached))
        engine.close()
    assert found == [(found[0][0], cached) for cached in (0, 64, 0, 64)]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:quantization='fp8' is emulated")
@pytest.mark.parametrize("quantization", ["int8", "w8a8", "fp8", "int4", "w4a8"])
def test_fewer_bits_on_four_devices(quantization: str, tmp_path: Path) -> None:
    """Rounding differs where devices quantize their own part of a row. It takes the model no farther from
    its answers with exact weights than one device's rounding does.
    """
    write_model(tmp_path, "qwen3_untied")
    exact, one, many = (
        answers(tmp_path, "qwen3_untied", devices, quantization=kind, kv_cache_dtype="int8")
        for devices, kind in ((1, None), (1, quantization), (4, quantization))
    )

    def near(found: list[Answer]) -> int:
        return sum(a.tokens[:3] == b.tokens[:3] for a, b in zip(found, exact, strict=True))

    assert near(many) >= max(near(one) - 2, len(exact) / 2)


@pytest.mark.parametrize("devices", [2, 4])
def test_stored_groups_are_cut(devices: int, tmp_path: Path) -> None:
    """Each device has whole groups of inputs; together, the devices have the stored values."""
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
        "dynamic": {"-:.*o_proj": {}},
    }
    stored = write_quantized(tmp_path, config, gptq(32, 4, symmetric=True), plain=("o_proj.weight",))
    model = build(read_config(tmp_path), "float32", 64, shards=devices)
    down = load(tmp_path, model, make_mesh(devices), progress=False)["layers"][0]["mlp"]["down"]
    assert {shard.data.shape for shard in down.values.addressable_shards} == {(64, 16)}
    np.testing.assert_allclose(
        dequantize(down), stored["model.layers.0.mlp.down_proj.weight"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("variant", "devices", "dtype", "count"),
    [
        ("llama_gqa", 2, "float32", 16),
        pytest.param("llama_gqa", 2, "float32", 200, marks=pytest.mark.full),
        pytest.param("llama_gqa", 2, "bfloat16", 200, marks=pytest.mark.full),
        pytest.param("gemma2", 4, "float32", 50, marks=pytest.mark.full),
        pytest.param("qwen3_moe", 2, "bfloat16", 50, marks=pytest.mark.full),
        pytest.param("qwen3_moe", 4, "bfloat16", 50, marks=pytest.mark.full),
        pytest.param("deepseek_v2", 2, "bfloat16", 50, marks=pytest.mark.full),
        pytest.param("deepseek_v2", 4, "float32", 50, marks=pytest.mark.full),
        pytest.param("qwen3_next", 2, "bfloat16", 50, marks=pytest.mark.full),
        pytest.param("qwen3_next", 4, "float32", 50, marks=pytest.mark.full),
    ],
)
def test_batch_invariance(variant: str, devices: int, dtype: str, count: int, tmp_path: Path) -> None:
    """Engines on as many devices are compared: alone and in company."""
    write_model(tmp_path, variant)
    options = {**SMALL, **OPTIONS, "max_model_len": 192, "tensor_parallel_size": devices, "dtype": dtype}
    with on_demand(optimized=True):
        engine, _ = start_engine(EngineConfig.of(str(tmp_path), options), progress=False)
    check_invariance(engine, count, seed=3)


def text_of(program: Any) -> str:
    """The text of a program of `Programs`."""
    text: str = getattr(program, "program", program).as_text()
    return text


def collectives(program: Any) -> Counter[str]:
    text = text_of(program)
    return Counter(re.findall(rf" = .* ({'|'.join(COLLECTIVES)})(?:-start)?\(", text))


def in_loops(program: Any) -> list[str]:
    """Collectives outside the program's entry computation."""
    text = text_of(program)
    entry = text[text.index("\nENTRY ") :]
    return [
        line
        for line in text.splitlines()
        if re.search(rf" ({'|'.join(COLLECTIVES)})(-start)?\(", line) and line not in entry
    ]


@pytest.fixture(
    scope="module",
    params=[2, pytest.param(4, marks=pytest.mark.full), pytest.param(8, marks=pytest.mark.full)],
)
def programs(request: pytest.FixtureRequest) -> tuple[ExecutionSpec, Programs]:
    spec = make_spec("llama_mqa", devices=request.param)
    return spec, Programs(spec, None, threads=2, progress=False)


def test_a_trunk_sums_twice_a_layer_and_once_for_its_embedding(
    programs: tuple[ExecutionSpec, Programs],
) -> None:
    spec, compiled = programs
    for key in spec.table.trunks():
        assert collectives(compiled[key]) == {"all-reduce": 2 * spec.model.config.num_layers + 1}, key
        assert not in_loops(compiled[key])


@pytest.mark.full
@pytest.mark.parametrize(
    "variant",
    [
        "gemma2",
        "gpt2",
        "opt_350m",
        "qwen3_untied",
        "mixtral",
        "qwen3_moe_mixed",
        "olmo2",
        "stablelm_parallel",
        "falcon_7b",
        "qwen3_next",
    ],
)
def test_so_does_every_family(variant: str) -> None:
    """OLMo norms queries and keys over all heads, which takes a third one. Of attention and MLP that are
    added at once, XLA makes one.
    """
    spec = make_spec(variant, devices=4)
    compiled = Programs(spec, None, threads=2, progress=False)
    for key in spec.table.trunks():
        each = {"olmo2": 3, "stablelm_parallel": 1, "falcon_7b": 1}.get(variant, 2)
        assert collectives(compiled[key]) == {"all-reduce": each * spec.model.config.num_layers + 1}, key
        assert not in_loops(compiled[key])


def test_a_sampler_takes_rows_for_columns_once_and_shares_its_tokens(
    programs: tuple[ExecutionSpec, Programs],
) -> None:
    spec, compiled = programs
    for key in spec.table.samplers():
        assert collectives(compiled[key]) == {"all-to-all": 1, "all-gather": 1}, key
        assert not in_loops(compiled[key])


def test_memory_on_each_device(programs: tuple[ExecutionSpec, Programs]) -> None:
    spec, compiled = programs

    def own_bytes(tree: Any) -> int:
        return sum(
            int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in jax.tree.leaves(tree)
        )

    assert own_bytes(spec.cache) == spec.cache_bytes
    for key in spec.table.trunks():
        assert compiled.memory[key].aliased >= own_bytes(spec.cache) + own_bytes(spec.slots)
        assert compiled.memory[key].temporaries <= temporaries_bound(spec, key), key
    many = make_spec("llama_mqa", devices=spec.mesh.devices.size, num_pages=16384)
    key = spec.table.trunks()[0]
    assert memory_of(lower(many, key).compile()).temporaries == compiled.memory[key].temporaries
    for sampler in spec.table.samplers():
        assert isinstance(sampler, SamplerKey)
        assert compiled.memory[sampler].temporaries <= temporaries_bound(spec, sampler), sampler


@pytest.mark.full
def test_saved_programs_carry_the_mesh(tmp_path: Path) -> None:
    specs = [make_spec(devices=n) for n in (1, 2)]
    assert specs[0].fingerprint() != specs[1].fingerprint()
    write_model(tmp_path / "model", "llama_gqa")
    options = {"cache_dir": tmp_path / "cache"}
    first = answers(tmp_path / "model", "llama_gqa", 2, **options)
    config = EngineConfig.of(
        str(tmp_path / "model"),
        {**SMALL, "max_model_len": 192, "tensor_parallel_size": 2, "dtype": "float32", **options},
    )
    assert start_engine(config, progress=False)[1].programs_compiled == 0
    assert [a.tokens for a in answers(tmp_path / "model", "llama_gqa", 2, **options)] == [
        a.tokens for a in first
    ]


@pytest.mark.full
def test_saved_programs_are_for_their_devices(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "llama_mqa")
    options = {
        **SMALL,
        "max_model_len": 64,
        "batch_invariant": True,
        "cache_dir": tmp_path / "cache",
        "dtype": "float32",
    }
    config = EngineConfig.of(str(tmp_path / "model"), options)
    compiled = {}
    for start, number in enumerate((0, 3, 3, 0)):
        mesh = Mesh(np.array(jax.devices()[number : number + 1]), ("x",))
        engine, started = start_engine(config, mesh=mesh, progress=False)
        compiled[start] = started.programs_compiled
        run(engine, [([5, 6, 7], SamplingParams(max_tokens=3))])
        engine.close()
    assert compiled[0] == compiled[1] > 0 and compiled[2] == compiled[3] == 0


@pytest.mark.parametrize("devices", SIZES)
def test_rows_and_columns_are_exchanged(devices: int) -> None:
    """Rows that the devices do not divide are padded on the way and lost again."""
    mesh = make_mesh(devices)
    rows, columns = 11, 5 * devices
    x = np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32)

    def exchange(part: jax.Array, all_of_it: jax.Array) -> tuple[jax.Array, ...]:
        own = all_to_all(part)
        whole: tuple[jax.Array, ...] = all_gather(
            (own, (own > 0).astype(np.int32), own_rows(all_of_it)), rows
        )
        return whole

    def place(spec: Any) -> Any:
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

    args = place(jax.sharding.PartitionSpec(None, TENSOR)), place(jax.sharding.PartitionSpec())
    got, positive, same = jax.jit(shard_mapped(mesh, exchange, args, jax.sharding.PartitionSpec()))(*args)
    np.testing.assert_array_equal(got, x)
    np.testing.assert_array_equal(positive, x > 0)
    np.testing.assert_array_equal(same, x)


def test_collectives_along_one_axis_or_both() -> None:
    """Each device of a mesh of 2 x 4 adds what the devices of the named axes have."""
    [mesh] = stage_meshes(Layout(data=2, tensor=4))
    assert mesh.shape == {"data": 2, "tensor": 4}
    assert [mesh.devices.flatten().tolist()] == [jax.devices()]
    x = np.arange(8, dtype=np.float32).reshape(2, 4)

    def sums(own: jax.Array) -> tuple[jax.Array, ...]:
        every = (TENSOR, DATA, (DATA, TENSOR))
        return *(all_reduce(own, axes) for axes in every), jnp.full((1, 1), shard_index(every[-1]))

    spec = jax.sharding.PartitionSpec(DATA, TENSOR)
    args = (jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)),)
    along, across, both, index = jax.jit(shard_mapped(mesh, sums, args, spec))(*args)
    np.testing.assert_array_equal(along, np.broadcast_to(x.sum(1, keepdims=True), x.shape))
    np.testing.assert_array_equal(across, np.broadcast_to(x.sum(0), x.shape))
    np.testing.assert_array_equal(both, np.full_like(x, x.sum()))
    np.testing.assert_array_equal(index, x)


def test_arrays_of_the_host_are_divided_as_a_program_takes_them() -> None:
    devices = make_mesh(2)
    divided, whole = (NamedSharding(devices, PartitionSpec(*names)) for names in (devices.axis_names, ()))
    weights = (jax.device_put(jnp.ones(3), whole),)
    like = (
        (jax.ShapeDtypeStruct((3,), jnp.float32, sharding=whole),),
        jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=divided),
        jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=whole),
    )
    program = jax.jit(lambda weights, x, y: (weights[0] * x, y + 1)).lower(*like).compile()
    call = QuickCall(program)
    for i in range(3):
        x, y = np.arange(12, dtype=np.float32).reshape(4, 3) + i, np.full((2, 3), i, np.float32)
        found, more = call(weights, x, y)
        np.testing.assert_array_equal(found, x)
        np.testing.assert_array_equal(more, y + 1)
