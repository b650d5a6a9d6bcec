"""Images of families whose positions have three numbers (mrope), or whose tokens see each other, through the
engine.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jengine.base.compiles import compile_count
from jengine.base.errors import InvalidArgument, ModelError
from jengine.core.config import EngineConfig
from jengine.core.images import PromptImages
from jengine.core.request import MAX_LOGPROBS, Request, SamplingParams
from jengine.core.updates import PromptScores
from jengine.engine.loop.engine import Engine
from jengine.engine.operations import ResetPrefixCache, UpdateWeights
from jengine.engine.start import start_engine
from jengine.execution.runner import PendingSample
from jengine.scheduling.costs.step_costs import SwapCosts
from jengine.scheduling.pages.block_table import outside
from jengine.scheduling.step_plan import StepPlan
from jengine.vision.folder import served_vision
from jengine.vision.reader import with_images
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL, Answer, limit_pages
from tests.engine.test_weight_updates import tensors
from tests.golden.pictures import PICTURES, pictures, text
from tests.golden.weights import VARIANTS, write_model

OPTIONS = {**SMALL, "max_model_len": 256, "image_pool_rows": 256, "tile_size": 16, "num_pages": 60}
Prompt = tuple[list[int], PromptImages | None]
FURTHER = [pytest.param(name, marks=pytest.mark.full) for name in ("qwen2_5_vl", "qwen3_5_moe")]
AROUND = "vision_start_token_id", "vision_end_token_id"
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=MAX_LOGPROBS)


def started(folder: Path, variant: str, **options: Any) -> tuple[Engine, list[int], PromptImages]:
    """An engine, and the recorded prompt."""
    write_model(folder, variant)
    (folder / "preprocessor_config.json").write_text(json.dumps(PICTURES[variant].processor))
    vision, config = served_vision(folder, lambda text: [0], 256), VARIANTS[variant]
    assert vision is not None
    images = pictures(variant)
    texts, ids = text(variant, len(images)), list[int]()
    around = [[config[name]] if name in config else [] for name in AROUND]
    for words in texts[:-1]:
        ids += [*words, *around[0], vision.token, *around[1]]
    prompt, placed = with_images(vision, [*ids, *texts[-1]], images, "image")
    assert placed is not None
    config = EngineConfig.of(str(folder), {**OPTIONS, **options})
    with on_demand(optimized=config.batch_invariant):
        return start_engine(config, progress=False)[0], prompt, placed


def answer(engine: Engine, prompt: list[int], images: PromptImages, params: SamplingParams) -> Answer:
    return answers(engine, [(prompt, images)], params)[0]


def answers(
    engine: Engine, prompts: list[Prompt], params: SamplingParams, preempt_after: int | None = None
) -> list[Answer]:
    """preempt_after: updates, after which all that run are preempted."""
    found, updates = {}, 0
    for number, (prompt, images) in enumerate(prompts):
        request = Request(request_id=str(number), prompt_token_ids=prompt, params=params, images=images)
        engine.limits.validate(request)
        [sequence] = engine.add(request)
        found[sequence.request_id] = Answer(sequence)
    while engine.has_work:
        for update in engine.step():
            updates += 1
            if isinstance(update, PromptScores):
                found[update.request_id].scores.append(update)
            else:
                found[update.request_id].updates.append(update)
        if preempt_after is not None and updates >= preempt_after:
            preempt_after = None
            engine.settle()
            engine.scheduler.preempt_all()
        engine.scheduler.check_integrity()
    return [*found.values()]


@pytest.mark.parametrize("variant", ["qwen3_vl", "gemma3_images", "gemma4_images", "qwen3_5", *FURTHER])
def test_as_transformers(variant: str, tmp_path: Path) -> None:
    """Tiles, also within images and after prefix hits, have the numbers of their images, and rows those that
    follow.
    """
    engine, prompt, images = started(tmp_path, variant)
    with np.load(Path(__file__).parents[1] / "golden" / f"images_{variant}.npz") as file:
        assert prompt == file["tokens"].tolist()
        want = file["logprobs"][-1]
    first = answer(engine, prompt, images, PARAMS)
    top = first.updates[0].logprobs
    assert top is not None and top.chosen == pytest.approx(want.max(), abs=1e-4)
    for token, value in top.top:
        assert value == pytest.approx(want[token], abs=1e-4)
    assert answer(engine, prompt, images, PARAMS).tokens == first.tokens  # the prompt is cached
    # rows computed what tiles compute of the same tokens
    score = replace(PARAMS, max_tokens=1, prompt_logprobs=0)
    whole = answer(engine, prompt + first.tokens, images, score)
    scores = [one.chosen for part in whole.scores for one in part.logprobs][-len(first.tokens) :]
    made = [update.logprobs.chosen for update in first.updates]  # type: ignore[union-attr]
    assert scores == pytest.approx(made, abs=1e-4)


def shortened(prompt: list[int], images: PromptImages, parts: int, tail: list[int]) -> Prompt:
    """The prompt up to its first images, with another end."""
    if not parts:
        return tail, None
    end = images.ranges[parts - 1][1]
    positions = [at for at in images.positions if at < end]
    return [*prompt[: end + 2], *tail], PromptImages(images.parts[:parts], positions)


def mixture(prompt: list[int], images: PromptImages) -> list[Prompt]:
    return [
        shortened(prompt, images, number % (1 + len(images.parts)), [number + 1] * (1 + 7 * number % 40))
        for number in range(12)
    ]


def shared(engine: Engine, prompts: list[Prompt], pages: int) -> None:
    """Checks requests that begin equally, in a cache that is too small for them: their log probabilities are
    those of each alone.
    """
    want = []
    for one in prompts:
        engine.do(ResetPrefixCache())
        want += answers(engine, [one], PARAMS)
    limit_pages(engine, pages)
    engine.scheduler.predictor.costs.swaps = SwapCosts(0.0, 0.0, 0.0)
    preempted = 0
    for preempt_after in (None, 30):
        for found, wanted in zip(answers(engine, prompts, PARAMS, preempt_after), want, strict=True):
            preempted += found.sequence.num_preemptions
            assert found.tokens == wanted.tokens
            for one, other in zip(found.updates, wanted.updates, strict=True):
                assert one.logprobs is not None and other.logprobs is not None
                assert one.logprobs.chosen == pytest.approx(other.logprobs.chosen, abs=1e-4)
    assert preempted > 0 and engine.scheduler.prefixes.hits > 100


@pytest.mark.parametrize(
    ("variant", "pages"), [("gemma3_images", 34), pytest.param("gemma4_images", 34, marks=pytest.mark.full)]
)
def test_images_are_computed_as_a_whole(
    variant: str, pages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step and no hit splits an image; also with a host tier."""
    engine, prompt, images = started(tmp_path, variant, swap_space=0.01)
    begin, cut = engine.runner.begin, 0

    def watched(plan: StepPlan) -> PendingSample:
        nonlocal cut
        for span in plan.spans:
            if span.tokens is not None:
                whole, end = engine.scheduler.registry.by_number[span.seq].whole, span.start + span.length
                assert outside(whole, span.start) == span.start and outside(whole, end) == end
                cut += outside(whole, span.start + 16) != span.start + 16
        return begin(plan)

    monkeypatch.setattr(engine.runner, "begin", watched)
    shared(engine, mixture(prompt, images), pages)
    tier = engine.scheduler.blocks.tier
    assert cut and tier is not None and tier.fetched > 10


@pytest.mark.parametrize("variant", ["qwen3_vl", "qwen3_5", *FURTHER])
def test_images_with_positions_of_three_numbers(variant: str, tmp_path: Path) -> None:
    """Also with recurrent states."""
    engine, prompt, images = started(tmp_path, variant)
    shared(engine, mixture(prompt, images), 30)


@pytest.mark.full
@pytest.mark.parametrize("variant", ["gemma3_images", "gemma4_images"])
def test_equal_bits(variant: str, tmp_path: Path) -> None:
    """With batch_invariant: an image starts a new tile, whatever the steps hold and the cache has."""
    options = {"batch_invariant": True, "max_num_batched_tokens": 88}
    engine, prompt, images = started(tmp_path, variant, **options)
    prompts = mixture(prompt, images)
    together = answers(engine, prompts, PARAMS)
    again = answers(engine, prompts, PARAMS)
    assert engine.scheduler.prefixes.hits > 100
    for one, *found in zip(prompts, together, again, strict=True):
        engine.do(ResetPrefixCache())
        [alone] = answers(engine, [one], PARAMS)
        for other in found:
            assert [update.logprobs for update in alone.updates] == [one.logprobs for one in other.updates]


def test_a_step_must_hold_an_image(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgument, match="max_num_batched_tokens=30: must be at least 40: 8 rows, and the 25"
    ):
        started(tmp_path, "gemma3_images", max_num_batched_tokens=30)


def test_weight_updates(tmp_path: Path) -> None:
    """Of all parts; then of the language model alone, after which the encoder is the former. Images are
    encoded again by a new encoder, and nothing is compiled.
    """
    variant = "gemma3_images"
    engine, prompt, images = started(tmp_path / "one", variant, weight_updates=True)
    other, *_ = started(tmp_path / "two", variant, weight_updates=True)
    both, text = tensors(1, variant), tensors(2, variant)
    text = {name: array for name, array in text.items() if name.startswith("language_model.")}
    seen, pool = [answer(engine, prompt, images, PARAMS)], engine.scheduler.registry.images
    counted, encoded = compile_count(), pool.encoded
    for new in (both, text):
        engine.do(UpdateWeights(new))
        seen.append(answer(engine, prompt, images, PARAMS))
        assert pool.encoded == (encoded := encoded + len(images.parts) * (new is both))
    assert compile_count() == counted
    other.do(UpdateWeights({name: jax.device_put(array) for name, array in {**both, **text}.items()}))
    want = answer(other, prompt, images, PARAMS)
    chosen = [[one.logprobs.chosen for one in got.updates] for got in (*seen, want)]  # type: ignore[union-attr]
    assert chosen[2] == pytest.approx(chosen[3], abs=1e-4)
    for before, after in pairwise(chosen[:3]):
        assert np.abs(np.subtract(before, after)).max() > 1e-2
    some = {name: array for name, array in both.items() if "vision_tower" not in name}
    with pytest.raises(ModelError, match=r"vision_tower.*is missing"):
        engine.do(UpdateWeights(some))
    assert answer(engine, prompt, images, PARAMS).tokens == want.tokens
