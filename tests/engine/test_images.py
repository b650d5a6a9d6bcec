"""Images in prompts, compared with transformers, and through chunks, preemptions and the prefix cache."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jengine import LLM
from jengine.base.errors import InvalidArgument
from jengine.core.config import EngineConfig
from jengine.core.images import PromptImages
from jengine.core.request import MAX_LOGPROBS, Request, SamplingParams
from jengine.engine.loop.engine import Engine
from jengine.engine.operations import ResetPrefixCache
from jengine.engine.start import start_engine
from jengine.execution.runner import PendingSample
from jengine.scheduling.step_plan import StepPlan
from jengine.text.tokenizer import Tokenizer
from jengine.vision.folder import vision_of
from jengine.vision.reader import with_images
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL, Answer, Estimates, limit_pages
from tests.golden.images import CASES, picture, pictures, write_image_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=MAX_LOGPROBS)
OPTIONS = {**SMALL, "max_model_len": 256, "image_pool_rows": 256}
Prompt = tuple[list[int], PromptImages | None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("smolvlm")
    write_image_model(folder, "smolvlm")
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    with on_demand():
        engine = start_engine(EngineConfig.of(str(folder), OPTIONS), progress=False)[0]
    engine.scheduler.predictor.costs = Estimates(engine.scheduler.table)
    return engine


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parents[1] / "golden" / "smolvlm_with_images.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def prompts(folder: Path, recorded: dict[str, np.ndarray]) -> list[Prompt]:
    tokenizer = Tokenizer.load(folder)
    vision = vision_of(folder, lambda text: tokenizer.encode(text, add_special_tokens=False))
    assert vision is not None
    texts = [tokenizer.encode(str(recorded[f"text_{case}"])) for case in range(len(CASES))]
    return [with_images(vision, ids, pictures("smolvlm", case), "image") for case, ids in enumerate(texts)]


def run(engine: Engine, prompts: list[Prompt], params: SamplingParams = GREEDY) -> list[Answer]:
    answers = {}
    for number, (ids, images) in enumerate(prompts):
        request = Request(request_id=str(number), prompt_token_ids=list(ids), params=params, images=images)
        engine.limits.validate(request)
        for sequence in engine.add(request):
            answers[sequence.request_id] = Answer(sequence)
    while engine.has_work:
        for update in engine.step():
            answers[update.request_id].updates.append(update)
        engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.owned == 0
    return [*answers.values()]


def check(answers: list[Answer], recorded: dict[str, np.ndarray]) -> None:
    for case, answer in enumerate(answers):
        assert answer.tokens == recorded[f"tokens_{case}"].tolist()
        logits = recorded[f"logits_{case}"].astype(np.float64)
        logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        for update, wanted in zip(answer.updates, logprobs, strict=True):
            for token, value in update.logprobs.top:
                assert abs(value - wanted[token]) < 1e-4


def test_as_transformers(
    engine: Engine,
    prompts: list[Prompt],
    recorded: dict[str, np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Together, then from the cache, preempted, and one after the other: always the recorded tokens."""
    starts, begin = list[tuple[int, int]](), engine.runner.begin

    def watched(plan: StepPlan) -> PendingSample:
        starts.extend((span.seq, span.start) for span in plan.spans if span.tokens is not None)
        return begin(plan)

    monkeypatch.setattr(engine.runner, "begin", watched)
    images, each = engine.scheduler.registry.images, [len(one.parts) for _, one in prompts if one is not None]
    check(run(engine, prompts), recorded)
    assert images.encoded == sum(each)
    inside = [{*one.positions} for _, one in prompts if one is not None]
    assert any({at - 1, at} <= inside[number] for number, at in starts), "no chunk began inside an image"
    again = run(engine, prompts)
    check(again, recorded)
    assert images.encoded == sum(each), "an image was encoded twice"
    assert all(
        answer.sequence.num_cached >= len(ids) - 17 for answer, (ids, _) in zip(again, prompts, strict=True)
    )
    engine.do(ResetPrefixCache())
    before = engine.scheduler.registry.num_preemptions
    limit_pages(engine, 22)
    starts.clear()
    check(run(engine, prompts), recorded)
    assert engine.scheduler.registry.num_preemptions > before
    limit_pages(engine, 120)
    for case, prompt in enumerate(prompts):
        [answer] = run(engine, [prompt])
        assert answer.tokens == recorded[f"tokens_{case}"].tolist()
    assert engine.compiles_since_start == 0


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    with on_demand():
        return LLM(folder, progress=False, **OPTIONS)


def test_prompts_and_conversations(llm: LLM, recorded: dict[str, np.ndarray], tmp_path: Path) -> None:
    """Every form in which an image may be given becomes the recorded prompt and tokens."""
    [one], text = pictures("smolvlm", 0), str(recorded["text_0"])
    file, buffer = tmp_path / "one.png", io.BytesIO()
    one.save(file)
    one.save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    prompts = [
        {"prompt": text, "multi_modal_data": {"image": form}} for form in (one, [file], str(file), url)
    ]
    for output in llm.generate(prompts, GREEDY, use_tqdm=False):
        assert output.prompt_token_ids == recorded["prompt_0"].tolist()
        assert output.outputs[0].token_ids == recorded["tokens_0"].tolist()
    words = text.removeprefix("<image>")
    parts = (
        {"type": "image_url", "image_url": {"url": url, "detail": "auto"}},
        {"type": "image", "image": buffer.getvalue()},
        {"type": "image_pil", "image_pil": one},
    )
    wanted = llm.chat_prompt(
        [{"role": "user", "content": [{"type": "image", "image": one}, {"type": "text", "text": words}]}]
    )
    assert wanted["prompt"] == f"user:{text}assistant:"
    inside = recorded["prompt_0"].tolist()
    assert inside == wanted["prompt_token_ids"][5 : 5 + len(inside)]
    answers = llm.chat(
        [[{"role": "user", "content": [part, {"type": "text", "text": words}]}] for part in parts],
        GREEDY,
        use_tqdm=False,
    )
    assert {tuple(answer.prompt_token_ids) for answer in answers} == {tuple(wanted["prompt_token_ids"])}
    assert len({tuple(answer.outputs[0].token_ids) for answer in answers}) == 1
    assert llm.engine.scheduler.registry.images.encoded == 4, (
        "one image in many conversations is encoded once"
    )
    assert llm.stats["compiles_since_start"] == 0


def test_text_alone(folder: Path) -> None:
    """With a limit of 0, nothing of images is loaded or compiled, and images are refused by name."""
    with on_demand():
        llm = LLM(folder, progress=False, limit_mm_per_prompt={"image": 0}, **SMALL, max_model_len=256)
    spec = llm.engine.runner.spec
    assert spec.images is None and not spec.table.encoders and "images" not in spec.identity()
    assert llm.generate("hello", SamplingParams(max_tokens=3), use_tqdm=False)[0].finished
    prompt = {"prompt": "<image>", "multi_modal_data": {"image": picture("a", (9, 9))}}
    with pytest.raises(InvalidArgument, match=r"multi_modal_data.image=.*reads no images"):
        llm.generate(prompt, use_tqdm=False)


def test_refused_prompts(llm: LLM) -> None:
    small = picture("a", (9, 9))
    for prompt, field in (
        ({"prompt": "none", "multi_modal_data": {"image": small}}, "multi_modal_data.image=.*0 places"),
        (
            {"prompt": "<image>", "multi_modal_data": {"image": [small] * 2}},
            "multi_modal_data.image=.*1 place",
        ),
        ({"prompt": "a", "multi_modal_data": {"audio": [1]}}, "multi_modal_data.audio=.*only images"),
        (
            {"prompt": "<image>", "multi_modal_data": {"image": [b"no"]}},
            r"multi_modal_data.image\[0\]=.*whole file",
        ),
        (
            {"prompt": "<image>" * 9, "multi_modal_data": {"image": [picture("b", (99, 99))] * 9}},
            "image=.*at most image_pool_rows = 256",
        ),
    ):
        with pytest.raises(InvalidArgument, match=field):
            llm.generate(prompt, use_tqdm=False)
    with pytest.raises(InvalidArgument, match="image_pool_rows=5: must be at least 9"):
        LLM(llm.model, image_pool_rows=5)
    with pytest.raises(InvalidArgument, match=r"limit_mm_per_prompt.video=1: must be 0"):
        LLM(llm.model, limit_mm_per_prompt={"video": 1})


@pytest.mark.full
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_five_hundred_images_compile_nothing(folder: Path, batch_invariant: bool) -> None:
    """Random sizes among text requests, in an engine that starts as any: no compilation after the start. With
    batch_invariant, another order changes no bit.
    """
    rng = np.random.default_rng(0)
    how = {"tile_size": 16, "batch_invariant": True} if batch_invariant else {}
    llm = LLM(folder, progress=False, **{**OPTIONS, **how})
    sizes = [(int(w), int(h)) for w, h in rng.integers(1, 150, (520, 2)) if max(w, h) < 40 * min(w, h)][:500]
    prompts: list[Any] = []
    for number, size in enumerate(sizes):
        image = picture(str(number), size)
        prompts.append({"prompt": f"{number}<image>?", "multi_modal_data": {"image": image}})
        prompts.append(f"text {number}" * int(rng.integers(1, 5)))
    params = replace(GREEDY, max_tokens=6)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert len(sizes) == 500 and all(len(output.outputs[0].token_ids) == 6 for output in outputs)
    llm.engine.do(ResetPrefixCache())
    order = rng.permutation(len(prompts))[: len(prompts) if batch_invariant else 40]
    for number, output in zip(
        order, llm.generate([prompts[at] for at in order], params, use_tqdm=False), strict=True
    ):
        one, other = output.outputs[0], outputs[number].outputs[0]
        assert one.token_ids == other.token_ids
        assert not batch_invariant or one.logprobs == other.logprobs
    assert llm.stats["compiles_since_start"] == 0
    llm.engine.scheduler.check_integrity()


@pytest.mark.full
def test_equal_bits(folder: Path, prompts: list[Prompt]) -> None:
    """With batch_invariant, alone and together."""
    options = {**OPTIONS, "tile_size": 16, "batch_invariant": True}
    with on_demand(optimized=True):
        engine = start_engine(EngineConfig.of(str(folder), options), progress=False)[0]
    together = run(engine, prompts)
    for prompt, answer in zip(prompts, together, strict=True):
        engine.do(ResetPrefixCache())
        [alone] = run(engine, [prompt])
        assert [update.logprobs for update in alone.updates] == [update.logprobs for update in answer.updates]


@pytest.mark.full
def test_idefics3(tmp_path: Path) -> None:
    """Frames without tiles, whose embeddings are blocks of nine patches."""
    write_image_model(tmp_path, "idefics3")
    with np.load(Path(__file__).parents[1] / "golden" / "idefics3_with_images.npz") as file:
        recorded = dict(file)
    with on_demand():
        llm = LLM(tmp_path, progress=False, **OPTIONS)
    prompts: list[Any] = [
        {"prompt": str(recorded[f"text_{case}"]), "multi_modal_data": {"image": pictures("idefics3", case)}}
        for case in range(len(CASES))
    ]
    for case, output in enumerate(llm.generate(prompts, GREEDY, use_tqdm=False)):
        assert output.prompt_token_ids == recorded[f"prompt_{case}"].tolist()
        assert output.outputs[0].token_ids == recorded[f"tokens_{case}"].tolist()
        logits = recorded[f"logits_{case}"].astype(np.float64)
        for found, row in zip(output.outputs[0].logprobs or [], logits, strict=True):
            wanted = row - np.logaddexp.reduce(row)
            assert all(abs(one.logprob - wanted[token]) < 1e-4 for token, one in found.items())
