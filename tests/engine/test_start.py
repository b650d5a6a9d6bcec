"""Programs are compiled before the first request. A second start compiles nothing, nor do requests. Steps
overlap.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from jengine.base.errors import OutOfMemory
from jengine.core.config import EngineConfig
from jengine.core.request import Request, SamplingParams
from jengine.engine import start
from jengine.engine.loop.engine import Engine
from jengine.table.program_table import VARIANTS
from tests.engine.running import SMALL, limit_pages, overlapped_steps, prompts, run
from tests.golden.weights import write_model

VOCAB = 96

SECOND_START = """
import json, sys
from jengine.base.compiles import compile_count
before = compile_count()
from jengine.core.config import EngineConfig
from jengine.core.request import Request, SamplingParams
from jengine.engine.start import start_engine
engine, started = start_engine(EngineConfig.of(sys.argv[1], json.loads(sys.argv[2])), progress=False)
params = SamplingParams(temperature=0.8, top_k=5, seed=3, max_tokens=4, logprobs=2)
engine.add(Request(request_id="0", prompt_token_ids=[5, 6, 7], params=params))
tokens = []
while engine.has_work:
    tokens += [update.token for update in engine.step()]
print(json.dumps([started.programs_compiled, started.programs_loaded, compile_count() - before, tokens]))
"""


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    """Counted over the whole life of a process, including weights and first tokens. A table with one program
    of each sort.
    """
    write_model(tmp_path / "model", "llama_gqa")
    options = json.dumps({**SMALL, "max_model_len": 64, "batch_invariant": True, "cache_dir": str(tmp_path)})

    def start() -> tuple[int, int, int, list[int]]:
        command = [sys.executable, "-W", "error", "-c", SECOND_START, str(tmp_path / "model"), options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        compiled, loaded, compilations, tokens = json.loads(done.stdout.splitlines()[-1])
        return compiled, loaded, compilations, tokens

    compiled, loaded, compilations, tokens = start()
    assert compiled > 0 and loaded == 0 and compilations >= compiled
    assert start() == (0, compiled, 0, tokens)


def test_the_counter_fires(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """For what the engine compiles, and not for other code of the process."""
    before = engine.compiles_since_start

    def compile_one(now: float) -> None:
        jax.jit(lambda x: x * np.float32(now))(np.float32(3.0))

    compile_one(1.5)
    assert engine.compiles_since_start == before
    monkeypatch.setattr(engine.records, "passed_on", compile_one)
    engine.passed_on()
    assert engine.compiles_since_start == before + 1


def random_params(rng: np.random.Generator, level: int) -> SamplingParams:
    """Parameters that ask for one of the first `level` + 1 sampler variants."""

    def one(*values: float | None, since: int = 0) -> float | None:
        return values[rng.integers(len(values))] if level >= since else values[0]

    return SamplingParams(  # type: ignore[arg-type]
        temperature=one(0.0, 0.7, 1.0, 2.0, since=1),
        top_k=one(0, 5, 50, since=2),
        top_p=one(1.0, 0.9, since=2),
        min_p=one(0.0, 0.1, since=2),
        min_tokens=one(0, 1, since=2),
        logprobs=one(None, 0, 5, 20, since=3),
        seed=one(None, 1, 2**63),
        max_tokens=int(rng.integers(1, 60)),
        stop_token_ids=rng.choice(VOCAB, int(rng.integers(0, 3)), replace=False).tolist(),
    )


def test_no_request_compiles_anything(make_engine: Callable[..., Engine]) -> None:
    """200 requests of random lengths and parameters, arriving and aborted at random, with preemptions."""
    engine, rng = make_engine(), np.random.default_rng(0)
    limit_pages(engine, 20)
    before = engine.compiles_since_start
    texts = prompts(200, vocab=VOCAB, longest=130)
    # taken from the end
    coming = [(texts[i], random_params(rng, 3 - n // 50)) for n, i in enumerate(rng.permutation(200))]
    unfinished: set[str] = set()
    ended = aborted = 0
    while coming or engine.has_work:
        for _ in range(min(int(rng.integers(0, 4)), len(coming))):
            prompt, params = coming.pop()
            request_id = str(len(coming))
            engine.add(Request(request_id=request_id, prompt_token_ids=prompt, params=params))
            unfinished.add(request_id)
        if unfinished and rng.random() < 0.05:
            victim = sorted(unfinished)[int(rng.integers(len(unfinished)))]
            assert engine.end(victim, "abort") and not engine.end(victim, "abort")
            unfinished.remove(victim)
            aborted += 1
        for update in engine.step():
            assert update.request_id in unfinished, "a token after the end"
            if update.finish_reason is not None:
                unfinished.remove(update.request_id)
                ended += 1
        engine.scheduler.check_integrity()
    assert ended + aborted == 200 and aborted > 10 and not unfinished
    assert engine.scheduler.blocks.owned == 0
    samplers = {step.sampler.variant for step in engine.records.steps}
    assert samplers == {*VARIANTS}, "some variant was never used"
    assert engine.scheduler.registry.num_preemptions > 0
    assert engine.compiles_since_start == before
    overlapped, steps = overlapped_steps(engine)
    assert steps > 200 and overlapped >= 0.95 * steps


def test_steady_steps_overlap(engine: Engine) -> None:
    """Step n + 1 is dispatched before step n is read; without overlap, never."""
    work = [
        (prompt, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
        for prompt in prompts(8, vocab=VOCAB, longest=60)
    ]
    run(engine, work)
    overlapped, steps = overlapped_steps(engine)
    assert steps >= 100 and overlapped >= 0.95 * steps


@pytest.mark.parametrize("others", [0, 1, 2])
def test_a_full_device_names_other_engines(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OutOfMemory("no room for the KV cache")

    monkeypatch.setattr(start, "_start", full)
    monkeypatch.setattr(start, "engines", lambda: [object()] * others)
    with pytest.raises(OutOfMemory, match=r"^no room for the KV cache") as error:
        start.start_engine(EngineConfig(model="demo"))
    told = str(error.value).partition("; ")[2]
    assert told.startswith(f"{others} other engine") and "close() it" in told if others else not told
