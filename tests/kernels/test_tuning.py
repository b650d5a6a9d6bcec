"""How decode attention uses a device: the rules, the table over them, and the search that fills it."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jengine.core.config import EngineConfig
from jengine.devices import device_defaults
from jengine.table.program_table import ProgramTable
from pallas_kernels import dispatch, timing, tune, tuning, tuning_cases, xla
from pallas_kernels.options import AttentionOptions
from pallas_kernels.quantized import movable, quantize
from pallas_kernels.tuning import DecodeCase, DecodeChoice

CASE = DecodeCase("int8", "bfloat16", heads=32, kv_heads=8, head_dim=128, page_size=64, rows=4)
GPU: Any = SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0", core_count=100)


def test_blocks_are_as_many_as_the_chip_holds() -> None:
    """Those of head dim 256, and of eight-bit caches of head dim 128, take more than half of a
    multiprocessor's shared memory.
    """
    found = {
        (cache, dim): tuning.decode_blocks(cache, dim, GPU)
        for cache in ("bfloat16", "int8", "uint8")
        for dim in (64, 128, 256)
    }
    small = {(cache, 64) for cache in ("bfloat16", "int8", "uint8")}
    assert {case for case, blocks in found.items() if blocks == 200} == {*small, ("bfloat16", 128)}
    assert {*found.values()} == {100, 200}
    elsewhere: Any = SimpleNamespace(device_kind="NVIDIA H100")
    assert tuning.decode_blocks("bfloat16", 128, elsewhere) == 2 * tuning.CORES


def test_the_table_goes_before_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuning.decode(CASE, GPU) == DecodeChoice()
    table = tuning.updated(
        {},
        "NVIDIA H200",
        {
            CASE: DecodeChoice(5),
            replace(CASE, rows=8): DecodeChoice(3),
            replace(CASE, rows=16): DecodeChoice(),
        },
    )
    monkeypatch.setattr(tuning, "table", lambda: json.loads(json.dumps(table)))
    assert tuning.decode(CASE, GPU) == tuning.decode(replace(CASE, rows=3), GPU) == DecodeChoice(5)
    assert tuning.decode(replace(CASE, rows=5), GPU) == DecodeChoice(3)
    for other in (replace(CASE, rows=9), replace(CASE, cache="uint8"), replace(CASE, page_size=32)):
        assert tuning.decode(other, GPU) == DecodeChoice()
    elsewhere: Any = SimpleNamespace(device_kind="NVIDIA H100")
    assert tuning.decode(CASE, elsewhere) == DecodeChoice()


def test_the_file_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file in the repository, which may be empty, and one with an entry."""
    before = json.loads(tuning.FILE.read_text())
    assert tuning.table() == before
    file = tmp_path / "tuned.json"
    file.write_text(json.dumps(tuning.updated(before, "NVIDIA H200", {CASE: DecodeChoice(5)})))
    monkeypatch.setattr(tuning, "FILE", file)
    monkeypatch.setattr(tuning, "table", tuning.table.__wrapped__)  # not the one that is kept
    assert tuning.decode(CASE, GPU) == DecodeChoice(5)


def test_the_search_takes_what_is_worth_it_and_leaves_out_what_does_not_fit() -> None:
    near, far = replace(CASE, rows=1), replace(CASE, rows=2)

    def timer(case: DecodeCase, choice: DecodeChoice) -> float:
        if choice.stages == 6:
            return math.inf
        return {near: 0.99, far: 0.5}[case] if choice.stages == 3 else 1.0

    first, second = tune.search([near, far], timer)
    assert (first.choice, first.default, first.best) == (DecodeChoice(), 1.0, 1.0)
    assert (second.choice, second.default, second.best) == (DecodeChoice(3), 1.0, 0.5)
    assert "| 1000000.0 | 500000.0 | 2.00 | 3 |" in tune.row(second)


def test_what_is_found_is_written_beside_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, made = tmp_path / "tuned.json", tuning_cases.cases(4, 2, 64)
    known = {made[0].key(): {"stages": 7}}
    file.write_text(json.dumps({"NVIDIA H100": {"a": {"stages": 4}}, "NVIDIA H200": known}))
    monkeypatch.setattr(tune.jax, "devices", lambda: [GPU])
    asked: list[DecodeCase] = []

    def timer(case: DecodeCase, choice: DecodeChoice) -> float:
        asked.append(case)
        return 1.0 if choice.stages is None else 0.5

    monkeypatch.setattr(tune, "total_seconds", timer)
    tune.main(["--heads=4", "--kv-heads=2", "--head-dim=64", "--out", str(file)])
    table = json.loads(file.read_text())
    assert table["NVIDIA H100"] == {"a": {"stages": 4}}
    assert set(table["NVIDIA H200"]) == {case.key() for case in made}
    assert table["NVIDIA H200"][made[0].key()]["stages"] == 2
    assert asked[0] == made[1] and asked[-1] == made[0]  # what was known is measured last
    assert made[0].key() in capsys.readouterr().out


class Asked(Exception):
    """Replaces a kernel's compilation."""


@pytest.mark.parametrize("max_model_len", [8192, 131072])
@pytest.mark.parametrize("cache", ["auto", "int8", "fp8"])
def test_every_case_of_the_default_engine_is_tuned(
    cache: str, max_model_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, kv_heads, head_dim, asked = 32, 8, 128, []

    def decide(case: DecodeCase, device: Any) -> DecodeChoice:
        asked.append(case)
        raise Asked

    monkeypatch.setattr(tuning, "decode", decide)
    sizes = device_defaults.sizes(EngineConfig(model="any"), "gpu")
    table = ProgramTable.build(
        max_num_seqs=sizes.max_num_seqs, max_num_batched_tokens=sizes.max_num_batched_tokens, tile_size=64
    )
    kind = {"auto": None, "int8": "int8", "fp8": "float8_e4m3fn"}[cache]
    page = jax.ShapeDtypeStruct((2, kv_heads, sizes.page_size, head_dim), jnp.bfloat16)
    pages = jax.eval_shape(lambda x: movable(quantize(x, kind)) if kind else x, page)
    ints = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    for rows, window in itertools.product({key.rows for key in table.trunks()}, (None, 1024)):
        q = jax.ShapeDtypeStruct((rows, heads, head_dim), jnp.bfloat16)
        attend = partial(
            dispatch.paged_attention_decode,
            options=AttentionOptions(1.0, window=window),
            impl="mosaic",
            device=GPU,
        )
        with pytest.raises(Asked):
            jax.eval_shape(
                attend, q, pages, pages, ints((rows, max_model_len // sizes.page_size)), ints((rows,))
            )
    assert len(asked) == 2 * len(tuning_cases.ROWS)
    assert {case.key() for case in asked} <= {
        case.key() for case in tuning_cases.cases(heads, kv_heads, head_dim)
    }


def test_a_choice_is_timed_by_all_loads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """XLA's form replaces the kernel, so no GPU is needed."""
    for name, value in {"POOL": 1 << 18, "EVEN": 32, "LONGEST": 64, "SHORT": (4, 9)}.items():
        monkeypatch.setattr(tuning_cases, name, value)
    monkeypatch.setattr(timing, "SAMPLE", 0.0)
    taken = []

    def attend(*arrays: Any, options: AttentionOptions, choice: DecodeChoice) -> jax.Array:
        if choice.stages == 9:
            raise ValueError("too much shared memory")
        taken.append((options, choice.stages))
        return xla.paged_attention_decode(*arrays, options)

    monkeypatch.setattr(tune, "paged_attention_decode", attend)
    case = DecodeCase("bfloat16", "bfloat16", 4, 2, 64, 16, rows=3)
    tuning_cases.arrays.cache_clear()
    assert 0 < tune.total_seconds(case, DecodeChoice(2)) < math.inf
    assert taken == [(AttentionOptions(0.125), 2)]  # compiled once, for both loads
    assert tune.total_seconds(case, DecodeChoice(9)) == math.inf
    assert "too much shared memory" in capsys.readouterr().out
    tuning_cases.arrays.cache_clear()


def test_the_pool_is_larger_than_a_cache_of_the_device() -> None:
    """Between two reads of a page lie as many others as the pool has, or as a chain of calls reads."""
    l2 = 128 << 20  # of a B200; an H200 has 50 MiB
    for case in tuning_cases.cases(32, 8, 128):
        token = 2 * case.kv_heads * case.head_dim * jnp.dtype(case.cache).itemsize
        batches = (
            case.rows * [tuning_cases.EVEN],
            timing.one_long(case.rows, tuning_cases.LONGEST, *tuning_cases.SHORT),
        )
        read = [sum(lengths) * token * timing.CHAIN for lengths in batches]
        assert min(tuning_cases.POOL, *read) > 4 * l2


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        tune.main([])
    assert stopped.value.code == 1
    assert "device=cpu: tuning needs a Hopper GPU" in capsys.readouterr().err


def test_arrays_are_what_a_case_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"POOL": 1 << 14, "EVEN": 32, "LONGEST": 64, "SHORT": (4, 9)}.items():
        monkeypatch.setattr(tuning_cases, name, value)
    tuning_cases.arrays.cache_clear()
    q, k, v, (even, ragged) = tuning_cases.arrays(DecodeCase("uint8", "bfloat16", 4, 2, 64, 16, rows=3))
    tuning_cases.arrays.cache_clear()
    assert (
        q.shape == (3, 4, 64)
        and k.shape == v.shape == (timing.REPEATED, 2, 16, 64)
        and k.values.dtype == "uint8"
    )
    assert even.tables.shape == ragged.tables.shape == (timing.CHAIN, 3, 4)
    assert even.lengths.tolist() == [32, 32, 32] and ragged.lengths.tolist() == [64, 4, 9]
    assert (even.tables[0] > 0).sum(1).tolist() == [2, 2, 2] and (ragged.tables[0] > 0).sum(1).tolist() == [
        4,
        1,
        1,
    ]
    assert set(even.tables.reshape(-1).tolist()) == {0, 1, 2, 3}  # all that 16 KiB hold, and the null page
