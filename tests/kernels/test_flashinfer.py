"""FlashInfer's decode kernel: when it is taken, what it is handed, how it is compiled."""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packaging.requirements import Requirement

from pallas_kernels import compare, dispatch, fastest, reference, tuning_cases
from pallas_kernels.ahead_of_time import compile_for, device
from pallas_kernels.dispatch import why_flashinfer_unsupported
from pallas_kernels.flashinfer import build, decode
from pallas_kernels.flashinfer.build import Kernel
from pallas_kernels.options import PLAIN, AttentionOptions
from pallas_kernels.quantized import movable, quantize
from pallas_kernels.thunks import compiled_with_thunks, leaves
from tests.extras import of_extra

HOPPER: Any = SimpleNamespace(
    device_kind="NVIDIA H200", compute_capability="9.0", core_count=132, platform="gpu"
)
KERNEL = Kernel("bfloat16", 64, 128, 4, False, "9.0")
installed = pytest.mark.skipif(
    build.why_missing() is not None or build.compiler() is None, reason="needs the extra flashinfer, and nvcc"
)


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were installed and compiled."""
    monkeypatch.setattr(build, "why_not_built", lambda kernel: None)
    monkeypatch.setattr(build, "register", lambda kernel: f"xqa_{kernel.page_size}_{kernel.windowed}")


def shapes(
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    dtype: Any = jnp.bfloat16,
    rows: int = 2,
) -> Any:
    """Of queries, keys and values."""
    pages = jax.ShapeDtypeStruct((9, kv_heads, page_size, head_dim), dtype)
    return jax.ShapeDtypeStruct((rows, heads, head_dim), dtype), pages, pages


def arrays(**shape: Any) -> Any:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in shapes(**shape)]


@pytest.mark.parametrize(
    "shape", [{}, {"head_dim": 256, "page_size": 128}, {"heads": 64}, {"kv_heads": 8}, {"dtype": jnp.float16}]
)
def test_what_it_takes(shape: dict[str, Any], present: None) -> None:
    assert (
        why_flashinfer_unsupported(*shapes(**shape), AttentionOptions(1.0, window=7), device=HOPPER) is None
    )


@pytest.mark.parametrize(
    ("shape", "how", "reason"),
    [
        (
            {},
            {"device": SimpleNamespace(device_kind="NVIDIA A100", compute_capability="8.0")},
            "device=NVIDIA A100",
        ),
        ({}, {"device": None}, "device=cpu"),
        ({"dtype": jnp.float32}, {}, "dtype=float32"),
        (
            {},
            {"options": AttentionOptions(1.0, soft_cap=30.0)},
            "soft_cap=30.0: FlashInfer's kernel has no soft cap",
        ),
        ({"head_dim": 96}, {}, "head_dim=96"),
        ({"page_size": 256}, {}, "page_size=256"),
        ({"heads": 66}, {}, "heads=66: FlashInfer's kernel takes at most 32 for each of 2 kv heads"),
    ],
)
def test_what_it_does_not_take_and_why(
    shape: dict[str, Any], how: dict[str, Any], reason: str, present: None
) -> None:
    refused = why_flashinfer_unsupported(*shapes(**shape), **{"device": HOPPER, **how})
    assert refused is not None and refused.startswith(reason)


def test_caches_of_other_dtypes_are_refused(present: None) -> None:
    q, k, v = shapes()
    for kind in ("int8", "float8_e4m3fn"):
        eight = jax.eval_shape(lambda x, kind=kind: movable(quantize(x, kind)), k)
        assert "one scale for the whole cache" in str(
            why_flashinfer_unsupported(q, eight, eight, device=HOPPER)
        )
    assert "k_pages=float16" in str(
        why_flashinfer_unsupported(q, shapes(dtype=jnp.float16)[1], v, device=HOPPER)
    )


def test_without_the_package_or_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    versions: dict[str, str | None] = {"version": None}
    monkeypatch.setattr(build, "installed_version", lambda: versions["version"])
    with pytest.raises(ValueError, match="impl='flashinfer': flashinfer-python is not installed"):
        dispatch.paged_attention_decode(*shapes(), *where(), PLAIN, impl="flashinfer", device=HOPPER)
    versions["version"] = "0.6.3"
    assert why_flashinfer_unsupported(*shapes(), device=HOPPER) == "flashinfer-python=0.6.3: 0.7 is supported"
    monkeypatch.setattr(build, "why_missing", lambda: None)
    monkeypatch.setattr(build, "library", lambda kernel: Path("nowhere"))
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert "nvcc is not installed" in str(why_flashinfer_unsupported(*shapes(), device=HOPPER))


def test_only_decode_attention_has_it(present: None) -> None:
    _, k, v = shapes()
    with pytest.raises(ValueError, match="impl='flashinfer': only paged_attention_decode"):
        dispatch.copy_pages(
            k, v, jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32), impl="flashinfer", device=HOPPER
        )


def where(rows: int = 2) -> tuple[jax.Array, jax.Array]:
    return jnp.arange(1, 1 + 4 * rows, dtype=jnp.int32).reshape(rows, 4), jnp.asarray(
        [50, 0][:rows] + [7] * (rows - 2), jnp.int32
    )


def test_auto_takes_what_was_measured_to_be_faster(monkeypatch: pytest.MonkeyPatch, present: None) -> None:
    def taken(rows: int, device: Any = HOPPER, options: AttentionOptions = PLAIN) -> bool:
        q, k, v = shapes(rows=rows)
        return decode.serves("auto", q, k, v, options, device)

    assert not taken(8)
    case = fastest.Case("bfloat16", 8, 2, 16, 64, 8)
    table = fastest.updated({}, "NVIDIA H200", case, {"mosaic": 20.0, "flashinfer": 10.0})
    table = fastest.updated(
        table, "NVIDIA H200", fastest.Case("bfloat16", 8, 2, 16, 64, 16), {"mosaic": 10.0, "flashinfer": 20.0}
    )
    monkeypatch.setattr(fastest, "table", lambda: json.loads(json.dumps(table)))
    assert taken(8) and taken(5)  # the next power of two
    assert not taken(16) and not taken(32)  # slower; not measured
    assert not taken(8, SimpleNamespace(device_kind="NVIDIA H100", compute_capability="9.0"))
    assert not taken(8, options=AttentionOptions(1.0, soft_cap=3.0))  # refused, and not asked for
    q, k, v = shapes(rows=8)
    eight = jax.eval_shape(lambda x: movable(quantize(x, "int8")), k)
    assert not decode.serves("auto", q, eight, eight, PLAIN, HOPPER)
    assert not decode.serves("mosaic", q, k, v, PLAIN, HOPPER)


def test_programs_are_prepared_for_all_kernels_that_they_may_call(
    monkeypatch: pytest.MonkeyPatch, present: None
) -> None:
    made: list[str] = []
    monkeypatch.setattr(
        build, "register", lambda kernel: made.append(f"{kernel.page_size} {kernel.windowed}")
    )
    q, k, _ = shapes()
    for window in (None, 7, 9):
        decode.prepare("flashinfer", q, k, AttentionOptions(1.0, window=window), HOPPER)
    assert sorted(set(made)) == ["16 False", "16 True"]
    made.clear()
    decode.prepare("auto", q, k, PLAIN, HOPPER)
    decode.prepare("mosaic", q, k, PLAIN, HOPPER)
    assert not made
    # some other case than this one
    monkeypatch.setattr(fastest, "takes", lambda impl, case, kind: case is None)
    decode.prepare("auto", q, k, PLAIN, HOPPER)
    decode.prepare("auto", q, k, AttentionOptions(1.0, soft_cap=3.0), HOPPER)
    assert made == ["16 False"]


def as_the_kernel(name: str, results: Any, input_output_aliases: Any) -> Any:
    """Its arithmetic, NaN included: scores are masked and values are not, but for the rest of the last page,
    which is read as zeros. Of a row of length 0, one part gives zeros, and several are joined to NaN.
    """
    assert input_output_aliases == {6: 1}

    def call(
        q: Any,
        k: Any,
        v: Any,
        tables: Any,
        lengths: Any,
        sinks: Any,
        semaphores: Any,
        *,
        scale: Any,
        window: Any,
        cores: Any,
    ) -> Any:
        rows, _, head_dim = q.shape
        k, v = (
            jnp.take(pages, tables, axis=0, mode="fill")
            .transpose(0, 2, 1, 3, 4)
            .reshape(rows, pages.shape[1], -1, head_dim)
            for pages in (k, v)
        )
        at = jnp.arange(k.shape[2])
        first = jnp.maximum(lengths - window, 0) if name.endswith("True") else jnp.zeros_like(lengths)
        seen = (at < lengths[:, None]) & (at >= first[:, None])
        read = (at < lengths[:, None]) & (at >= first[:, None] // decode.TILE * decode.TILE)
        v = jnp.where(read[:, None, :, None], v, 0)
        scores = (
            jnp.einsum("rkgd,rktd->rkgt", q.reshape(rows, k.shape[1], -1, head_dim), k).astype(jnp.float32)
            * scale
        )
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        most = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - most)
        total = weights.sum(-1, keepdims=True)
        if sinks.size:
            total += jnp.exp(sinks.reshape(1, k.shape[1], -1, 1) - most)
        out = (
            jnp.einsum("rkgt,rktd->rkgd", weights / total, v.astype(jnp.float32))
            .reshape(q.shape)
            .astype(q.dtype)
        )
        assert out.shape == results[0].shape and semaphores.shape == results[1].shape
        return (
            jnp.where((lengths > 0)[:, None, None], out, jnp.nan if semaphores.size else 0),
            semaphores,
            None,
        )

    return call


@pytest.mark.parametrize(
    ("page_size", "window", "with_sinks"),
    [(16, None, True), (128, None, False), (128, 132, False), (128, 20, True)],
)
def test_what_it_is_handed_gives_what_the_reference_gives(
    page_size: int, window: int | None, with_sinks: bool, present: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages behind the window and beyond the end hold NaN, and their entries in the table may name no page.
    Larger pages have two parts. A window of 20 tokens lies within the last page.
    """
    q, k, v = arrays(rows=3, page_size=page_size)
    filled = page_size // 4  # of the last page
    lengths = jnp.asarray([3 * page_size + filled, 0, page_size], jnp.int32)
    tables = jnp.asarray([[1, 2, 3, 4], [0, 0, 0, 0], [5, 99, 99, 99]], jnp.int32)
    behind = 0 if window is None else (int(lengths[0]) - window) // page_size
    lost = [0, 6, 7, 8, *range(1, 1 + behind)]
    k, v = (pages.at[jnp.asarray(lost)].set(jnp.nan) for pages in (k, v))
    k, v = (pages.at[4, :, filled:].set(jnp.nan) for pages in (k, v))  # beyond the end
    sinks = jnp.linspace(-1, 2, 8) if with_sinks else None
    options = AttentionOptions(0.3, window=window, sinks=sinks)
    monkeypatch.setattr(jax.ffi, "ffi_call", as_the_kernel)

    @jax.jit
    def both(*args: Any) -> Any:
        got = dispatch.paged_attention_decode(*args, options, impl="flashinfer", device=HOPPER)
        return got.astype(jnp.float32), reference.paged_attention_decode(
            *(x.astype(jnp.float32) for x in args[:3]), *args[3:], options
        )

    np.testing.assert_allclose(*both(q, k, v, tables, lengths), atol=0.03)


def test_parts_have_room_and_one_part_needs_none(present: None) -> None:
    def lowered(rows: int) -> str:
        q, k, v = shapes(rows=rows)
        run = jax.jit(
            lambda q, k, v, t, n: decode.paged_attention_decode(
                q, k, v, t, n, AttentionOptions(0.1), device=HOPPER
            )
        )
        return str(
            run.lower(
                q, k, v, jax.ShapeDtypeStruct((rows, 64), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.int32)
            ).as_text()
        )

    many, few = lowered(8), lowered(128)
    assert "custom_call @xqa_16_False" in many and "cores = 132 : i32" in many
    splits = 4  # of 132 // (8 * 2), as many as 1024 tokens have tiles
    assert f"tensor<{8 * 2}xi32>, tensor<{8 * 2 * splits * (4 * 64 * 2 + 256) + 1024}xui8>" in many
    assert "tensor<0xi32>, tensor<0xui8>" in few and "select" in many and "select" not in few


def test_a_kernel_is_compiled_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, nvcc, said = tmp_path / "data", tmp_path / "cuda" / "bin" / "nvcc", tmp_path / "said"
    (sources / "csrc/xqa").mkdir(parents=True)
    (sources / "csrc/xqa/mha.cu").write_text("kernel")
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$*" >> {said}\nwhile [ "$1" != -o ]; do shift; done\necho library >'
        ' "$2"\n'
    )
    nvcc.chmod(0o755)
    monkeypatch.setattr(build, "_data", lambda: sources)
    monkeypatch.setattr(build, "installed_version", lambda: "0.7.2")
    monkeypatch.setenv("JENGINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    build.source_digest.cache_clear()
    try:
        file = build.built(KERNEL)
        assert build.built(KERNEL) == file and file.read_text() == "library\n"
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700 and [*file.parent.iterdir()] == [file]
        [line] = said.read_text().splitlines()
        for option in (
            "arch=compute_90a,code=sm_90a",
            "-DTOKENS_PER_PAGE=64",
            "-DHEAD_ELEMS=128",
            "-DHEAD_GRP_SIZE=4",
            "-DSLIDING_WINDOW=0",
        ):
            assert option in line
        other = Kernel("float16", 16, 64, 8, True, "9.0")
        assert {"-DINPUT_FP16=1", "-DDTYPE=__half", "-DSLIDING_WINDOW=1"} < set(other.options())
        assert other.target != KERNEL.target and re.fullmatch(r"flashinfer_xqa_[0-9a-f]{16}", KERNEL.target)
        nvcc.write_text("#!/bin/sh\necho mha.cu: error >&2\nexit 1\n")
        with pytest.raises(
            RuntimeError, match=r"nvcc cannot compile flashinfer-python's XQA: mha\.cu: error"
        ):
            build.built(other)
        file.chmod(0o666)
        with pytest.raises(RuntimeError, match="must belong to you and be writable by no one else"):
            build.built(KERNEL)
    finally:
        build.source_digest.cache_clear()


def test_both_are_timed_and_the_file_is_written_after_each_case(tmp_path: Path) -> None:
    file, cases = tmp_path / "fastest.json", tuning_cases.cases(8, 2, 64)
    file.write_text(
        json.dumps(
            {
                "NVIDIA H200": {compare._case(cases[0]).key(): {"mosaic": 1.0}},
                "NVIDIA H100": {"a": {"mosaic": 1.0}},
            }
        )
    )
    asked: list[tuple[int, str]] = []

    def timer(case: Any, impl: str) -> float:
        assert case.cache == "bfloat16"
        asked.append((case.rows, impl))
        return 1e-6 * (case.rows if impl == "mosaic" else 100)

    for number, (case, times) in enumerate(compare.compare(cases, HOPPER, file, timer)):
        table = json.loads(file.read_text())
        assert times == {"mosaic": pytest.approx(case.rows), "flashinfer": pytest.approx(100)}
        assert table["NVIDIA H200"][case.key()] == times and table["NVIDIA H100"] == {"a": {"mosaic": 1.0}}
        assert f"| {case.key()} | {float(case.rows):.1f} | 100.0 |" == compare.row(case, times)
        assert number or case.rows == tuning_cases.ROWS[1]  # what was known comes last
    assert len(asked) == 2 * len(tuning_cases.ROWS)


def test_the_sums_that_are_compared_are_of_the_same_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing in the kernels' places, which needs no GPU."""
    q, k, v = arrays()
    load = tuning_cases.CaseLoad(*where())
    monkeypatch.setattr(compare, "arrays", lambda case: (q, k, v, [load, load]))
    monkeypatch.setattr(compare, "chain", lambda function: function)
    monkeypatch.setattr(compare, "seconds", lambda program, *args: float(program(*args).shape[0]))
    asked = []

    def attend(*args: Any, impl: str, options: AttentionOptions) -> jax.Array:
        asked.append((impl, options, [tuple(x.shape) for x in args]))
        return jnp.ones(2)

    monkeypatch.setattr(dispatch, "paged_attention_decode", attend)
    assert [compare.total_seconds(tuning_cases.cases(8, 2, 64, 16)[0], impl) for impl in compare.IMPLS] == [
        4.0,
        4.0,
    ]
    pages = (9, 2, 16, 64)
    assert asked == [
        (impl, AttentionOptions(64**-0.5), [(2, 8, 64), pages, pages, (2, 4), (2,)])
        for impl in compare.IMPLS
        for _ in range(2)
    ]


def test_the_table_can_be_read() -> None:
    assert fastest.table() == json.loads(fastest.FILE.read_text())


def test_the_extra_asks_for_the_versions_that_are_supported() -> None:
    extra = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]["flashinfer"]
    [wanted] = [one for one in map(Requirement, extra) if one.name == build.PACKAGE]
    assert wanted.specifier.contains(f"{build.VERSIONS}.0") and not wanted.specifier.contains("0.8.0")
    version = build.installed_version()
    if version is not None and build.why_missing() is None:
        assert wanted.specifier.contains(version)


@installed
@pytest.mark.full
@pytest.mark.skipif(os.environ.get("JAX_PLATFORMS") != "cpu", reason="compiles for a GPU that is not there")
@pytest.mark.parametrize("window", [None, 100])
def test_with_the_package_it_is_compiled_into_the_command_buffer(
    window: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_extra("aot", "jax_plugins.xla_cuda13")
    monkeypatch.setenv("JENGINE_CACHE_DIR", str(tmp_path))
    h200 = device("h200")

    def two(q: Any, k: Any, v: Any, tables: Any, lengths: Any, sinks: Any) -> Any:
        for _ in range(2):
            how: Any = {"scale": 0.1, "window": window, "sinks": sinks, "impl": "flashinfer", "device": h200}
            q = dispatch.paged_attention_decode(q, k, v, tables, lengths, **how)
        return q

    page = jax.ShapeDtypeStruct((100, 8, 64, 128), jnp.bfloat16)
    ints = jax.ShapeDtypeStruct((8, 16), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32)
    args = (
        jax.ShapeDtypeStruct((8, 32, 128), jnp.bfloat16),
        page,
        page,
        *ints,
        jax.ShapeDtypeStruct((32,), jnp.float32),
    )
    assert compile_for(h200, two, *args)
    whole = jax.sharding.NamedSharding(jax.sharding.Mesh([h200], ("x",)), jax.sharding.PartitionSpec())
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for x in args]
    with jax.default_device(h200):
        _, thunks = compiled_with_thunks(jax.jit(two).lower(*placed))
    assert [thunk.kind for thunk in thunks] == ["kCommandBuffer"]
    assert [leaf.kind for leaf in leaves(thunks)].count("kCustomCall") == 2
