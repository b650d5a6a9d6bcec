"""Every feature of the engine on this device, each compared with the same engine without it, or with a CPU.

Features that must not change a token are compared bit for bit, tokens and log probabilities, with
`batch_invariant=True`: drafts, cached pages, preemption, pages on the host, bursts, adapters of other rows.
A row counts how often the feature was used, and fails if it was not; drafts are verified whether they pay or
not. Where numbers differ (quantized weights and caches, other families, images), a CPU scores the same tokens
in float32.

The models are the demo and tiny ones with random weights, so a case takes seconds beside its compilation.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.answers import PROMPTS, computed_on_cpu, scores
from benchmarks.gpu.programs import missing_modules
from benchmarks.gpu.rows import FAILED, ROOT, Row, attempt, skipped

ENGINE: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 136,
    "page_size": 16,
    "num_pages": 200,
    "dtype": "bfloat16",
    "warm_up": "all",
    "progress": False,
}
EXACT: dict[str, Any] = {"batch_invariant": True}
PLAIN: dict[str, Any] = {**EXACT, "speculative_config": "none", "enable_prefix_caching": False}
DEMO = ROOT / "jengine" / "demo"
# wide enough for the kernels, unlike the configurations that tests compare with transformers
WIDE: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},  # recurrent states
    "deepseek_v3": {},  # a latent cache
    "gpt_oss": WIDE,  # experts, sinks, windows
    "qwen3_moe": WIDE,
}
IMAGES = "smolvlm", "idefics3"
IMAGES_EACH: dict[str, Any] = {"limit_mm_per_prompt": {"image": 2}, "max_model_len": 256}
QUANTIZED: dict[str, dict[str, Any]] = {
    "weights in int8": {"quantization": "int8"},
    "weights and inputs in int8": {"quantization": "w8a8"},
    "weights in fp8": {"quantization": "fp8"},
    "weights in int4": {"quantization": "int4"},
    "cache in fp8": {"kv_cache_dtype": "fp8"},
    "cache in int8": {"kv_cache_dtype": "int8"},
}
ALLOWED = {"weights in int4": 1.0}  # mean error of log probabilities
OTHERWISE = 0.15


@dataclass(frozen=True)
class Work:
    """Prompts, and how they are sampled.

    Attributes:
        tokens: of each answer.
    """

    prompts: list[Any]
    tokens: int

    def params(self, **changes: Any) -> Any:
        from jengine import SamplingParams

        options = {"temperature": 0.0, "max_tokens": self.tokens, "logprobs": 1, "ignore_eos": True}
        return SamplingParams(**{**options, **changes})

    def run(self, llm: Any, **changes: Any) -> list[tuple[list[int], list[float]]]:
        """Tokens and their log probabilities, greedy and sampled with a seed, by prompt."""
        lora = changes.pop("lora_request", None)
        ways = self.params(**changes), self.params(temperature=0.8, top_p=0.9, seed=5, **changes)
        outputs = [
            output
            for params in ways
            for output in llm.generate(self.prompts, params, use_tqdm=False, lora_request=lora)
        ]
        return [(list(o.outputs[0].token_ids), scores(o.outputs[0])) for o in outputs]


def measure(small: bool) -> Iterator[Row]:
    """Yields a row a feature. small: a few tokens, and the demo model alone."""
    missing = missing_modules()
    if missing is not None:
        yield skipped("jengine", missing)
        return
    work = Work(list(PROMPTS[:2] if small else PROMPTS), 8 if small else 48)
    with tempfile.TemporaryDirectory() as folder:
        yield from _of_the_demo(work, Path(folder), small)
        if small:
            return
        yield from _drafting(work, Path(folder))
        for name, options in QUANTIZED.items():
            yield attempt(name, partial(_near, name, "demo", options, work))
        for variant, changes in FAMILIES.items():
            yield attempt(variant, partial(_family, variant, changes, Path(folder)))
        for variant in IMAGES:
            case = f"images: {variant}"
            yield attempt(case, partial(_images, case, variant, Path(folder)))


def _of_the_demo(work: Work, folder: Path, small: bool) -> Iterator[Row]:
    """Two engines: one with every feature, and one with none, whose answers the first must give."""
    features: dict[str, Any] = {
        **EXACT,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "swap_space": 0.05,
        "num_pages": 22,  # so that sequences preempt each other
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 8,
        "embeddings": True,
        "weight_updates": True,
    }
    with ExitStack() as stack:
        engines: list[Any] = []

        def start(case: str, options: dict[str, Any]) -> Row:
            begin = time.perf_counter()
            engines.append(stack.enter_context(_started("demo", options)))
            return Row(case, {"s": time.perf_counter() - begin}, outcome="ok")

        yield attempt("demo: start", partial(start, "demo: start", {**PLAIN, "embeddings": True}))
        yield attempt("demo: start, all on", partial(start, "demo: start, all on", features))
        if len(engines) < 2:
            return
        plain, llm = engines
        _draft_always(llm)
        expected = work.run(plain)
        # several pages that all share, a text that repeats itself, and more pages in all than there are
        lines = "import os\nimport re\n" * 12
        many = Work([f"{lines}def f{i}(x):\n    return x\n" for i in range(8)], 24 if small else 96)
        # more than the cache holds: they come back from the host
        long = Work([f"import m{i}\n" * 40 for i in range(4)], 8)
        many_expected, long_expected = many.run(plain), long.run(plain)

        def same(case: str, used: Callable[[], float], work: Work, wanted: Any) -> Row:
            before = used()
            got = work.run(llm)
            return _equal(case, got, wanted, used() - before)

        def stat(name: str) -> Callable[[], float]:
            return lambda: float(llm.stats[name])

        def accepted() -> float:
            return float(sum(llm.engine.load.accepted_tokens))

        cases: dict[str, Callable[[str], Row]] = {
            "n-gram drafts": lambda case: same(case, accepted, many, many_expected),
            "prefix hits": lambda case: same(case, stat("prefix_cache_hits"), many, many_expected),
            "preemption": lambda case: same(case, stat("preemptions"), many, many_expected),
            "pages on the host": lambda case: same(case, stat("swapped_in_pages"), long, long_expected),
            "adapters beside others": lambda case: _adapters(case, llm, plain, work, folder),
            "structured output": lambda case: _structured(case, llm),
            "beams": lambda case: _beams(case, llm, plain),
            "embeddings": lambda case: _embeddings(case, llm, plain, work),
            "sleep": lambda case: _sleep(case, llm, work, expected),
            "new weights": lambda case: _weights(case, llm, work, expected),
            "profile of the device": lambda case: _profile(case, llm, many),
            "nothing compiled": lambda case: _nothing_compiled(case, llm),
        }
        for case, check in cases.items():
            yield attempt(case, partial(check, case))


def _started(model: str, options: dict[str, Any]) -> Any:
    from jengine import LLM

    llm = LLM(model, **{**ENGINE, **options})
    llm.wait_until_compiled()
    return llm


def _draft_always(llm: Any) -> None:
    """From now on, drafts are verified whether they pay or not."""
    from benchmarks.restart import restart_scheduler
    from jengine.scheduling.costs.draft_costs import all_of_them

    restart_scheduler(llm.engine, how_many_drafts=all_of_them)


def _equal(case: str, got: Any, wanted: Any, used: float) -> Row:
    """Bits must be equal, and the feature must have been used."""
    equal = sum(a == b for a, b in zip(got, wanted, strict=True))
    right = equal == len(wanted) and used > 0
    return Row(
        case, {"equal bits": f"{equal}/{len(wanted)}", "used": used}, outcome="ok" if right else FAILED
    )


def _adapters(case: str, llm: Any, plain: Any, work: Work, folder: Path) -> Row:
    """Two adapters and rows without one in a batch. Rows without have their bits; each adapter's answers are
    those that it gives alone.
    """
    from jengine import LoRARequest
    from tests.golden.loras import lora, write_lora

    config = json.loads((DEMO / "config.json").read_text())
    requests: list[Any] = [None]
    for i, name in enumerate(("a", "b"), 1):
        path = write_lora(folder / name, lora("llama_gqa", "plain", name, config))
        requests.append(LoRARequest(name, i, str(path)))
    alone = [work.run(llm, lora_request=[request] * len(work.prompts)) for request in requests]
    mixed = Work([prompt for prompt in work.prompts for _ in requests], work.tokens)
    together = mixed.run(llm, lora_request=requests * len(work.prompts))
    wanted = [answers[i] for i in range(len(alone[0])) for answers in alone]
    differing = sum(a != b for a, b in zip(alone[0], alone[1], strict=True))
    return _equal(case, together + alone[0], wanted + work.run(plain), differing)


def _structured(case: str, llm: Any) -> Row:
    from jengine import SamplingParams, StructuredOutputs

    pattern = r"[A-Z][a-z]{2,8} = [0-9]{1,4}"
    asked = {"structured_outputs": StructuredOutputs(regex=pattern), "max_tokens": 24, "temperature": 0.8}
    params = [SamplingParams(seed=seed, **asked) for seed in range(8)]
    texts = [o.outputs[0].text for o in llm.generate(["x = 1\n"] * 8, params, use_tqdm=False)]
    valid = sum(re.fullmatch(pattern, text) is not None for text in texts)
    return Row(case, {"valid": f"{valid}/8"}, outcome="ok" if valid == 8 else FAILED)


def _beams(case: str, llm: Any, plain: Any) -> Row:
    from jengine import BeamSearchParams

    params = BeamSearchParams(beam_width=4, max_tokens=12)
    got, wanted = (
        [
            ([*beam.tokens], [beam.cum_logprob])
            for beam in one.beam_search([{"prompt": PROMPTS[0]}], params)[0].sequences
        ]
        for one in (llm, plain)
    )
    return _equal(case, got, wanted, len(wanted))


def _embeddings(case: str, llm: Any, plain: Any, work: Work) -> Row:
    """Embeddings are the same in another batch and beside generation's programs."""
    together = [o.outputs.embedding for o in llm.embed(work.prompts, use_tqdm=False)]
    alone = [plain.embed(prompt, use_tqdm=False)[0].outputs.embedding for prompt in work.prompts]
    return _equal(case, [list(a) for a in together], [list(a) for a in alone], len(alone))


def _sleep(case: str, llm: Any, work: Work, wanted: Any) -> Row:
    llm.sleep(level=1)
    asleep = llm.is_sleeping()
    llm.wake_up()
    return _equal(case, work.run(llm), wanted, float(asleep))


def _weights(case: str, llm: Any, work: Work, wanted: Any) -> Row:
    """Other weights change the answers; the first ones bring them back. Neither compiles anything."""
    from safetensors.numpy import load_file

    tensors = load_file(DEMO / "model.safetensors")
    llm.update_weights({name: tensor * 0.5 if "mlp" in name else tensor for name, tensor in tensors.items()})
    other = work.run(llm)
    begin = time.perf_counter()
    llm.update_weights(tensors)
    seconds = time.perf_counter() - begin
    row = _equal(case, work.run(llm), wanted, sum(a != b for a, b in zip(other, wanted, strict=True)))
    return Row(case, {**row.values, "s": seconds}, outcome=row.outcome)


def _profile(case: str, llm: Any, work: Work) -> Row:
    """A capture by jax.profiler has the GPU's kernels, and its parts add up."""
    import jax

    from jengine.insight.profiling.capture import jax_trace
    from jengine.insight.profiling.device_trace import device_times, operations_of

    with tempfile.TemporaryDirectory() as scratch:
        trace, _ = jax_trace(Path(scratch), lambda: work.run(llm))
    figures = {"operations": float(len(operations_of(trace)))}
    right = figures["operations"] > 0.0
    if jax.default_backend() == "gpu":
        times = device_times(trace)[0]
        parts = times.computing + times.copying + times.launching + times.waiting
        right = times.kernels > 0 and abs(parts - times.seconds) < 1e-3 * times.seconds
        figures |= {
            "kernels": float(times.kernels),
            "idle": (times.launching + times.waiting) / times.seconds,
        }
    return Row(case, figures, outcome="ok" if right else FAILED)


def _nothing_compiled(case: str, llm: Any) -> Row:
    count = llm.stats["compiles_since_start"]
    return Row(case, {"compiled": count}, outcome=FAILED if count else "ok")


def _drafting(work: Work, folder: Path) -> Iterator[Row]:
    """Bursts, and the other ways to draft. Each has its own engine; drafts change no bit."""
    from tests.golden.heads import write_followers

    with _started("demo", PLAIN) as plain:
        expected = work.run(plain)
    yield attempt("bursts", partial(_bursts, work, expected))
    drafts = {"num_speculative_tokens": 3}
    for method, more in (("suffix", {}), ("draft_model", {"model": str(DEMO)})):
        case, config = f"drafts: {method}", {"method": method, **drafts, **more}
        yield attempt(case, partial(_drafts, case, "demo", config, work, expected))
    tokens = Work([{"prompt_token_ids": [*range(i, i + 20)]} for i in range(3)], 40)
    for method in ("mtp", "eagle3"):
        case, path = f"drafts: {method}", folder / method

        def with_head(case: str = case, path: Path = path, method: str = method) -> Row:
            config = write_followers(path, method)
            _add_tokenizer(path)
            with _started(str(path), PLAIN) as plain:
                wanted = tokens.run(plain)
            return _drafts(case, str(path), config, tokens, wanted)

        yield attempt(case, with_head)


def _bursts(work: Work, wanted: Any) -> Row:
    """Counts the tokens that are the same from the beginning, and times a stream. A burst is another program,
    so rounding may differ, and it gives no log probabilities: a request that asks for these takes single
    steps.
    """
    with _started("demo", {"speculative_config": "none", "num_scheduler_steps": 8}) as llm:
        outputs = llm.generate(work.prompts, work.params(logprobs=None), use_tqdm=False)
        used = sum(step.steps > 1 for step in llm.trace().steps)
        times = {
            "ms a token": _stream_ms(llm, work, None),
            "by single steps, with log probabilities": _stream_ms(llm, work, 1),
        }
    pairs = zip(outputs, wanted, strict=False)  # of which the first half is greedy
    same = [common(output.outputs[0].token_ids, tokens) for output, (tokens, _) in pairs]
    share = sum(same) / (len(same) * work.tokens)
    outcome = "ok" if used > 0 and share > 0.5 else FAILED
    return Row("bursts", {"used": used, "same tokens": share, **times}, outcome=outcome)


def _stream_ms(llm: Any, work: Work, logprobs: int | None) -> float:
    """Median milliseconds a token of one stream, its prompt included."""
    params, took = work.params(logprobs=logprobs), []
    for _ in range(5):
        start = time.perf_counter()
        llm.generate(work.prompts[:1], params, use_tqdm=False)
        took.append(time.perf_counter() - start)
    return 1e3 * statistics.median(took) / work.tokens


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))


def _drafts(case: str, model: str, config: dict[str, Any], work: Work, wanted: Any) -> Row:
    with _started(model, {**PLAIN, "speculative_config": config}) as llm:
        _draft_always(llm)
        got = work.run(llm) and work.run(llm)  # suffixes of earlier outputs, the second time
        load = llm.engine.load
        row = _equal(case, got, wanted, float(sum(load.accepted_tokens)))
        return Row(case, {**row.values, "drafted": load.draft_tokens}, outcome=row.outcome)


def _near(case: str, model: str, options: dict[str, Any], work: Work) -> Row:
    """Log probabilities of answers against those that a CPU gives the same tokens in float32, and bits alone
    and together.
    """
    with _started(model, {**PLAIN, **options}) as llm:
        outputs = llm.generate(work.prompts, work.params(), use_tqdm=False)
        alone = [llm.generate(prompt, work.params(), use_tqdm=False)[0] for prompt in work.prompts]
    answers = [output.outputs[0] for output in outputs]
    order = {
        "model": model,
        "prompts": [output.prompt_token_ids for output in outputs],
        "completions": [answer.token_ids for answer in answers],
    }
    truth = computed_on_cpu("benchmarks.gpu.features", order)
    return _judged(case, answers, [output.outputs[0] for output in alone], truth)


def _judged(case: str, answers: Sequence[Any], alone: Sequence[Any], truth: list[list[float]]) -> Row:
    bits = sum(scores(a) == scores(b) for a, b in zip(answers, alone, strict=True))
    errors = np.abs(np.concatenate([np.subtract(scores(a), b) for a, b in zip(answers, truth, strict=True)]))
    right = errors.mean() <= ALLOWED.get(case, OTHERWISE) and bits == len(answers)  # NaN is not
    values = {
        "mean error": float(errors.mean()),
        "worst": float(errors.max()),
        "equal bits": f"{bits}/{len(answers)}",
    }
    return Row(case, values, outcome="ok" if right else FAILED)


def _family(variant: str, changes: dict[str, Any], folder: Path) -> Row:
    from tests.golden.weights import write_model

    path = folder / variant
    write_model(path, variant, **changes)
    _add_tokenizer(path)
    draw = np.random.default_rng(1)
    prompts = [{"prompt_token_ids": draw.integers(0, 64, length).tolist()} for length in (3, 40, 100, 150)]
    return _near(variant, str(path), {"max_model_len": 192}, Work(prompts, 24))


def _add_tokenizer(folder: Path) -> None:
    """A word for each token id."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = json.loads((folder / "config.json").read_text())
    size = config.get("text_config", config)["vocab_size"]
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(size)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def _images(case: str, variant: str, folder: Path) -> Row:
    """Each prompt's first token."""
    from tests.golden.images import write_image_model

    path = folder / variant
    write_image_model(path, variant)
    with _started(str(path), {**PLAIN, **IMAGES_EACH}) as llm:
        together, alone = _seen(llm, variant), [_seen(llm, variant, i)[0] for i in range(2)]
    order = {"model": str(path), "images": variant, "completions": [a.token_ids for a in together]}
    return _judged(case, together, alone, computed_on_cpu("benchmarks.gpu.features", order))


def _seen(llm: Any, variant: str, only: int | None = None) -> list[Any]:
    """First tokens after prompts with images, and the best ten."""
    from jengine import SamplingParams
    from tests.golden.images import CASES, pictures

    prompts = [
        {"prompt": CASES[i].text, "multi_modal_data": {"image": pictures(variant, i)}}
        for i in ((0, 1) if only is None else (only,))
    ]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=10)
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def _score(file: Path) -> None:
    """Replaces the file's order by log probabilities."""
    order = json.loads(file.read_text())
    few = IMAGES_EACH if "images" in order else {}
    limit = json.loads((Path(order["model"]) / "config.json").read_text()) if order["model"] != "demo" else {}
    length = min(ENGINE["max_model_len"], limit.get("max_position_embeddings", ENGINE["max_model_len"]))
    with _started(order["model"], {"dtype": "float32", "max_model_len": length, **few}) as llm:
        if "images" in order:
            answers = _seen(llm, order["images"])
            found = [
                [a.logprobs[0][tokens[0]].logprob]
                for a, tokens in zip(answers, order["completions"], strict=True)
            ]
        else:
            found = llm.score_tokens(order["prompts"], order["completions"])
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    _score(Path(sys.argv[1]))
