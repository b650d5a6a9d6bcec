"""Programs for absent GPUs, and plans. A tiny model is compiled; Llamas are checked by hand, and compiled in
long tests.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jengine import cli
from jengine.base.errors import InvalidArgument
from jengine.capacity.planning import ahead_of_time
from jengine.capacity.planning import plan as planned
from jengine.capacity.planning.ahead_of_time import compile_table, describe_for, memory_limit
from jengine.capacity.planning.memory import formats_of
from jengine.capacity.planning.plan import make_plan
from jengine.capacity.planning.report import Plan, report, tables
from jengine.core.config import EngineConfig
from jengine.engine.start import start_engine
from jengine.execution import programs, sampler, truncation
from jengine.execution.device_state import ALLOCATE
from jengine.execution.kinds import Key
from jengine.execution.memory import DeviceMemory, ProgramMemory, device_bytes, pages_beside
from jengine.execution.program_store import PrebuiltPrograms
from jengine.execution.programs import Built, memory_of, program_keys, running
from jengine.table.program_table import SamplerKey, TrunkKey
from tests.extras import compiler_for_gpus
from tests.golden.weights import VARIANTS, write_model

compiler_for_gpus()

DATA = Path(__file__).parent.parent / "data"
GIB = 1 << 30
TINY: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 68, "max_model_len": 64}
LLAMAS = [("8b", 1), ("70b", 8)]  # and on how many devices


@pytest.fixture(scope="module", autouse=True)
def quick_samplers() -> Iterator[None]:
    """The search for thresholds as a loop, and numbers that are not random: unrolled, these take most of a
    table's time. test_gpu_samplers.py compiles them as they are.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truncation, "by_digits", truncation.by_bits)
        patch.setattr(sampler, "uniform", lambda sampling, positions: (sampling.seed_low + positions) % 4 / 4)
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that only has config.json."""
    folder: Path = tmp_path_factory.mktemp("config only")
    (folder / "config.json").write_text(json.dumps({**VARIANTS["llama_gqa"], "dtype": "bfloat16"}))
    return folder


@contextmanager
def texts(module: ModuleType) -> Iterator[dict[Key, str]]:
    """Compiles the programs of a module; returns XLA's text of each."""
    seen: dict[Key, str] = {}

    def compile_all(*args: Any, **how: Any) -> Iterator[Built]:
        for built in programs.compile_all(*args, **how):
            assert built.key not in seen or isinstance(built.key, TrunkKey), f"{built.key} is compiled twice"
            seen[built.key] = built.program.as_text()
            yield built

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "compile_all", compile_all)
        yield seen


def check_products(texts: dict[Key, str], *keys: Key) -> None:
    """All products use cuBLASLt: Triton's would not be tuned."""
    for key in (TrunkKey(8, 1, 1), SamplerKey(8, "full"), *keys):
        assert "__cublas$lt$matmul" in texts[key], key
    assert not any("gemm_fusion" in text for text in texts.values())


@pytest.fixture(scope="module")
def compiled(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("compiled")
    with texts(ahead_of_time) as written:
        done = compile_table(EngineConfig.of(str(tiny), TINY), out, target="h200", progress=False)
    check_products(written, TrunkKey(8, 0, 1))
    assert done.memory is not None and len(done.file_bytes) == len(program_keys(done.spec)) == 11
    assert done.spec.num_pages == 1 + 4, "as many as all sequences take: a page each, and the null page"
    return out


def test_the_manifest_is_an_h200s(compiled: Path) -> None:
    manifest = PrebuiltPrograms(compiled).manifest()
    identity = manifest.identity
    assert (identity["platform"], identity["device"], identity["mesh"]) == (
        "gpu",
        "NVIDIA H200",
        {"tensor": 1},
    )
    assert (identity["dtype"], identity["page_size"], identity["num_pages"], identity["processor"]) == (
        "bfloat16",
        64,
        5,
        "",
    )
    assert identity["plugin"].startswith("jax-cuda13-pjrt ")
    assert all(size > 1000 for size in manifest.notes["bytes"].values())
    trunk = manifest.notes["memory"][str(TrunkKey(8, 1, 1))]
    page = 2 * 2 * 2 * 64 * 8 * 2  # layers, keys and values, kv heads, tokens, head_dim, bfloat16
    assert trunk["aliased"] >= 5 * page


def test_what_allocates_the_cache_is_not_counted_beside_it() -> None:
    memory: dict[Any, ProgramMemory] = {
        ALLOCATE: ProgramMemory(0, 1 << 40, 0, 0),
        "count": ProgramMemory(9, 9, 9, 5),
    }
    assert running(memory) == [memory["count"]]


def test_a_cpu_refuses_programs_of_an_h200(compiled: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "model", "llama_gqa")
    with pytest.raises(InvalidArgument, match='platform is "gpu" there, "cpu" is wanted'):
        start_engine(EngineConfig.of(str(tmp_path / "model"), {**TINY, "programs": compiled}), progress=False)


def test_the_scheduler_knows_the_memory_beside_a_full_cache(capfd: pytest.CaptureFixture[str]) -> None:
    """XLA plans with 80 % of an absent device's memory. Arguments beyond that would leave it none for
    temporaries, and it would compute them again and again.
    """
    config = EngineConfig(model=str(DATA / "llama-3.1-8b"))
    full = dataclasses.replace(describe_for(config, "h200"), num_pages=15_000)
    assert device_bytes(full.cache) > 0.8 * 151_397_597_184, "the case occurs"
    [copied] = programs.compile_all(full, ["copy"], threads=1, progress=False)
    assert memory_of(copied.program).aliased >= device_bytes(full.cache)
    assert "exceeds the base limit" not in capfd.readouterr().err


def test_flags_of_the_compiler_are_part_of_an_identity(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, prints = describe_for(EngineConfig.of(str(tiny), TINY), "h100"), list[str]()
    for flags in ("", "--xla_gpu_enable_command_buffer=", "--xla_dump_to=x --xla_gpu_dump_llvmir=true"):
        monkeypatch.setenv("XLA_FLAGS", flags)
        prints.append(spec.fingerprint())
    assert prints[0] == prints[2] != prints[1]


def test_devices_share_the_cache(tiny: Path) -> None:
    spec = describe_for(EngineConfig.of(str(tiny), {**TINY, "tensor_parallel_size": 2}), "h100")
    assert spec.mesh.size == 2 and spec.identity()["mesh"] == {"tensor": 2}
    assert device_bytes(spec.cache) * 2 == device_bytes(
        describe_for(EngineConfig.of(str(tiny), TINY), "h100").cache
    )


def test_results_of_autotuning_that_cannot_be_read(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "autotune.textproto"
    file.write_text("no results {")
    with pytest.raises(InvalidArgument, match=r"^autotune=.*cannot be read"):
        compile_table(
            EngineConfig.of(str(tiny), TINY), tmp_path / "out", target="h200", autotune=file, progress=False
        )


def test_a_plan_for_a_tiny_model(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Plan] = []

    def make(*args: Any, **options: Any) -> Plan:
        made.append(make_plan(*args, **options))
        return made[0]

    monkeypatch.setattr("jengine.capacity.planning.plan.make_plan", make)
    arguments = [
        str(tiny),
        "--target=h200",
        "--quiet",
        *(f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()),
    ]
    with texts(planned) as written:
        assert cli.main(["plan", *arguments, "--exact"]) == 0
    check_products(written)
    text = capsys.readouterr().out
    assert "on 1 x NVIDIA H200" in text and text.rstrip().endswith(
        "The whole table has 11 programs. It fits."
    )
    [exact], quick = made, make_plan(EngineConfig.of(str(tiny), TINY), "h200", progress=False)
    assert dataclasses.replace(quick.memory, working=0) == dataclasses.replace(exact.memory, working=0)
    assert all(quick.programs[key].working >= exact.programs[key].working for key in quick.programs), (
        "the estimate is a bound"
    )
    assert quick.seconds == {} and "compiled for this plan" in text


def test_places_of_adapters_are_a_part_of_the_memory() -> None:
    """Those of rank 16 for all linear layers of Llama-3.1-8B: 41.9 million numbers each; none is compiled."""
    sizes = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096)}
    sizes |= {"gate": (14336, 4096), "up": (14336, 4096), "down": (4096, 14336)}
    numbers = 32 * 16 * sum(map(sum, sizes.values()))
    config = EngineConfig(model=str(DATA / "llama-3.1-8b"), enable_lora=True, max_loras=4)
    spec = describe_for(config, "h200")
    memory = DeviceMemory.of(memory_limit(config, spec, "h200"), spec, [ProgramMemory(0, 0, 0, 60_000_000)])
    assert memory.adapters == 4 * numbers * 2 and memory.weights == 16_060_522_496


def test_pages_of_8b_on_an_h200_by_hand() -> None:
    """8,030,261,248 weights of 2 bytes; 256 x 2048 + 1 pages of 64 x 131,072 bytes are more than fit. No
    program is compiled.
    """
    config = EngineConfig(model=str(DATA / "llama-3.1-8b"))
    spec = describe_for(config, "h200")
    memory = DeviceMemory.of(memory_limit(config, spec, "h200"), spec, [ProgramMemory(0, 0, 0, 60_000_000)])
    state = 257 * 128_256 * 4 + device_bytes(spec.slots)
    assert (memory.limit, memory.weights, memory.state, memory.page) == (
        136_257_837_465,
        16_060_522_496,
        state,
        8_388_608,
    )
    free = 136_257_837_465 - 136_257_837_465 // 50 - 16_060_522_496 - state - 60_000_000
    assert pages_beside(config, spec, memory) == free // 8_388_608 // 64 * 64 == 13_952
    assert (formats_of(spec).kv_bytes, formats_of(spec).weight_bytes) == (131_072, 2)


def test_staging_is_taken_from_the_cache(tiny: Path) -> None:
    """64 GiB on the host hold 8,192 pages of 8 MiB; up to 32 are copied in each direction at a time."""
    config = EngineConfig(model=str(DATA / "llama-3.1-8b"), swap_space=64)
    spec = describe_for(config, "h200")
    memory = DeviceMemory.of(memory_limit(config, spec, "h200"), spec, [ProgramMemory(0, 0, 0, 60_000_000)])
    assert (spec.host_pages, spec.staged, memory.staging) == (8192, 32, 64 * 8_388_608)
    assert pages_beside(config, spec, memory) == 13_952 - 64
    plain, tiered = (
        make_plan(EngineConfig.of(str(tiny), {**TINY, "swap_space": space}), "h200", progress=False)
        for space in (0, 0.5)
    )
    assert tiered.total_programs == plain.total_programs + 2
    assert "staging" in report("tiny", tiered) and "staging" not in report("tiny", plain)
    html = tiered._repr_html_()
    assert "staging" in html and html.count("<table>") == len(tables(tiered)) and "It fits." in html
    assert (
        repr(tiered)
        == f"Plan(1 x NVIDIA H200: weights bfloat16, activations bfloat16, cache bfloat16; {tiered.pages:,}"
        " pages, fits)"
    )


def test_70b_on_eight_h200s_by_hand() -> None:
    """Each has an eighth of the matrices, whole norms, and one kv head."""
    spec = describe_for(EngineConfig(model=str(DATA / "llama-3.1-70b"), tensor_parallel_size=8), "h200")
    memory = DeviceMemory.of(1 << 37, spec, [ProgramMemory(0, 0, 0, 0)])
    norms = 161 * 8192
    assert memory.weights == 2 * ((70_553_706_496 - norms) // 8 + norms)
    assert memory.page == 64 * 40_960 and formats_of(spec).kv_bytes == 40_960


def check_plan(plan: Plan, weights: int, kv_bytes: int) -> None:
    """XLA's report for the plan's programs agrees with the arithmetic."""
    memory, spec = plan.memory, plan.spec
    assert (memory.weights, memory.page) == (weights, 64 * kv_bytes)
    unused = device_bytes(spec.params["lm_head"])  # a trunk has no use for it
    for key, used in plan.programs.items():
        if isinstance(key, TrunkKey):
            state = device_bytes(spec.slots)
            assert used.arguments == pytest.approx(weights - unused + 2 * memory.page + state, abs=1 << 20)
            assert used.aliased >= 2 * memory.page
    assert memory.working < 2 * GIB
    assert (
        memory.weights + memory.state + memory.working + memory.margin + plan.pages * memory.page
        <= memory.limit
    )
    assert plan.sequences(8192) == (plan.pages - 1) / 128


@pytest.mark.full
@pytest.mark.parametrize(("size", "devices"), LLAMAS)
def test_llamas_plans(size: str, devices: int) -> None:
    config = EngineConfig(
        model=str(DATA / f"llama-3.1-{size}"), tensor_parallel_size=devices, max_model_len=8192
    )
    plan = make_plan(config, "h200", exact=True, progress=False)
    print(report(size, plan))
    weights, kv_bytes = {
        "8b": (16_060_522_496, 131_072),
        "70b": (2 * ((70_553_706_496 - 161 * 8192) // 8 + 161 * 8192), 40_960),
    }[size]
    check_plan(plan, weights, kv_bytes)
    assert plan.fits


@pytest.mark.full
@pytest.mark.parametrize(("size", "devices"), LLAMAS)
def test_llamas_programs(size: str, devices: int, tmp_path: Path) -> None:
    config = EngineConfig(
        model=str(DATA / f"llama-3.1-{size}"), tensor_parallel_size=devices, max_model_len=8192
    )
    done = compile_table(config, tmp_path, target="h200", progress=False)
    print(f"{len(done.file_bytes)} programs, {done.elapsed:.0f} s, {done.spec.num_pages} pages")
    assert done.file_bytes.keys() == {str(key) for key in program_keys(done.spec)}
    assert PrebuiltPrograms(tmp_path).manifest().identity["num_pages"] == done.spec.num_pages
