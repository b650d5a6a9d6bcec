"""The suite's Llama in transformers, with random weights, a static cache and PyTorch's attention."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.gpu.llama import FULL, SMALL, Load
from benchmarks.gpu.rows import Row, attempt, reason, skipped

REPEATS = 3
OTHERS = ("architectures", "model_type", "dtype")  # fields of config.json that are not passed to LlamaConfig


def measure(small: bool) -> Iterator[Row]:
    """Yields rows of prefill and decode.

    Prefill is a forward pass with one row of logits. Decode is the difference between generating 1 + steps
    tokens and one.
    """
    size = SMALL if small else FULL
    try:
        peer = Peer(size, "cpu" if small else "cuda")
    except Exception as error:  # not installed, no GPU, or the configuration is rejected
        yield skipped("transformers", reason(error))
        return
    for prompt in (size.chunk, size.prompt):
        yield attempt(f"prefill, {size.chunk // prompt} x {prompt}", partial(peer.prefill, prompt), skipped)
    for batch in size.batches:
        yield attempt(
            f"decode, batch {batch}, context {size.prompt + size.steps // 2}",
            partial(peer.decode, batch),
            skipped,
        )


class Peer:
    """The model on its device."""

    def __init__(self, size: Load, device: str) -> None:
        import torch
        import transformers

        self._torch: Any = torch
        self._size, self._device = size, device
        fields = {name: value for name, value in size.config.items() if name not in OTHERS}
        config = transformers.LlamaConfig(**fields, attn_implementation="sdpa")
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(device):
            self._model: Any = transformers.LlamaForCausalLM(config).eval()

    def prefill(self, prompt: int) -> Row:
        ids = self._ids(self._size.chunk // prompt, prompt)
        seconds = self._seconds(lambda: self._model(ids, use_cache=False, logits_to_keep=1))
        return Row(
            f"prefill, {len(ids)} x {prompt}", {"ms": 1e3 * seconds, "tokens/s": self._size.chunk / seconds}
        )

    def decode(self, batch: int) -> Row:
        ids, tokens = self._ids(batch, self._size.prompt), self._size.steps
        short, long = (self._seconds(partial(self._generate, ids, count)) for count in (1, 1 + tokens))
        seconds = (long - short) / tokens
        return Row(
            f"decode, batch {batch}, context {self._size.prompt + tokens // 2}",
            {"ms": 1e3 * seconds, "tokens/s": batch / seconds},
        )

    def _ids(self, batch: int, tokens: int) -> Any:
        return self._torch.randint(2, self._size.config["vocab_size"], (batch, tokens), device=self._device)

    def _generate(self, ids: Any, tokens: int) -> Any:
        return self._model.generate(
            ids,
            attention_mask=self._torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            cache_implementation="static",
            pad_token_id=0,
        )

    def _seconds(self, call: Callable[[], Any]) -> float:
        """Median seconds of several calls, after a warm-up call."""
        took = []
        for _ in range(1 + REPEATS):
            start = time.perf_counter()
            with self._torch.inference_mode():
                call()
                if self._device == "cuda":
                    self._torch.cuda.synchronize()
            took.append(time.perf_counter() - start)
        return statistics.median(took[1:])
