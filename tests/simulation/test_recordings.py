"""An engine's recording is a trace of its requests, and contains nothing else."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jengine.base.errors import InvalidArgument
from jengine.capacity.simulation.trace import read_trace
from jengine.core.request import Request, SamplingParams
from jengine.engine.loop.engine import Engine
from jengine.engine.loop.engine_parts import EngineParts
from jengine.execution.runner import StepResult
from jengine.insight.recording.recorder import BLOCK, TraceRecorder
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.step_plan import StepPlan
from jengine.table.program_table import ProgramTable
from tests.schedulers import make_scheduler
from tests.scheduling.embedding_memory import with_images

SECRET = [12345] * (2 * BLOCK)


class NoModel:
    """Replaces a runner: every token is 7."""

    def dispatch(self, plan: StepPlan) -> Any:
        return SimpleNamespace(plan=plan, started=time.perf_counter())

    def read(self, step: Any) -> Any:
        return StepResult([[7]] * len(step.plan.samples), waited=True)


@pytest.fixture
def recorded(tmp_path):
    def run(*requests: Request) -> Any:
        recorder = TraceRecorder(tmp_path / "trace")
        model: Any = SimpleNamespace(vocab_size=100_000, eos_token_ids=())
        table = ProgramTable.build(max_num_seqs=4, max_num_batched_tokens=36, tile_size=8)
        limits = {
            "page_size": 4,
            "num_pages": 200,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 36,
            "max_model_len": 512,
        }
        scheduler = make_scheduler(table, **limits)
        engine = Engine(model, NoModel(), scheduler, EngineParts(recorder=recorder))  # type: ignore[arg-type]
        engine.add(*requests[:1])
        for request in requests[1:]:
            engine.add(request)
        while engine.has_work:
            engine.step()
            stopped = engine.scheduler.registry.by_id.get("stopped")
            if stopped is not None and len(stopped.output_token_ids) == 5:
                engine.end("stopped", "stop", "text")
        recorder.close()
        return read_trace(tmp_path / "trace")

    return run


def request(name: str, prompt: list[int], tokens: int, **more: Any) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=prompt, params=params, **more)


def test_lengths_times_and_targets(recorded, tmp_path):
    now = time.monotonic() + 5.0
    trace = recorded(
        request("a", SECRET, 4, arrival=now, client="a name", ttft_ms=50.0, priority=3),
        request("b", SECRET[:-1] + [1] * 20, 6, arrival=now + 0.5, client="a name"),
        request("stopped", [1, 2, 3], 30, arrival=now + 1.0),
    )
    np.testing.assert_allclose(trace.arrivals, [0.0, 0.5, 1.0], atol=1e-4)
    assert trace.prompts.tolist() == [2 * BLOCK, 2 * BLOCK + 19, 3] and trace.outputs.tolist() == [4, 6, 5]
    assert trace.priorities.tolist() == [3, 0, 0] and trace.ttft_ms[0] == 50.0
    assert trace.clients[0] == trace.clients[1] != trace.clients[2]
    a, b = trace.prompt_token_ids(0), trace.prompt_token_ids(1)
    assert a[:BLOCK] == b[:BLOCK] and not {*a[BLOCK:]} & {*b[BLOCK:]}  # the second block of b is another one
    text = (tmp_path / "trace").read_text()
    assert "12345" not in text and "name" not in text


def test_salts_keep_prefixes_apart(recorded):
    now = time.monotonic()
    a, b, c = recorded(
        *[request(salt + str(i), SECRET, 2, arrival=now + i, cache_salt=salt) for i, salt in enumerate("xyx")]
    ).prefixes
    assert a == c and not {*a} & {*b}


def test_images_keep_prefixes_apart(tmp_path):
    """Their placeholders are equal tokens."""
    recorder = TraceRecorder(tmp_path / "trace")
    for number, content in enumerate((1, 2, 1)):
        prompt, images = with_images([1] * BLOCK, [(0, content, 4)])
        asked = request(str(number), prompt, 1, arrival=time.monotonic() + number, images=images)
        recorder.ended(
            Sequence(
                request=asked,
                number=number,
                family=number,
                seed=0,
                max_len=len(prompt) + 1,
                eos_token_ids=(),
                stop_token_ids=frozenset(),
                suppressed_token_ids=(),
                tokens=[*prompt, 7],
            )
        )
    recorder.close()
    a, b, c = read_trace(tmp_path / "trace").prefixes
    assert a == c and not {*a} & {*b}


def test_an_engine_that_starts_again_goes_on(recorded, tmp_path):
    recorded(request("a", SECRET, 2, arrival=time.monotonic()))
    trace = recorded(request("b", SECRET, 3, arrival=time.monotonic()))
    assert sorted(trace.outputs.tolist()) == [2, 3]
    lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    # the key of the hashes is another one
    assert len(lines) == 3 and lines[1]["prefix"] != lines[2]["prefix"]


@pytest.mark.parametrize("before", ["something else\n", '{"no": "trace"}\n'])
def test_no_other_file_is_written_to(tmp_path, before):
    (tmp_path / "file").write_text(before)
    with pytest.raises(InvalidArgument, match="record_trace"):
        TraceRecorder(tmp_path / "file")
    assert (tmp_path / "file").read_text() == before
    with pytest.raises(InvalidArgument, match="record_trace"):
        TraceRecorder(tmp_path / "no" / "folder")
