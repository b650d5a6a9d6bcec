"""cpu_threads: effects in a process, and rejected values."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jengine import LLM, InvalidArgument
from jengine.devices.device_defaults import CORES, cpu_threads, limit_cpu_threads
from tests.execution.test_program_store import make_spec

COUNT = """
import json, os, sys
from pathlib import Path
from jengine.devices.device_defaults import limit_cpu_threads
from jengine.text.tokenizer import Tokenizer

def threads():
    tasks = Path("/proc/self/task")
    return [(tasks / task / "comm").read_text().strip() for task in os.listdir(tasks)]

tokenizer = Tokenizer.load(Path(sys.argv[2]))
limit_cpu_threads(int(sys.argv[1]) or None)
import jax
before = len(threads())
tokenizer.encode("some text")
tokenizers = len(threads()) - before
jax.devices()
print(json.dumps([tokenizers, *(threads().count(name) for name in ("tf_XLAEigen", "tf_XLACompile"))]))
"""


def threads_of(limit: int, tokenizer: Path) -> list[int]:
    """Threads that the tokenizer, XLA's operations and XLA's compiler start in a separate process. limit: 0:
    none.
    """
    done = subprocess.run(
        [sys.executable, "-c", COUNT, str(limit), str(tokenizer)], capture_output=True, text=True, check=True
    )
    counts: list[int] = json.loads(done.stdout.splitlines()[-1])
    return counts


@pytest.mark.skipif(
    not Path("/proc/self/task").exists() or CORES == 1,
    reason="threads are counted on Linux, with several cores",
)
def test_a_process_has_so_many_threads(text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    assert threads_of(1, text_model) == [1, 1, 1]
    assert threads_of(0, text_model) == [CORES, CORES, CORES]


def test_more_than_there_are_cores_is_refused() -> None:
    with pytest.raises(
        InvalidArgument,
        match=rf"cpu_threads={CORES + 1}: must be at most {CORES}, the cores that this process may use",
    ):
        LLM("demo", cpu_threads=CORES + 1)


def test_jax_keeps_the_threads_it_has_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    jax.devices()
    monkeypatch.setenv("NPROC", str(CORES + 1))
    with pytest.raises(
        InvalidArgument, match=rf"cpu_threads={CORES}: must be {CORES + 1}: JAX has already started"
    ):
        LLM("demo", cpu_threads=CORES)
    monkeypatch.setenv("NPROC", str(CORES))
    limit_cpu_threads(CORES)  # as it is
    limit_cpu_threads(None)


@pytest.mark.parametrize("text", ["", "many", None])
def test_without_a_number_all_cores_count(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    monkeypatch.delenv("NPROC", raising=False)
    if text is not None:
        monkeypatch.setenv("NPROC", text)
    assert cpu_threads() == CORES


def test_programs_are_saved_for_a_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA divides loops by it. Programs that were given by the user serve any number."""
    monkeypatch.setenv("NPROC", "1")
    one = make_spec()
    fingerprint, identity = one.fingerprint(), one.identity()
    monkeypatch.setenv("NPROC", "2")
    assert make_spec().fingerprint() != fingerprint
    assert make_spec().identity() == identity
