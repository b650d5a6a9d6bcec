"""What the host packs is what the device reads, word for word."""

from __future__ import annotations

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jengine.execution.batch import Batch, BatchLayout
from jengine.execution.sampling_row import SAMPLING_WORDS, pack_sampling, sampling_of
from jengine.program_table import SamplerKey, TrunkKey
from jengine.request import MAX_STOP_TOKEN_IDS, SamplingParams
from jengine.scheduling.step_plan import SlotReset, StepPlan, Tile

WHOLE = st.integers(0, 2**31 - 1)
RESET = st.builds(
    SlotReset,
    slot=st.integers(1, 1000),
    params=st.builds(
        SamplingParams,
        temperature=st.one_of(st.just(0.0), st.floats(1e-30, 1e30)),
        top_k=st.integers(-1, 2**31 - 1),
        top_p=st.floats(1e-30, 1.0),
        min_p=st.one_of(st.just(0.0), st.floats(1e-30, 1.0)),
        max_tokens=st.none(),
        min_tokens=st.integers(0, 2**30),
    ),
    seed=st.integers(-(2**63), 2**64 - 1),
    sample_index=WHOLE,
    prompt_len=st.integers(1, 2**30),
    stop_token_ids=st.lists(WHOLE, max_size=MAX_STOP_TOKEN_IDS).map(tuple),
)


@given(RESET)
def test_sampling_words(reset: SlotReset) -> None:
    words = pack_sampling(reset)
    assert words.dtype == np.int32 and words.shape == (1 + SAMPLING_WORDS,) and words[0] == reset.slot
    got, params = jax.tree.map(np.asarray, sampling_of(words[None, 1:])), reset.params
    for name in ("temperature", "top_p", "min_p"):
        assert getattr(got, name).item() == np.float32(getattr(params, name))
    assert got.top_k.item() == max(params.top_k, 0)
    assert (int(got.seed_high.item()) << 32 | int(got.seed_low.item())) == reset.seed % 2**64
    assert got.sample_index.item() == reset.sample_index
    assert got.min_position.item() == min(reset.prompt_len + params.min_tokens, 2**31 - 1)
    padded = [*reset.stop_token_ids, *[-1] * (MAX_STOP_TOKEN_IDS - len(reset.stop_token_ids))]
    assert got.stop_ids.tolist() == [padded]


def test_values_beyond_32_bits_do_what_the_nearest_ones_do() -> None:
    def words(**params: float) -> list[int]:
        return pack_sampling(SlotReset(1, SamplingParams(max_tokens=None, **params), 0, 0, 5, ())).tolist()  # type: ignore[arg-type]

    assert words(top_k=2**32 + 1) == words(top_k=2**31 - 1)
    assert words(min_tokens=2**32) == words(min_tokens=2**31 - 1)
    assert words(temperature=1e300) == words(temperature=1e38)
    assert words(temperature=1e-300) == words(temperature=1e-45) != words(temperature=0.0)
    assert words(top_p=1e-300) == words(top_p=1e-45) != words(top_p=1.0)


@st.composite
def plans(draw: st.DrawFn) -> tuple[StepPlan, int, int]:
    """A plan that fills its program to any degree, the tile size, the page size."""
    key = TrunkKey(draw(st.sampled_from([8, 16])), draw(st.integers(0, 3)))
    tile_size, page_size = draw(st.sampled_from([16, 64])), draw(st.sampled_from([16, 64]))
    positions = draw(st.lists(st.tuples(WHOLE, WHOLE), max_size=key.rows))
    tile = st.builds(Tile, WHOLE, WHOLE, st.lists(WHOLE, min_size=1, max_size=tile_size), st.booleans())
    most = key.rows + key.tiles * (tile_size // page_size + 1)
    plan = StepPlan(
        trunk=key,
        sampler=SamplerKey(key.rows, "greedy"),
        row_slots=[slot for slot, _ in positions],
        row_positions=[position for _, position in positions],
        tiles=draw(st.lists(tile, max_size=key.tiles)),
        resets=draw(st.lists(RESET, max_size=key.tiles)),
        page_updates=draw(st.lists(st.tuples(WHOLE, WHOLE, WHOLE), max_size=most)),
    )
    return plan, tile_size, page_size


@given(plans())
def test_pack_and_unpack(case: tuple[StepPlan, int, int]) -> None:
    plan, tile_size, page_size = case
    layout = BatchLayout.of(plan.trunk, tile_size=tile_size, page_size=page_size)
    packed = layout.pack(plan)
    assert packed.dtype == np.int32 and packed.shape == (layout.size,)
    got = Batch(*(np.asarray(part).tolist() for part in layout.unpack(packed)))  # type: ignore[arg-type]

    def padded(values: list[object], like: object, length: int) -> list[object]:
        return values + [like] * (length - len(values))

    rows, tiles = plan.trunk.rows, plan.trunk.tiles
    assert got.row_slots == padded([*plan.row_slots], 0, rows)
    assert got.row_positions == padded([*plan.row_positions], 0, rows)
    assert got.tile_slots == padded([t.slot for t in plan.tiles], 0, tiles)
    assert got.tile_positions == padded([t.position for t in plan.tiles], 0, tiles)
    assert got.tile_lengths == padded([len(t.token_ids) for t in plan.tiles], 0, tiles)
    assert got.tile_samples == padded([int(t.samples) for t in plan.tiles], 0, tiles)
    assert got.tile_tokens == padded([padded([*t.token_ids], 0, tile_size) for t in plan.tiles], [0] * tile_size, tiles)
    assert got.page_updates == padded([[*update] for update in plan.page_updates], [0, 0, 0], len(got.page_updates))
    assert len(got.page_updates) == rows + tiles * (tile_size // page_size + 1)
    assert got.resets == padded([pack_sampling(reset).tolist() for reset in plan.resets], [0] * (1 + SAMPLING_WORDS), tiles)


def test_each_pack_has_a_buffer_of_its_own() -> None:
    """The last one may still be on its way to the device."""
    layout = BatchLayout.of(TrunkKey(8, 0), tile_size=16, page_size=16)
    plan = StepPlan(TrunkKey(8, 0), SamplerKey(8, "greedy"), row_slots=[3], row_positions=[4])
    first, second = layout.pack(plan), layout.pack(plan)
    assert not np.shares_memory(first, second)
