"""Images of families whose positions have three numbers (mrope), through the engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jengine.core.config import EngineConfig
from jengine.core.images import PromptImages
from jengine.core.request import MAX_LOGPROBS, Request, SamplingParams
from jengine.core.updates import PromptScores
from jengine.engine.engine import Engine
from jengine.engine.start import start_engine
from jengine.vision.folder import served_vision
from jengine.vision.images import with_images
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL, Answer, limit_pages
from tests.golden.pictures import PICTURES, pictures, text
from tests.golden.weights import VARIANTS, write_model

OPTIONS = {**SMALL, "max_model_len": 256, "image_pool_rows": 256, "tile_size": 16, "num_pages": 60}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=MAX_LOGPROBS)


def started(folder: Path, variant: str) -> tuple[Engine, list[int], PromptImages]:
    """An engine, and the recorded prompt."""
    write_model(folder, variant)
    (folder / "preprocessor_config.json").write_text(json.dumps(PICTURES[variant].processor))
    vision, config = served_vision(folder, lambda text: [0], 256), VARIANTS[variant]
    assert vision is not None
    images = pictures(variant)
    texts, ids = text(variant, len(images)), list[int]()
    for words in texts[:-1]:
        ids += [*words, config["vision_start_token_id"], vision.token, config["vision_end_token_id"]]
    prompt, placed = with_images(vision, [*ids, *texts[-1]], images, "image")
    assert placed is not None
    with on_demand():
        return start_engine(EngineConfig.of(str(folder), OPTIONS), progress=False)[0], prompt, placed


def answer(engine: Engine, prompt: list[int], images: PromptImages, params: SamplingParams) -> Answer:
    request = Request(request_id="0", prompt_token_ids=prompt, params=params, images=images)
    engine.limits.validate(request)
    [sequence] = engine.add(request)
    answer = Answer(sequence)
    while engine.has_work:
        for update in engine.step():
            if isinstance(update, PromptScores):
                answer.scores.append(update)
            else:
                answer.updates.append(update)  # type: ignore[arg-type]
        engine.scheduler.check_integrity()
    return answer


@pytest.mark.parametrize("variant", ["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.full)])
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


def test_preempted(tmp_path: Path) -> None:
    """Known tokens are computed again, in tiles and on rows."""
    engine, prompt, images = started(tmp_path, "qwen3_vl")
    want = answer(engine, prompt, images, PARAMS).tokens
    limit_pages(engine, 60)
    request = Request(request_id="0", prompt_token_ids=prompt, params=PARAMS, images=images)
    [sequence] = engine.add(request)
    tokens: list[int] = []
    while engine.has_work:
        tokens += [update.token for update in engine.step()]  # type: ignore[union-attr]
        if len(tokens) == 5 and not sequence.num_preemptions:
            engine.settle()
            engine.scheduler.preempt_all()
            engine.scheduler.blocks.reset()
    assert sequence.num_preemptions == 1 and sequence.tokens[len(prompt) :] == want
