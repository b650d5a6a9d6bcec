"""Use of the cache's pages, without a model: bytes per sequence, and reserved but unused slots. Parts of
sharing.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jengine.core.request import Request, SamplingParams
from jengine.execution.kv_cache import SHARED, page_bytes
from jengine.models import build
from jengine.models.config import ModelConfig
from jengine.scheduling.pages.block_table import NO_HIT
from jengine.scheduling.pages.blocks import BlockManager
from jengine.scheduling.shape import CacheShape
from jengine.table.program_table import ProgramTable
from tests.schedulers import make_scheduler

DTYPE = np.dtype("bfloat16")
TILE_SIZE = 64
LENGTH = 8192  # tokens of the sequence whose cache is counted


def _shape(
    name: str, layers: int, kv_heads: int, head_dim: int, window: int, every: int
) -> tuple[str, ModelConfig]:
    """Each `every`-th layer attends to all tokens, the others have a window."""
    windows = tuple(None if (i + 1) % every == 0 else window for i in range(layers))
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "max_position": LENGTH}
    return name, ModelConfig(
        family="mistral",
        num_layers=layers,
        num_heads=kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        windows=windows,
        **sizes,
    )


SHAPES = [
    _shape("Gemma 3 1B", 26, 1, 256, 512, 6),
    _shape("Gemma 3 4B", 34, 4, 256, 1024, 6),
    _shape("Gemma 2 2B", 26, 4, 256, 4096, 2),
    _shape("Mistral 7B v0.1", 32, 8, 128, 4096, 1000),
]


def bytes_at_8k(page_size: int) -> dict[str, Any]:
    """Megabytes of cache for a sequence of 8,192 tokens: if every layer keeps all tokens, and actually,
    prefilled in tiles and by rows.

    Reports the maximum over time, and the value at its end.
    """
    found = {}
    for name, model in SHAPES:
        groups = build(model, DTYPE, LENGTH).groups
        one = page_bytes(groups, SHARED, page_size, DTYPE, 1)
        every_layer = (
            -(-LENGTH // page_size)
            * page_size
            * 2
            * model.num_layers
            * model.num_kv_heads
            * model.head_dim
            * DTYPE.itemsize
        )
        held = {}
        for how, step in (("prefill", TILE_SIZE), ("decode", 1)):
            most, last = _stepped([group.window for group in groups], page_size, step)
            held[how] = {"most_mb": round(most * one / 1e6, 1), "end_mb": round(last * one / 1e6, 1)}
        before, after = every_layer / 1e6, max(held[how]["most_mb"] for how in held)
        found[name] = {
            "groups": [
                f"{f'window[{group.window}]' if group.window else 'full'}: {len(group.layers)} layers"
                for group in groups
            ],
            "every_layer_keeps_all_mb": round(before, 1),
            **held,
            "ratio": round(after / before, 3),
        }
    return found


def _stepped(groups: Sequence[int | None], page_size: int, step: int) -> tuple[int, int]:
    """Pages of one sequence, maximum and at its end, if it computes `step` tokens at a time."""
    pages = 1 + len(groups) * -(-LENGTH // page_size)
    blocks = BlockManager(CacheShape(page_size=page_size, num_pages=pages, windows=groups))
    blocks.admit(0, NO_HIT, step, None)
    most = 0
    for start in range(0, LENGTH, step):
        blocks.pass_windows(0, start)
        blocks.grow(0, start + step)
        most = max(most, blocks.owned)
    blocks.check_integrity()
    return most, blocks.owned


LENGTHS = {  # tokens of prompt and output, uniform
    "short: 16-64 in, 16-64 out": ((16, 64), (16, 64)),
    "chat: 16-512 in, 16-256 out": ((16, 512), (16, 256)),
    "documents: 1k-8k in, 64-512 out": ((1024, 8192), (64, 512)),
}


def unused_slots(requests: int, max_num_seqs: int) -> dict[str, Any]:
    """Share of slots in owned pages that hold no token, averaged over all steps. Every page has one owner.

    `waiting for prefill`: slots of admitted prompts that are about to be computed. `last pages`: others, in
    the last page of each sequence. `whole length`: all of them, if each sequence reserved the maximum length
    from its start.
    """
    return {
        f"{name}, pages of {page_size}": _unused(prompts, outputs, page_size, requests, max_num_seqs)
        for name, (prompts, outputs) in LENGTHS.items()
        for page_size in (16, 64)
    }


def _unused(
    prompts: tuple[int, int], outputs: tuple[int, int], page_size: int, requests: int, max_num_seqs: int
) -> dict[str, float]:
    rng = np.random.default_rng(0)
    longest = prompts[1] + outputs[1]
    budget = max(512, max_num_seqs + TILE_SIZE)
    scheduler = make_scheduler(
        ProgramTable.build(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, tile_size=TILE_SIZE),
        page_size=page_size,
        num_pages=1 + max_num_seqs * -(-longest // page_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=longest,
    )
    for i in range(requests):
        prompt, output = (
            int(rng.integers(*prompts, endpoint=True)),
            int(rng.integers(*outputs, endpoint=True)),
        )
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        scheduler.add(
            Request(request_id=str(i), prompt_token_ids=[2] * prompt, params=params), seed=0, eos_token_ids=()
        )
    reserved = used = known = running = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        reserved += scheduler.blocks.owned * page_size
        sequences = [scheduler.registry.by_number.get(number) for number in scheduler.blocks.numbers]
        used += sum(sequence.num_computed for sequence in sequences if sequence is not None)
        known += sum(
            max(len(sequence.tokens), sequence.num_computed) for sequence in sequences if sequence is not None
        )
        running += len(sequences)
        scheduler.collect(plan, [[2] for _ in plan.samples])
    return {
        "waiting for prefill": round((known - used) / reserved, 4),
        "last pages": round((reserved - known) / reserved, 4),
        "whole length": round(1 - used / (running * longest), 4),
    }
