"""Beams and embeddings with adapters are those of the models that have these merged into their weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jengine import LLM, BeamSearchParams, SamplingParams
from tests.engine.loras import prompts
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL, limit_pages
from tests.engine.test_lora import LORA
from tests.golden.loras import lora, write_merged
from tests.golden.weights import write_model
from tests.text.conftest import byte_level, write

VARIANT = "llama_tied"
ADAPTERS = {"a": "plain", "b": "rs", "c": "plain"}  # one more than there are places
OPTIONS: dict[str, Any] = {**SMALL, **LORA, "max_model_len": 128, "dtype": "float32", "embeddings": True}
NAMES = [None, *ADAPTERS] * 2
BEGINNING = prompts(1, 40)[0]
PROMPTS = [BEGINNING + end for end in prompts(len(NAMES), 9)]
SHORT = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def llms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str | None, LLM]]:
    """With adapters, by None; and the merged models, by the adapter's name."""
    root: Path = tmp_path_factory.mktemp("models")
    write_model(root / "base", VARIANT, vocab_size=512)
    write(byte_level(), root / "base")
    with ExitStack() as stack, on_demand():
        llms: dict[str | None, LLM] = {
            None: stack.enter_context(LLM(root / "base", progress=False, **OPTIONS))
        }
        for name, kind in ADAPTERS.items():
            adapter = lora(VARIANT, kind, name)
            llms[None].loras.load(name, config=adapter.config, tensors=adapter.tensors)
            folder = write_merged(root / name, root / "base", adapter)
            llms[name] = stack.enter_context(LLM(folder, progress=False, **OPTIONS))
        yield llms


@pytest.mark.parametrize("pages", [119, 16])
def test_beams(pages: int, llms: dict[str | None, LLM]) -> None:
    """Also in few pages, in which searches are preempted."""
    params, llm = BeamSearchParams(beam_width=3, max_tokens=24, ignore_eos=True), llms[None]
    expected = [
        llms[name].beam_search(prompt, params)[0] for prompt, name in zip(PROMPTS, NAMES, strict=True)
    ]
    limit_pages(llm.engine, pages)
    got = llm.beam_search(PROMPTS, params, lora_request=NAMES)
    for one, other in zip(got, expected, strict=True):
        assert [beam.tokens for beam in one.sequences] == [beam.tokens for beam in other.sequences]
        for beam, like in zip(one.sequences, other.sequences, strict=True):
            assert beam.cum_logprob == pytest.approx(like.cum_logprob, abs=1e-3)
    preempted = llm.engine.scheduler.registry.num_preemptions
    assert (preempted > 0) is (pages == 16)
    limit_pages(llm.engine, 119)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings(pooling: Any, llms: dict[str | None, LLM]) -> None:
    """The second time, from cached pages, and after tokens that the same adapter generated."""
    expected = [
        np.array(llms[name].embed([prompt], pooling=pooling, use_tqdm=False)[0].outputs.embedding)
        for prompt, name in zip(PROMPTS, NAMES, strict=True)
    ]
    assert np.abs(expected[0] - expected[1]).max() > 1e-3
    for _ in range(2):
        got = llms[None].embed(PROMPTS, pooling=pooling, lora_request=NAMES, use_tqdm=False)
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one.outputs.embedding, other, atol=1e-4)
        llms[None].generate(PROMPTS, SHORT, lora_request=NAMES, use_tqdm=False)
