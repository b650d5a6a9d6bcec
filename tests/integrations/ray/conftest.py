"""A local cluster."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jengine import AsyncLLM, Tokenizer
from jengine.api.backend import EngineThread
from tests.batch_mocks import make_tokenizer
from tests.extras import of_extra
from tests.mocks.mock_engine import MockEngine

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ray's own
        ray = of_extra("ray", "ray")
        paths = {
            "PYTHONPATH": str(ROOT),
            "JENGINE_CACHE_DIR": os.environ["JENGINE_CACHE_DIR"],
            "JAX_PLATFORMS": "cpu",
        }
        ray.init(
            num_cpus=8,  # as far as scheduling is concerned
            include_dashboard=False,
            configure_logging=False,
            object_store_memory=200 * 2**20,
            runtime_env={"env_vars": paths},
        )
    yield
    ray.shutdown()


def mock_llm(folder: Path, pids: Path, seconds: float, _: Any) -> AsyncLLM:
    """An LLM with a mock engine, which leaves a file with its process's id."""
    (pids / str(os.getpid())).touch()
    return AsyncLLM.over(
        EngineThread(MockEngine(vocab_size=501, max_num_seqs=8, seconds=seconds)), Tokenizer.load(folder)
    )


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    """The folder with the ids of the workers' processes."""
    folder = tmp_path / "pids"
    folder.mkdir()
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    return make_tokenizer(folder)


@pytest.fixture
def make_llm(model: Path, pids: Path) -> Callable[..., AsyncLLM]:
    return partial(mock_llm, model, pids, 0.01)


def wait_until(what: Callable[[], object], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it has not come"
        time.sleep(0.02)
