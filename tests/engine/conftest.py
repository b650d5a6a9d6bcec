"""Engines over tiny random models, with tables small enough to compile in seconds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from jengine import LLM
from jengine.core.config import EngineConfig
from jengine.engine.loop.engine import Engine
from jengine.engine.start import start_engine
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL, Estimates
from tests.golden.vllm.cases import MAX_MODEL_LEN, MODELS, write_case_model
from tests.golden.weights import max_model_len, write_model


@pytest.fixture(scope="session")
def make_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    """make_engine(variant, **options) -> Engine; options are EngineConfig's, over SMALL.

    It compiles on demand, see on_demand.py; `optimized` is for comparisons of bits. If `whole`, it starts as
    any engine.
    """
    root: Path = tmp_path_factory.mktemp("models")

    def make(
        variant: str = "llama_gqa", *, whole: bool = False, optimized: bool = False, **options: object
    ) -> Engine:
        folder = root / variant
        if not folder.exists():
            write_model(folder, variant)
        config = EngineConfig.of(str(folder), {"max_model_len": max_model_len(variant), **SMALL, **options})
        with nullcontext() if whole else on_demand(optimized=optimized):
            engine = start_engine(config, progress=False)[0]
        engine.scheduler.predictor.costs = Estimates(engine.scheduler.table)
        return engine

    return make


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()


@pytest.fixture(scope="module")
def case_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LLM]:
    """The models that vLLM was asked about, by name."""
    made = {}
    for name in MODELS:
        folder: Path = tmp_path_factory.mktemp(name)
        write_case_model(folder, name)
        with on_demand():
            made[name] = LLM(folder, progress=False, dtype="float32", max_model_len=MAX_MODEL_LEN, **SMALL)
    return made
