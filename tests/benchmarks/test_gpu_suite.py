"""The GPU suite itself: its counts, timing and stored results; and that it detects wrong results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu_suite
from benchmarks.gpu import correctness, decode, experts, inputs, prefill, products, programs, rows, timing
from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.rows import Row
from benchmarks.gpu.work import LLAMA, Shape, decode_bytes, prefill_operations
from pallas_kernels.attention import dispatch
from pallas_kernels.attention import latent as latent_dispatch
from pallas_kernels.attention.options import PLAIN
from pallas_kernels.cache import dispatch as cache_dispatch
from pallas_kernels.products.weights import stored
from pallas_kernels.targets import why_none

HOPPER: Any = SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0")


def test_bytes_and_operations_by_hand() -> None:
    # 16 sequences of 1024 tokens, 8 kv heads of 128 numbers of two bytes, keys and values; 32 query heads in
    # and out
    assert decode_bytes(LLAMA, 16 * [1024]) == 2 * 16 * 1024 * 8 * 128 * 2 + 2 * 16 * 32 * 128 * 2
    assert decode_bytes(LLAMA, 16 * [1024], 1, 4) == 2 * 16 * 1024 * 8 * (128 + 4) + 2 * 16 * 32 * 128 * 2
    # padding reads nothing, and has results
    assert decode_bytes(LLAMA, [1024, 512, 0, 0]) == 2 * 1536 * 8 * 128 * 2 + (2 + 4) * 32 * 128 * 2
    # three tokens see 1 + 2 + 3 keys; a product has two operations for each of head_dim numbers, and there
    # are two products
    assert prefill_operations(Shape(1, 2, 64, 16), sequences=5, tokens=3) == 5 * 2 * 6 * 64 * 2 * 2


def test_a_page_has_the_bytes_of_its_arrays() -> None:
    shape = Shape(2, 1, 64, 16)
    for kind in inputs.KINDS:
        arrays = jax.tree.leaves(jax.eval_shape(lambda kind=kind: inputs.large(shape, 1, "bfloat16", kind)))
        total = sum(x.size * x.dtype.itemsize for x in arrays)
        assert total == timing.REPEATED * inputs.page_bytes(shape, kind)


def test_tables_name_every_page_before_one_comes_again() -> None:
    made = timing.block_tables(num_pages=13, pages=[4, 4], calls=3)
    assert made.shape == (3, 2, 4)
    assert sorted(made.reshape(-1)[:12]) == list(range(1, 13))
    assert made.min() == 1  # never the null page


def test_tables_of_ragged_rows_have_the_null_page_after_their_own() -> None:
    made = timing.block_tables(num_pages=9, pages=[3, 0, 1], calls=2, width=4)
    assert made.shape == (2, 3, 4)
    assert (made > 0).tolist() == 2 * [[[True, True, True, False], 4 * [False], [True, False, False, False]]]
    assert sorted(made[made > 0].tolist()) == list(range(1, 9))
    assert timing.one_long(4, 100, 10, 30) == [100, 10, 20, 30]


def test_decode_times_padding_and_ragged_batches_by_the_bytes_of_live_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = {batch.name: batch.lengths for batch in decode.batches(small=False)}
    assert full["one row of 32768 in a bucket of 8"] == [32768, 0, 0, 0, 0, 0, 0, 0]
    ragged = full["batch 64, one row of 32768, others of 256 to 1024"]
    assert len(ragged) == 64 and (ragged[0], min(ragged[1:]), max(ragged[1:])) == (32768, 256, 1024)
    monkeypatch.setattr(timing, "SAMPLE", 0.0)
    monkeypatch.setattr(decode, "KINDS", (None,))
    monkeypatch.setattr(decode, "ceilings", lambda small: Ceilings(1e9, 1.0))
    _, *found = list(decode.measure(small=True))
    assert [row.outcome for row in found] == 3 * [""] and len({row.case for row in found}) == 3
    alone = next(row for row in found if row.case == "bfloat16 cache, one row of 128 in a bucket of 8")
    moved = 2 * 128 * 2 * 64 * 2 + (1 + 8) * 4 * 64 * 2
    assert alone.values["GB/s"] * alone.values["us"] == pytest.approx(moved / 1e3)


def test_what_no_sequence_covers_is_nan() -> None:
    shape = Shape(1, 1, 64, 16)
    paged = inputs.checked([5, 0, 17, 20], shape, "bfloat16", None, seed=0)
    k, tables = np.asarray(paged.k, np.float32), np.asarray(paged.tables)
    assert tables[-1, 0] == tables[-2, 0]
    pages = {tables[0, 0]: 5, tables[2, 0]: 16, tables[2, 1]: 1, tables[3, 1]: 4}
    for page in range(k.shape[0]):
        covered = np.isfinite(k[page, 0]).all(-1)
        assert covered.tolist() == [token < pages.get(page, 0) for token in range(16)]
    assert (tables[1] == 0).all() and tables[0, 1] == k.shape[0]  # the null page, and none


def test_the_table_judges_by_the_goal() -> None:
    entries = [
        Row("copy", {"GB/s": 4300.0}).data(),
        Row("near", {"GB/s": 4000.0, "share": 0.93}, goal=0.85).data(),
        Row("far", {"GB/s": 40.0, "share": 0.0093}, goal=0.85).data(),
        rows.skipped("other", "it is not here").data(),
        rows.failed("wrong", "it is not right", share=float("inf")).data(),
    ]
    json.loads(json.dumps(entries, allow_nan=False))
    assert [entry.get("outcome") for entry in entries] == [None, "met", "missed", "skipped", "failed"]
    lines = rows.table(entries).splitlines()
    assert lines[0].split() == ["case", "GB/s", "share", "goal", "outcome", "why"]
    assert lines[2].split() == ["near", "4000", "0.93", "0.85", "met"]
    assert lines[3].split() == ["far", "40", "0.0093", "0.85", "missed"]
    assert lines[4].split(maxsplit=2) == ["other", "skipped", "it is not here"]


def test_results_are_kept_by_part(tmp_path: Path) -> None:
    file, machine = tmp_path / "new" / "results.json", {"devices": ["NVIDIA H200"]}
    assert rows.read(file) == {} and not rows.checked({})
    first = rows.merged(
        rows.read(file), "correctness", machine, [Row("a", outcome="ok"), rows.failed("b", "why")], None
    )
    rows.write(file, first)
    rows.write(file, rows.merged(rows.read(file), "decode", machine, [Row("old")], "its time was over"))
    rows.write(file, rows.merged(rows.read(file), "decode", machine, [Row("new")], None))
    kept = rows.read(file)
    assert (
        kept["correctness"] == first["correctness"]
        and kept["decode"]["rows"] == [{"case": "new"}]
        and "stopped" not in kept["decode"]
    )
    assert rows.failures(kept, "correctness") == 1 and rows.failures(kept, "decode") == 0
    assert rows.checked(kept)
    kept["correctness"]["sources"] = "of other kernels"
    assert not rows.checked(kept)
    assert not rows.checked(
        rows.merged({}, "correctness", {"devices": ["cpu"]}, [Row("a", outcome="ok")], None)
    )


def test_a_part_that_raises_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(part: str, small: bool, programs: Path | None) -> Any:
        yield Row("first", outcome="ok")
        raise RuntimeError(f"{part} is broken")

    monkeypatch.setattr(gpu_suite, "measure", measure)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    gpu_suite.run_part("decode", tmp_path / "results.json", None)
    kept = rows.read(tmp_path / "results.json")
    assert [entry["case"] for entry in kept["decode"]["rows"]] == ["first", "decode"]
    assert kept["decode"]["rows"][1]["why"] == "RuntimeError: decode is broken"
    assert rows.failures(kept, "decode") == 1


def test_a_part_that_is_killed_leaves_what_it_has_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(part: str, small: bool, programs: Path | None) -> Any:
        yield Row("first", outcome="ok")
        yield Row("second", outcome="ok")
        raise SystemExit  # as a signal does, or a driver that ends the process

    monkeypatch.setattr(gpu_suite, "measure", measure)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    file, save = tmp_path / "results.json", tmp_path / "saved.json"
    with pytest.raises(SystemExit):
        gpu_suite.run_part("decode", file, None, save)
    for kept in (rows.read(file), rows.read(save)):
        assert [entry["case"] for entry in kept["decode"]["rows"]] == ["first", "second"]
        assert kept["decode"]["stopped"] == gpu_suite.ENDED


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results.json"
    rows.write(file, {"decode": 1})

    def half(self: Path, text: str) -> None:
        with self.open("w") as file:
            file.write(text[:5])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        rows.write(file, {"decode": 2})
    assert rows.read(file) == {"decode": 1}


@pytest.mark.full
def test_killed_in_the_middle_it_leaves_rows_that_can_be_read(tmp_path: Path) -> None:
    """Of a real process, whose part has many rows on a CPU, too."""
    file = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks.gpu_suite", "experts", "--here", "--out", str(file)]
    child = subprocess.Popen(
        command, cwd=rows.ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=subprocess.DEVNULL
    )
    try:
        while child.poll() is None and not rows.read(file).get("experts", {}).get("rows"):
            time.sleep(0.05)
        assert child.poll() is None, "it ended before it could be killed"
    finally:
        child.kill()
        child.wait()
    kept = rows.read(file)["experts"]
    assert kept["rows"] and kept["stopped"] == gpu_suite.ENDED
    assert [entry["outcome"] for entry in kept["rows"]] == len(kept["rows"]) * ["ok"]


@pytest.mark.parametrize(
    "part",
    [
        part if part in ("features", "rollouts") else pytest.param(part, marks=pytest.mark.full)
        for part in gpu_suite.PARTS
    ],
)
def test_every_part_runs_without_a_gpu(part: str, tmp_path: Path) -> None:
    """At the smallest sizes; results are kept in the file that is named."""
    file = tmp_path / "results.json"
    # or it would run first
    first = rows.merged({}, "correctness", {"devices": ["NVIDIA H200"]}, [Row("a", outcome="ok")], None)
    rows.write(file, first)
    command = [sys.executable, "-m", "benchmarks.gpu_suite", part, "--out", str(file)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=rows.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    entry = rows.read(file)[part]
    assert (
        entry["rows"]
        and "stopped" not in entry
        and {row.get("outcome", "") for row in entry["rows"]} <= {"ok", "skipped", ""}
    )


def test_a_median_waits_for_what_it_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that takes 3 ms per call, one after the other, and a host that takes 1 ms to start one."""
    clock, ready = [0.0], [0.0]

    def call() -> float:
        clock[0] += 1e-3
        ready[0] = max(ready[0], clock[0]) + 3e-3
        return ready[0]

    def wait(until: float) -> None:
        clock[0] = max(clock[0], until)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    assert timing.median(call, wait) == pytest.approx(3e-3, rel=0.05)


def test_a_chain_feeds_results_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def once(call: Any) -> float:
        seen.append(np.asarray(call()).tolist())
        return 16.0

    monkeypatch.setattr(timing, "median", once)
    each = jnp.arange(timing.CHAIN)
    assert (
        timing.chained(lambda x, one, factor: x * factor + one, jnp.int32(1), each, jnp.int32(2))
        == 16.0 / timing.CHAIN
    )
    want = 1
    for i in range(timing.CHAIN):
        want = want * 2 + i
    assert seen == [want]


def test_cases_meet_every_value_of_every_option() -> None:
    made = correctness.cases(small=False)
    assert len(set(map(str, made))) == len(made)
    latent = [case for case in made if case.function == "latent"]
    assert {case.shape.heads for case in latent} == {16, 20, 64, 128} and {case.dtype for case in latent} == {
        "bfloat16",
        "float16",
    }
    for function in ("decode", "prefill"):
        mine = [case for case in made if case.function == function]
        for kind in inputs.KINDS:
            of_kind = [case for case in mine if case.kind == kind]
            assert {case.shape.head_dim for case in of_kind} == {64, 128, 256}
            assert {case.shape.page_size for case in of_kind} == {16, 64, 128}
            assert {case.shape.group for case in of_kind} == {1, 4, 8}
            assert {case.dtype for case in of_kind} == {"bfloat16", "float16"}
            named = [
                tuple(ways.get(name) for name in ("window", "soft_cap", "sinks")) for ways in correctness.WAYS
            ]
            assert {
                tuple(case.ways.get(name) for name in ("window", "soft_cap", "sinks")) for case in of_kind
            } == set(named)
    written = [case for case in made if case.function == "kv_write"]
    assert {(case.kind, bool(case.pairs)) for case in written} == {
        (kind, turned) for kind in inputs.KINDS for turned in (True, False)
    }
    assert {(case.shape.group, bool(case.ways)) for case in written} == {
        (group, normed) for group in (1, 4) for normed in (True, False)
    }


def test_every_kernel_meets_the_reference_and_a_wrong_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    right = list(correctness.measure(small=True))
    assert [row.outcome for row in right] == ["ok"] * 4 and len({row.case for row in right}) == 4
    shifted = dispatch.paged_attention_decode
    monkeypatch.setattr(
        dispatch, "paged_attention_decode", lambda *args, **ways: shifted(*args, **ways) + 0.05
    )
    monkeypatch.setattr(
        cache_dispatch,
        "kv_write",
        lambda k, v, qkv, *args, rows, **ways: ((qkv.split().q[:rows], qkv.split().q[rows:]), (k, v)),
    )
    monkeypatch.setattr(cache_dispatch, "copy_pages", lambda k, v, *args, **ways: (k, v))
    wrong = {row.case.split(":")[0]: row.outcome for row in correctness.measure(small=True)}
    assert wrong == {"decode": "failed", "prefill": "ok", "kv_write": "failed", "copy_pages": "failed"}


@pytest.mark.parametrize(("size", "name"), [(0, "latent_attention_decode"), (16, "latent_attention_prefill")])
def test_latent_attention_meets_the_reference_and_a_wrong_one_does_not(
    size: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = correctness.Case("latent", Shape(1, 2, 128, 16), "bfloat16", size=size, longest=100)
    assert correctness.check(case, "xla", 0).outcome == "ok"
    right = getattr(latent_dispatch, name)
    monkeypatch.setattr(latent_dispatch, name, lambda *args, **ways: right(*args, **ways) + 0.05)
    assert correctness.check(case, "xla", 0).outcome == "failed"


def test_what_no_kernel_serves_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "ceilings", lambda small: Ceilings(1.0, 1.0))
    monkeypatch.setattr(prefill, "ceilings", lambda small: Ceilings(1.0, 1.0))
    monkeypatch.setattr(decode, "LLAMA", Shape(1, 1, 64, 64))
    monkeypatch.setattr(decode, "batches", lambda small: [decode.Batch("one", [1024])])
    found = list(decode.measure(small=False))[1:]
    assert [row.outcome for row in found] == ["skipped"] * 3 and "device=cpu" in found[0].why


def test_a_folder_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    [row] = programs.try_folder("given", tmp_path / "none")
    assert row.outcome == "failed" and str(tmp_path / "none") in row.why


def test_kernels_take_the_shapes_that_are_timed() -> None:
    q: Any = jax.ShapeDtypeStruct((1, LLAMA.heads, LLAMA.head_dim), jnp.bfloat16)
    tile: Any = jax.ShapeDtypeStruct((1, prefill.TILE, LLAMA.heads, LLAMA.head_dim), jnp.bfloat16)
    k, v = jax.eval_shape(lambda: inputs.large(LLAMA, 1, "bfloat16", None))
    assert why_none(dispatch.DECODE, HOPPER, q, k, v, PLAIN) is None
    assert why_none(dispatch.PREFILL, HOPPER, tile, k, v, PLAIN) is None


@pytest.mark.full
def test_products_of_experts_are_checked_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "chained", lambda *args: 1.0)
    monkeypatch.setattr(experts, "ceilings", lambda small: Ceilings(1e9, 1e9))
    assert [row.outcome for row in experts.measure(small=True)] == 8 * ["ok"]
    monkeypatch.setattr(
        experts,
        "stored",
        lambda weight: SimpleNamespace(
            dequantized=stored(weight).dequantized,
            grouped_product=lambda *args, **how: stored(weight).grouped_product(*args, **how) * 1.05,
        ),
    )
    assert [row.outcome for row in experts.measure(small=True)] == 8 * ["failed"]


@pytest.mark.full
def test_quantized_products_are_checked_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "chained", lambda *args: 1.0)
    monkeypatch.setattr(products, "ceilings", lambda small: Ceilings(1e9, 1e9))
    every = len(products.KINDS) * len(products.SMALL.rows)  # beside XLA's rows in bfloat16
    assert [row.outcome for row in products.measure(small=True)] == [*2 * [""], *every * ["ok"]]
    monkeypatch.setattr(
        products,
        "stored",
        lambda weight: SimpleNamespace(
            on_gpu=lambda *args, **how: stored(weight).on_gpu(*args, **how) * 1.05
        ),
    )
    assert [row.outcome for row in products.measure(small=True)] == [*2 * [""], *every * ["failed"]]
