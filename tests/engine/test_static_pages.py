"""Attention on GPUs without kernels: a static number of pages from buckets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from jengine.core.request import SamplingParams
from jengine.engine.loop.engine import Engine
from jengine.engine.setup.shapes import page_buckets
from jengine.execution.executor import Worker
from jengine.execution.programs import Programs, lower
from jengine.execution.runner import Runner
from jengine.table.program_table import TrunkKey
from tests.engine.running import SMALL, run
from tests.golden.weights import Golden
from tests.schedulers import make_scheduler


def test_buckets_end_at_the_width_and_grow_fourfold() -> None:
    assert page_buckets(12) == (12,)
    assert page_buckets(2048) == (32, 128, 512, 2048)
    assert page_buckets(100) == (25, 100)


@pytest.mark.full
def test_tokens_are_the_same(make_engine: Callable[..., Engine]) -> None:
    dynamic = make_engine("llama_mqa")
    before: Runner = dynamic.runner  # type: ignore[assignment]
    spec = dataclasses.replace(
        before.spec, table=dataclasses.replace(before.spec.table, page_buckets=(4, 12))
    )
    runner = Runner(Worker(spec, Programs(spec, None, threads=2, progress=False), before.worker.state.leaves))
    scheduler = make_scheduler(
        spec.table,
        page_size=spec.page_size,
        num_pages=spec.num_pages,
        max_num_seqs=SMALL["max_num_seqs"],
        max_num_batched_tokens=SMALL["max_num_batched_tokens"],
        max_model_len=spec.max_model_len,
    )
    engine = Engine(dynamic.model, runner, scheduler)
    cases = Golden.read("llama_mqa").cases
    work = [
        (case.prompt.tolist(), SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
        for case in cases
    ]
    assert [answer.tokens for answer in run(engine, work)] == [case.tokens.tolist() for case in cases]
    used = {str(step.trunk) for step in engine.records.steps}
    assert any(",4p]" in trunk for trunk in used) and any(",12p]" in trunk for trunk in used)


def test_no_loop_of_unknown_length(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA can count the iterations of every loop of a static program, but not of the dynamic form. Both
    without kernels.
    """
    spec = make_engine().runner.spec  # type: ignore[attr-defined]
    monkeypatch.setattr("pallas_kernels.devices.cpu_refused", lambda: "XLA's form is wanted")
    static = dataclasses.replace(spec, table=dataclasses.replace(spec.table, page_buckets=(4, 12)))

    def loops(of: object, key: TrunkKey) -> tuple[int, int]:
        text = lower(of, key).compile().as_text()  # type: ignore[arg-type]
        whiles = [line for line in text.splitlines() if " while(" in line]
        return len(whiles), sum("known_trip_count" in line for line in whiles)

    total, known = loops(static, TrunkKey(8, 2, 12))
    assert total == known > 0
    total, known = loops(spec, TrunkKey(8, 2, 0))
    assert known < total
