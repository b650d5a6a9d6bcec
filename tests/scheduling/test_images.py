"""The pool of embeddings: who may start, what is encoded, and whose rows make way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jengine.core.images import CONTENT, ImagePart, PromptImages
from jengine.scheduling.requests.images import Images
from tests.scheduling.embedding_memory import FIRST, with_images
from tests.scheduling.strict_device import Loop

VOCAB = 1000
BUCKETS = 8, 16


def part(key: int, rows: int) -> ImagePart:
    return ImagePart(
        key, np.zeros((4 * rows, 3), np.float32), np.zeros((4 * rows, 1), np.int32), rows, (1, rows)
    )


class Asked:
    """What the pool reads of a sequence."""

    cache_salt: str | None = None

    def __init__(self, images: PromptImages | None, tokens: list[int]) -> None:
        self.images, self.tokens, self.request = images, tokens, self


def sequence(*parts: ImagePart) -> Any:
    """A prompt with one token before each part."""
    positions, at = [], 0
    for one in parts:
        positions += range(at + 1, at + 1 + one.rows)
        at += 1 + one.rows
    images = PromptImages(tuple(parts), positions) if parts else None
    return Asked(images, [*range(at + 1)])


def prepare(images: Images, *waiting: Any, cached: int = 0, briefly: bool = False) -> Any:
    images.prepare(waiting, lambda one: cached, BUCKETS, briefly=briefly)
    return images.take_encoding()


def test_a_prompt_waits_until_its_parts_are_encoded() -> None:
    images, one = Images(8, VOCAB), sequence(part(1, 2), part(2, 2), part(3, 2))
    images.came(one)
    first = prepare(images, one)
    assert (first.bucket, [p.key for p, _ in first.parts]) == (16, [1, 2]) and not images.may_start(one)
    second = prepare(images, one)
    assert (second.bucket, [p.key for p, _ in second.parts]) == (8, [3]) and images.may_start(one)
    assert images.may_start(sequence()), "text waits for no image"
    assert images.hold(one, 0)
    ids = [VOCAB + row for _, rows in (*first.parts, *second.parts) for row in rows]
    assert images.inputs(one, 0, 10) == [0, *ids[:2], 3, *ids[2:4], 6, *ids[4:], 9]
    assert images.inputs(one, 2, 5) == [ids[1], 3, ids[2]]
    assert one.images.keyed(one.tokens)[:4] == [0, CONTENT + 1, CONTENT + 2, 3]
    images.forget(one)
    assert prepare(images, one) is None and images.may_start(one) and images.encoded == 3
    one.cache_salt = "another"
    assert prepare(images, one) is not None, "times reveal nothing of other clients' images"


def test_others_that_decode_wait_for_one_part_at_most() -> None:
    images, one = Images(8, VOCAB), sequence(part(1, 2), part(2, 2))
    images.came(one)
    assert prepare(images, one, briefly=True).bucket == 8 and not images.may_start(one)


def test_cached_tokens_need_no_embeddings() -> None:
    images, one = Images(4, VOCAB), sequence(part(1, 2), part(2, 2))
    images.came(one)
    assert [p.key for p, _ in prepare(images, one, cached=4).parts] == [2]
    assert images.may_start(one) and images.hold(one, 4)
    assert images.inputs(one, 0, 3) == [0, VOCAB - VOCAB, 0], "what is cached is not read"
    images.forget(one)
    assert not images.hold(one, 0), "the pages were evicted meanwhile"
    assert not images.may_start(one)


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(1, 6), max_size=3)), max_size=30))
def test_rows_have_one_owner(steps: list[tuple[int, list[int]]]) -> None:
    """Requests come, start, and end in any order. The first one that waits can always start at last."""
    images, waiting, running = Images(6, VOCAB), list[Any](), list[Any]()
    for action, keys in steps:
        if action == 0:
            waiting.append(sequence(*[part(100 * key, 1 + key % 2) for key in keys]))
            images.came(waiting[-1])
        elif action == 1 and running:
            images.forget(running.pop(0))
        prepare(images, *waiting)
        for one in [one for one in waiting if images.may_start(one)][: action + 1]:
            assert images.hold(one, 0)
            waiting.remove(one)
            running.append(one)
        images.check_integrity()
    for one in running:
        images.forget(one)
    while waiting:
        for _ in range(3):
            prepare(images, *waiting)
        assert images.may_start(waiting[0])
        assert images.hold(waiting[0], 0)
        images.forget(waiting.pop(0))
        images.check_integrity()


def test_embeddings_of_another_encoder_are_forgotten() -> None:
    """A running sequence keeps those that it holds, until it gives them up."""
    images, one, other = Images(4, VOCAB), sequence(part(1, 2)), sequence(part(1, 2))
    images.came(one)
    prepare(images, one)
    assert images.hold(one, 0)
    ids = images.inputs(one, 1, 3)
    images.reset()
    images.check_integrity()
    again = prepare(images, other)
    assert again is not None and images.hold(other, 0)
    assert {*images.inputs(other, 1, 3)}.isdisjoint(ids)
    for done in (one, other):
        images.forget(done)
        images.check_integrity()
    images.reset()
    assert sorted(images._free) == [*range(4)]


def test_waiting_prompts_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until pages become findable or stop being so."""
    loop = Loop(max_model_len=64, tile_size=8, page_size=4, num_pages=200, max_num_seqs=2,
                max_num_batched_tokens=32, prefix_caching=True, images=Images(8, FIRST))  # fmt: skip
    for number in range(10):
        prompt, images = with_images([*range(12), number], [(12, 1, 4)])
        loop.add(prompt, max_tokens=30, ignore_eos=True, targets={"images": images})
    for _ in range(4):
        loop.step(1)
    blocks, looked_up = loop.scheduler.blocks, list[int]()
    match = blocks.match
    monkeypatch.setattr(blocks, "match", lambda *of: looked_up.append(1) or match(*of))
    before = blocks.version
    for _ in range(8):
        loop.step(1)
    assert blocks.version == before and len(loop.scheduler.registry.waiting) == 8
    assert len(looked_up) <= 8
    loop.drain(1)
