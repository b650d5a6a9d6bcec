"""Prompts given as embeddings, and prompts whose tokens see each other (prefix-LM)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jengine import LLM, Forward, Tokenizer
from jengine.api.prompts import make_requests
from jengine.base.errors import InvalidArgument, ModelError, PromptTooLong
from jengine.checkpoints.hugging_face import model_config
from jengine.core.beam_params import BeamSearchParams
from jengine.core.config import EngineConfig
from jengine.core.pooling import PoolingParams
from jengine.core.request import SamplingParams
from jengine.engine.loop.engine import Engine
from jengine.engine.operations import ResetPrefixCache
from jengine.engine.setup.shapes import describe
from jengine.engine.start import start_engine
from jengine.models import FAMILIES, Family, register
from jengine.models.llama import Llama, read_llama
from jengine.parallel.mesh import make_mesh
from jengine.vision.folder import vision_of
from jengine.vision.prompt_embeddings import PromptEmbeddings
from jengine.vision.reader import with_images
from tests.engine.loras import load
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL, Answer, limit_pages
from tests.golden.images import pictures, write_image_model
from tests.golden.loras import lora
from tests.golden.weights import VARIANTS, weights, write_model
from tests.text.conftest import byte_level

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=5)
OPTIONS = {**SMALL, "max_model_len": 192, "speculative_config": "none"}  # drafts follow the ids
TOKENIZER = Tokenizer(byte_level())
TABLES = {"gpt2": "transformer.wte.weight"}
SCALES = {"gemma": 8.0}  # the square root of the hidden size
Bits = list[tuple[int, Any]]


def engine_of(folder: Path, variant: str, changes: dict[str, Any] | None = None, **options: Any) -> Engine:
    write_model(folder, variant)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **(changes or {})}))
    config = EngineConfig.of(str(folder), {**OPTIONS, "enable_prompt_embeds": True, **options})
    with on_demand():
        return start_engine(config, progress=False)[0]


def table(variant: str) -> np.ndarray:
    """The vectors that the first layer reads of each token."""
    name = TABLES.get(variant, "model.embed_tokens.weight")
    return weights(variant)[name] * np.float32(SCALES.get(variant, 1.0))


def run(engine: Engine, prompts: list[Any], params: Any = GREEDY, **more: Any) -> list[Answer]:
    """Runs requests together. Returns the answers in order."""
    answers: dict[str, Answer] = {}
    for number, prompt in enumerate(prompts):
        requests = make_requests(TOKENIZER, prompt, params, str(number))
        requests = [dataclasses.replace(request, **more) for request in requests]
        engine.limits.validate(requests[0])
        for sequence in engine.add(*requests):
            answers[sequence.request_id] = Answer(sequence)
    while engine.has_work:
        for update in engine.step():
            answers[update.request_id].updates.append(update)  # type: ignore[arg-type]
        engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.owned == 0 and engine.compiles_since_start == 0
    return [*answers.values()]


def bits(answer: Answer) -> Bits:
    return [(update.token, update.logprobs) for update in answer.updates]


def ids_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 60, length).tolist()


@pytest.mark.parametrize("variant", ["llama_gqa", "gpt2", "gemma", "qwen2_5_vl", "qwen3_next"])
def test_embeddings_of_ids_give_what_the_ids_do(variant: str, tmp_path: Path) -> None:
    """To the bit, whole and in parts, with and without the prefix cache. The engine takes no images."""
    engine, rows, ids = engine_of(tmp_path, variant), table(variant), ids_of(75)
    [expected] = run(engine, [ids])
    forms: list[Any] = [
        rows[ids],
        [rows[ids[:33]], rows[ids[33:]]],
        [rows[ids[:20]], ids[20:50], rows[ids[50:]]],
    ]
    for form in forms:
        [answer] = run(engine, [{"prompt_embeds": form}])
        assert answer.sequence.num_cached == 0
        assert bits(answer) == bits(expected)
        [again] = run(engine, [{"prompt_embeds": form}])
        assert again.sequence.num_cached == 64
        assert again.tokens == expected.tokens


@pytest.fixture(scope="module")
def invariant(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder: Path = tmp_path_factory.mktemp("model")
    options = {"batch_invariant": True, "max_model_len": 512, "image_pool_rows": 600, "num_pages": 160}
    return engine_of(folder, "llama_gqa", {"max_position_embeddings": 512}, **options)


def test_batches_and_preemption_change_no_bit(invariant: Engine) -> None:
    rows = table("llama_gqa")
    prompts: list[Any] = [ids_of(length, length) for length in (20, 40, 64, 90)]
    prompts += [{"prompt_embeds": 1.5 * rows[ids_of(length, length)]} for length in (19, 70, 128, 300)]
    invariant.do(ResetPrefixCache())
    alone = [bits(run(invariant, [prompt])[0]) for prompt in prompts]
    invariant.do(ResetPrefixCache())
    assert [bits(answer) for answer in run(invariant, prompts)] == alone
    limit_pages(invariant, 30)
    long = dataclasses.replace(GREEDY, max_tokens=40)
    together = run(invariant, prompts[:7], long)
    assert invariant.scheduler.registry.num_preemptions
    assert [bits(answer)[:10] for answer in together] == alone[:7]
    limit_pages(invariant, 160)


def test_pages_are_found_by_the_bytes_of_embeddings(invariant: Engine) -> None:
    rows = 0.5 * table("llama_gqa")[ids_of(300)]

    def cached(array: np.ndarray, salt: str | None = None) -> int:
        [answer] = run(invariant, [{"prompt_embeds": array, "cache_salt": salt}])
        return answer.sequence.num_cached

    assert cached(rows) == 0
    assert cached(rows) == 256
    assert cached(rows.astype(np.float64).astype(np.float32)) == 256
    assert cached(rows, "salt") == 0
    other = rows.copy()
    other[280] *= -1
    assert cached(other) == 256  # the first 256 are a part, with the same bytes
    other[0, 0] = np.nextafter(other[0, 0], np.float32(1))
    assert cached(other) == 0
    assert cached(rows[:200]) == 0  # another part
    half = rows[:200].astype(ml_dtypes.bfloat16)
    assert cached(half) == 0
    assert cached(half.astype(np.float32)) == 192


def test_samples_and_an_adapter(tmp_path: Path) -> None:
    options = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    engine, ids = engine_of(tmp_path, "llama_gqa", **options), ids_of(40)
    load(engine, "adapter", lora("llama_gqa", "adapter"))
    rows = table("llama_gqa")[ids]
    [plain], [adapted] = run(engine, [ids]), run(engine, [ids], lora_name="adapter")
    [answer] = run(engine, [{"prompt_embeds": rows}], lora_name="adapter")
    assert bits(answer) == bits(adapted) != bits(plain)
    sampled = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=6, ignore_eos=True, logprobs=1)
    answers = run(engine, [{"prompt_embeds": rows}, {"prompt_embeds": [rows[:20], rows[20:]]}], sampled)
    each = [bits(answer) for answer in answers]
    assert each[:3] == each[3:] and len({str(one) for one in each}) == 3


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tmp_path_factory.mktemp("model")
    write_model(folder, "llama_gqa")
    byte_level().save(str(folder / "tokenizer.json"))
    with on_demand():
        return LLM(folder, progress=False, enable_prompt_embeds=True, image_pool_rows=256, **OPTIONS)


def test_llm_takes_embeddings(llm: LLM) -> None:
    ids, rows = ids_of(30), jnp.asarray(table("llama_gqa"))
    params = dataclasses.replace(GREEDY, detokenize=False)
    given = rows[jnp.asarray(ids)]
    prompts: list[Any] = [ids, {"prompt_embeds": given}, {"prompt_embeds": [given[:9], ids[9:]]}]
    expected, answer, mixed = llm.generate(prompts, params)
    assert answer.outputs[0].token_ids == mixed.outputs[0].token_ids == expected.outputs[0].token_ids
    assert answer.prompt is None and answer.prompt_token_ids == [0] * 30
    assert mixed.prompt_token_ids == [0] * 9 + ids[9:]
    beams = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    expected, answer = llm.beam_search(prompts[:2], beams)
    found = [[(beam.tokens[30:], beam.cum_logprob) for beam in one.sequences] for one in (expected, answer)]
    assert found[0] == found[1] and len(found[0]) == 3


ROWS = np.ones((4, 64), np.float32)


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        (ROWS.astype(np.float64), {}, r"prompt_embeds='float64\[4, 64\]': must be .* of float32, bfloat"),
        (ROWS[0], {}, r"prompt_embeds='float32\[64\]': must be \[tokens, hidden size\]"),
        (ROWS[:0], {}, r"prompt_embeds='float32\[0, 64\]': .* at least 1 token"),
        (ROWS[:, :63], {}, r"prompt_embeds='\[4, 63\]': must have shape \[tokens, 64\]: 64 is the model's"),
        (np.where(np.eye(4, 64), np.float32("nan"), ROWS)[1:], {}, "prompt_embeds='row 0': must be finite"),
        ("text", {}, "prompt_embeds='str': must be a float array, or a list of token ids"),
        ([ROWS, 3], {}, r"prompt_embeds\[1\]='int': must be a float array"),
        ([ROWS, [96]], {}, r"prompt_token_ids=96: ids must be in \[0, 96\)"),
        ([], {}, "prompt=.*must not be empty"),
        (np.ones((192, 64), np.float32), {}, "192 tokens; at most max_model_len - 1 = 191"),
        (ROWS, {"prompt_logprobs": 1}, "prompt_embeds='4 embeddings': no prompt_logprobs and no rep"),
        (ROWS, {"repetition_penalty": 1.1}, "prompt_embeds='4 embeddings': .* embeddings have no token ids"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(llm: LLM, prompt: Any, changes: dict[str, Any], message: str) -> None:
    params = SamplingParams(max_tokens=4, **changes)
    with pytest.raises(InvalidArgument, match=message):
        llm.generate({"prompt_embeds": prompt}, params, use_tqdm=False)


def test_options_and_models_that_do_not_work_are_named(tmp_path: Path, llm: LLM) -> None:
    def spec_of(variant: str, **options: Any) -> Any:
        fixed = {**OPTIONS, "enable_prompt_embeds": True, "dtype": "float32"}
        config = EngineConfig.of("m", {**fixed, **options})
        model = model_config(VARIANTS[variant])
        return describe(config, model, make_mesh(1), tmp_path, vision=PromptEmbeddings(model.hidden_size))

    assert spec_of("llama_gqa").images.rows == 256
    with pytest.raises(InvalidArgument, match="enable_prompt_embeds=True: must be False: Gemma3n does not"):
        spec_of("gemma3n_text")
    with pytest.raises(InvalidArgument, match="image_pool_rows=16: must be at least 256"):
        spec_of("llama_gqa", image_pool_rows=16)
    with pytest.raises(InvalidArgument, match=r"limit_mm_per_prompt=.*with enable_prompt_embeds"):
        EngineConfig(model="m", enable_prompt_embeds=True, limit_mm_per_prompt={"image": 2})
    [request] = make_requests(TOKENIZER, {"prompt_embeds": ROWS}, None, "0")
    limits = llm.engine.limits
    with pytest.raises(InvalidArgument, match=r"prompt_embeds=.*needs an engine with enable_prompt_embeds"):
        dataclasses.replace(limits, embedding_size=0).validate(request)
    pooled = dataclasses.replace(request, pooling=PoolingParams())
    with pytest.raises(InvalidArgument, match=r"prompt_embeds=.*not in a request for an embedding"):
        limits.validate(pooled)


# --- prefix-LM


@pytest.fixture
def prefix(families: None, tmp_path: Path) -> Iterator[Path]:
    """The folder of a Llama whose prompts' tokens see each other."""
    register("prefix", Family("Prefix-LM", Llama, lambda fields: {**read_llama(fields), "prefix_lm": True}))
    yield tmp_path / "prefix"


def prefix_engine(folder: Path, **options: Any) -> Engine:
    return engine_of(folder, "llama_gqa", {"model_type": "prefix"}, max_num_batched_tokens=200, **options)


@partial(jax.jit, static_argnames=("prompt",))
def reference(tensors: dict[str, jax.Array], x: jax.Array, prompt: int) -> jax.Array:
    """Logits of a Llama in plain JAX: [tokens, hidden] of which the first `prompt` see each other."""

    def norm(x: jax.Array, name: str) -> jax.Array:
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * tensors[f"{name}.weight"]

    def product(x: jax.Array, name: str) -> jax.Array:
        return jnp.matmul(x, tensors[f"{name}.weight"].T, precision="highest")

    count, heads, dim = len(x), 8, 8
    at = jnp.arange(count)
    angles = at[:, None] * 10000.0 ** (-jnp.arange(0, dim, 2) / dim)
    cos, sin = (jnp.tile(part(angles), 2)[:, None] for part in (jnp.cos, jnp.sin))

    def rotated(x: jax.Array) -> jax.Array:
        return x * cos + jnp.concatenate([-x[..., dim // 2 :], x[..., : dim // 2]], -1) * sin

    seen = (at[None] <= at[:, None]) | (at[None] < prompt)
    for layer in range(2):
        name = f"model.layers.{layer}"
        y = norm(x, f"{name}.input_layernorm")
        q, k, v = (product(y, f"{name}.self_attn.{kind}_proj").reshape(count, -1, dim) for kind in "qkv")
        q, k = rotated(q), jnp.repeat(rotated(k), heads // k.shape[1], 1)
        v = jnp.repeat(v, heads // v.shape[1], 1)
        scores = jnp.einsum("qhd,khd->hqk", q, k, precision="highest") * dim**-0.5
        weight = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
        y = jnp.einsum("hqk,khd->qhd", weight, v, precision="highest").reshape(count, -1)
        x = x + product(y, f"{name}.self_attn.o_proj")
        y = norm(x, f"{name}.post_attention_layernorm")
        y = jax.nn.silu(product(y, f"{name}.mlp.gate_proj")) * product(y, f"{name}.mlp.up_proj")
        x = x + product(y, f"{name}.mlp.down_proj")
    return product(norm(x, "model.norm"), "lm_head")


def largest_difference(answer: Answer, x: np.ndarray, prompt: int) -> float:
    """Between an answer's log probabilities and the reference's, over all of its tokens."""
    tensors = {name: jnp.asarray(array) for name, array in weights("llama_gqa").items()}
    tokens = answer.tokens
    rows = np.concatenate([x, np.asarray(tensors["model.embed_tokens.weight"])[tokens[:-1]]])
    wanted = jax.nn.log_softmax(reference(tensors, jnp.asarray(rows), prompt))[len(x) - 1 :]
    assert tokens == np.argmax(wanted, -1).tolist() if prompt else True
    return max(
        abs(value - float(wanted[i, token]))
        for i, update in enumerate(answer.updates)
        for token, value in update.logprobs.top
    )


@pytest.mark.parametrize("form", ["llvm", "xla"])
def test_a_prefix_lm_gives_what_plain_jax_does(
    form: str, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of one and several tiles, as ids and as embeddings; together, and preempted."""
    if form == "xla":
        for module in ("pallas_kernels.devices", "jengine.execution.spec", "jengine.engine.setup.shapes"):
            monkeypatch.setattr(f"{module}.cpu_refused", lambda: "XLA's form is wanted")
    engine, rows, lengths = prefix_engine(prefix), table("llama_gqa"), (5, 16, 64, 70, 128)
    assert (engine.runner.spec.identity()["kernels"] == "llvm") == (form == "llvm")
    prompts: list[Any] = [ids_of(length, length) for length in lengths]
    found = run(engine, prompts)
    for ids, answer in zip(prompts, found, strict=True):
        assert largest_difference(answer, rows[ids], len(ids)) < 5e-5
        assert largest_difference(answer, rows[ids], 0) > 1e-2
    scaled: list[Any] = [{"prompt_embeds": 1.5 * rows[ids]} for ids in prompts]
    for ids, answer in zip(prompts, run(engine, scaled), strict=True):
        assert largest_difference(answer, 1.5 * rows[ids], len(ids)) < 5e-5
    mixed = {"prompt_embeds": [1.5 * rows[prompts[3][:40]], prompts[3][40:]]}
    x = np.concatenate([1.5 * rows[prompts[3][:40]], rows[prompts[3][40:]]])
    [answer] = run(engine, [mixed])
    assert largest_difference(answer, x, 70) < 5e-5
    limit_pages(engine, 20)
    long = dataclasses.replace(GREEDY, max_tokens=40)
    for ids, answer in zip(prompts, run(engine, prompts, long), strict=True):
        assert largest_difference(answer, rows[ids], len(ids)) < 5e-5
    assert engine.scheduler.registry.num_preemptions


def test_images_and_text_of_a_prefix_lm_see_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt with an image gives what its ids and the rows of the image's encoder do, as embeddings."""
    family = FAMILIES["smolvlm"]
    write_image_model(tmp_path, "smolvlm")

    def start(prefix: bool, **more: Any) -> Engine:
        def read(fields: Any) -> dict[str, Any]:
            return {**family.read(fields), "prefix_lm": prefix}

        monkeypatch.setitem(FAMILIES, "smolvlm", dataclasses.replace(family, read=read))
        options = {**OPTIONS, "max_num_batched_tokens": 264, "image_pool_rows": 256, "dtype": "float32"}
        with on_demand():
            return start_engine(EngineConfig.of(str(tmp_path), {**options, **more}), progress=False)[0]

    tokenizer = Tokenizer.load(tmp_path)
    vision = vision_of(tmp_path, lambda text: tokenizer.encode(text, add_special_tokens=False))
    assert vision is not None
    ids, images = with_images(vision, tokenizer.encode("<image>What is it?"), pictures("smolvlm", 0), "image")
    assert images is not None
    prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}
    [causal], engine = run(start(False), [prompt]), start(True)
    [answer] = run(engine, [prompt])
    pool = np.asarray(engine.runner.worker.state.pool)  # type: ignore[union-attr]
    rows = {key: held.rows for (_, key), held in engine.scheduler.registry.images._parts.items()}
    parts, at = list[Any](), 0
    for part, (begin, end) in zip(images.parts, images.ranges, strict=True):
        parts += [ids[at:begin], pool[rows[part.key]]]
        at = end
    [given] = run(start(True, enable_prompt_embeds=True), [{"prompt_embeds": [*parts, ids[at:]]}])
    assert given.tokens == answer.tokens
    found = [[value for update in of.updates for _, value in update.logprobs.top] for of in (given, answer)]
    np.testing.assert_allclose(*found, atol=5e-5)
    assert abs(causal.updates[0].logprobs.chosen - answer.updates[0].logprobs.chosen) > 1e-2


def test_prompts_of_a_prefix_lm_share_no_pages_of_others(prefix: Path) -> None:
    """A prompt that another one begins with has other keys and values. Equal prompts share them."""
    engine, rows, ids = prefix_engine(prefix), table("llama_gqa"), ids_of(64)
    [first] = run(engine, [ids], dataclasses.replace(GREEDY, max_tokens=40))
    for more in (first.tokens[:1], first.tokens[:16], first.tokens[:33]):
        longer = [*ids, *more]
        [answer] = run(engine, [longer])
        assert answer.sequence.num_cached == 0
        assert largest_difference(answer, rows[longer], len(longer)) < 5e-5
    sampled = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=6, ignore_eos=True, logprobs=2)
    assert [answer.sequence.num_cached for answer in run(engine, [ids], sampled)] == [48, 64, 64]
    for prompt in (ids_of(128), {"prompt_embeds": [1.5 * rows[ids], ids]}):
        x = np.concatenate([1.5 * rows[ids], rows[ids]]) if isinstance(prompt, dict) else rows[prompt]
        for cached in (0, 112):
            [answer] = run(engine, [prompt])
            assert answer.sequence.num_cached == cached
            assert largest_difference(answer, x, 128) < 5e-5


def test_batches_change_no_bit_of_a_prefix_lm(prefix: Path) -> None:
    engine = prefix_engine(prefix, batch_invariant=True)
    prompts: list[Any] = [ids_of(length, length) for length in (5, 33, 64, 90, 128)]
    alone = [bits(run(engine, [prompt])[0]) for prompt in prompts]
    answers = run(engine, prompts)
    assert [answer.sequence.num_cached for answer in answers] == [0, 0, 0, 64, 64]
    assert [bits(answer) for answer in answers] == alone
    limit_pages(engine, 20)
    long = dataclasses.replace(GREEDY, max_tokens=40)
    assert [bits(answer)[:10] for answer in run(engine, prompts, long)] == alone
    assert engine.scheduler.registry.num_preemptions


def test_what_a_prefix_lm_cannot_do_is_named(prefix: Path) -> None:
    engine = prefix_engine(prefix)
    for prompt, params, error, message in (
        (ids_of(129 + 63), GREEDY, PromptTooLong, "max_model_len - 1"),
        (ids_of(20), SamplingParams(prompt_logprobs=1), InvalidArgument, "prompt_logprobs=1: must be None"),
    ):
        with pytest.raises(error, match=message):
            run(engine, [prompt], params)
    with pytest.raises(ModelError, match="the tokens of a prompt see each other"):
        Forward(prefix)

    def spec_of(config: Any, **options: Any) -> Any:
        chosen = EngineConfig.of("m", {**OPTIONS, "dtype": "float32", **options})
        return describe(chosen, config, make_mesh(1), prefix)

    config = model_config({**VARIANTS["llama_gqa"], "model_type": "prefix"})
    assert spec_of(config).table.whole_tiles == 2
    with pytest.raises(InvalidArgument, match="pipeline_parallel_size=2: not with prefix, a prefix-LM"):
        spec_of(config, pipeline_parallel_size=2)
    for variant in ("bloom", "deepseek_v2", "qwen3_next"):
        other = dataclasses.replace(model_config(VARIANTS[variant]), prefix_lm=True)
        with pytest.raises(ModelError, match="prefix_lm does not work with latent attention, recurrent stat"):
            spec_of(other)
