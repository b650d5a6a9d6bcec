"""The same Llama in transformers, with random weights, a static cache and PyTorch's attention."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.rows import Row, reason, skipped
from tools.make_model import COMMON, SHAPES

BATCHES, PROMPT, TOKENS, CHUNK = (1, 32, 256), 1024, 64, 8192  # as in engine.py
REPEATS = 3


def measure() -> Iterator[Row]:
    """Decoding is the time of so many tokens more than one; a prompt's is that of a forward pass with one row of logits."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        import torch
        import transformers
    except ImportError as error:
        yield skipped("transformers", reason(error))
        return
    if not torch.cuda.is_available():
        yield skipped("transformers", "torch sees no GPU")
        return
    transformers.logging.set_verbosity_error()
    try:
        model = make(torch, transformers)
    except Exception as error:  # this version's: whatever it has against the configuration
        yield skipped("transformers", reason(error))
        return
    with torch.inference_mode():
        for sequences, prompt in ((1, CHUNK), (CHUNK // PROMPT, PROMPT)):
            seconds = typical(torch, lambda ids: model(ids, use_cache=False, logits_to_keep=1), random_ids(torch, model, sequences, prompt))
            yield Row(f"prefill, {sequences} x {prompt}", {"ms": 1e3 * seconds, "tokens/s": CHUNK / seconds})
        for batch in BATCHES:
            case = f"decode, batch {batch}, context {PROMPT + TOKENS // 2}"
            ids = random_ids(torch, model, batch, PROMPT)
            try:
                short, long = (typical(torch, lambda ids, n=n: generate(model, ids, n), ids) for n in (1, 1 + TOKENS))
            except Exception as error:  # out of memory, or no compiler: this batch's alone
                yield skipped(case, reason(error))
                continue
            seconds = (long - short) / TOKENS
            yield Row(case, {"ms": 1e3 * seconds, "tokens/s": batch / seconds})


def make(torch: Any, transformers: Any) -> Any:
    fields = {name: value for name, value in (COMMON | SHAPES["8b"]).items() if name not in ("architectures", "model_type", "dtype")}
    config = transformers.LlamaConfig(**fields, attn_implementation="sdpa")
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config)
    return model.eval()


def random_ids(torch: Any, model: Any, batch: int, tokens: int) -> Any:
    return torch.randint(2, model.config.vocab_size, (batch, tokens), device="cuda")


def generate(model: Any, ids: Any, tokens: int) -> Any:
    return model.generate(
        ids,
        attention_mask=ids.new_ones(ids.shape),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        cache_implementation="static",
        pad_token_id=0,
    )


def typical(torch: Any, call: Any, ids: Any) -> float:
    """The median of a few, after one that compiles."""
    took = []
    for _ in range(1 + REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call(ids)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return statistics.median(took[1:])
