"""The device unpacks exactly what the host packs."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jengine.core.request import DEVICE_STOPS, SamplingParams
from jengine.execution.attention import TokenAxis
from jengine.execution.batch import Batch, BatchLayout
from jengine.execution.sampling_row import SAMPLING_WORDS, pack_sampling, sampling_of
from jengine.execution.slots import SlotState, pack_updates, update_slots
from jengine.scheduling.step_plan import Sample, SlotReset, Span, StepPlan
from jengine.table.program_table import ProgramTable, SamplerKey, TrunkKey

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
    stop_token_ids=st.lists(WHOLE, max_size=DEVICE_STOPS).map(tuple),
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
    padded = [*reset.stop_token_ids, *[-1] * (DEVICE_STOPS - len(reset.stop_token_ids))]
    assert got.stop_ids.tolist() == [padded]


def test_values_beyond_32_bits_do_what_the_nearest_ones_do() -> None:
    def words(**params: float) -> list[int]:
        return pack_sampling(SlotReset(1, SamplingParams(max_tokens=None, **params), 0, 0, 5, ())).tolist()  # type: ignore[arg-type]

    assert words(top_k=2**32 + 1) == words(top_k=2**31 - 1)
    assert words(min_tokens=2**32) == words(min_tokens=2**31 - 1)
    assert words(temperature=1e300) == words(temperature=1e38)
    assert words(temperature=1e-300) == words(temperature=1e-45) != words(temperature=0.0)
    assert words(top_p=1e-300) == words(top_p=1e-45) != words(top_p=1.0)


TABLES = st.builds(
    ProgramTable,
    row_buckets=st.just((8, 16)),
    mixed_row_buckets=st.just((8, 16)),
    tile_buckets=st.just((1, 2, 3)),
    tile_size=st.sampled_from([16, 64]),
)


def turned(length: int) -> st.SearchStrategy[dict[str, Any]]:
    """Fields of a span with positions of three numbers, or of text."""
    turns = st.none() | st.just(np.arange(3 * length).reshape(length, 3) - 100)
    return st.fixed_dictionaries({"turns": turns, "after": st.integers(-9, 0)})


@st.composite
def plans(draw: st.DrawFn) -> tuple[StepPlan, BatchLayout]:
    """A plan that fills its program to any degree, and the program's layout."""
    table, ids = draw(TABLES), st.lists(WHOLE, min_size=1, max_size=150)
    spans, room = list[Span](), 16
    for more in draw(st.lists(st.lists(WHOLE, max_size=4), max_size=16)):
        if (room := room - 1 - len(more)) >= 0:
            first = draw(WHOLE) if more else draw(st.integers(-1, 5))
            start = draw(st.integers(0, 2**30))
            spans.append(Span(draw(WHOLE), draw(WHOLE), start, 1 + len(more), known=first,
                              following=more or None, **draw(turned(1 + len(more)))))  # fmt: skip
    for tokens in draw(st.lists(ids, max_size=3)):
        where = draw(WHOLE), draw(WHOLE), draw(st.integers(0, 2**30))
        ahead = draw(st.none() | st.just(np.arange(len(tokens))[::-1]))
        span = Span(*where, len(tokens), tokens, ahead=ahead, **draw(turned(len(tokens))))
        if len(table.place([*spans, span]).tiles) <= table.max_tiles:
            spans.append(span)
    placement, samples = table.place(spans), []
    for _ in range(draw(st.integers(0, 16)) if spans else 0):
        span = draw(st.integers(0, len(spans) - 1))
        samples.append(Sample(span, draw(st.integers(0, spans[span].length - 1)), draw(WHOLE), draw(WHOLE)))
    trunk = table.trunk(placement.rows, len(placement.tiles), samples=len(samples))
    layout = BatchLayout.of(
        trunk,
        table,
        page_size=draw(st.sampled_from([16, 64])),
        groups=draw(st.integers(1, 3)),
        turns=draw(st.booleans()),
        ahead=draw(st.booleans()),
    )
    plan = StepPlan(
        trunk=trunk,
        sampler=table.sampler(trunk, "greedy"),
        spans=spans,
        samples=samples,
        resets=draw(st.lists(RESET, max_size=6)),
        table=draw(st.lists(st.tuples(WHOLE, WHOLE, WHOLE, WHOLE), max_size=150)),
    )
    return plan, layout


def turns_of(span: Span) -> list[list[int]]:
    return [[span.after] * 3] * span.length if span.turns is None else span.turns.tolist()


@given(plans())
def test_pack_and_unpack(case: tuple[StepPlan, BatchLayout]) -> None:
    plan, layout = case
    packed = layout.pack(plan)
    assert packed.dtype == np.int32 and packed.shape == (layout.size,)
    got = Batch(*(np.asarray(part).tolist() for part in layout.unpack(packed)))  # type: ignore[arg-type]

    def padded(values: list[object], like: object, length: int) -> list[object]:
        return values + [like] * (length - len(values))

    key, size = plan.trunk, layout.table.tile_size
    on_rows = [span for span in plan.spans if span.tokens is None]
    rows = [span for span in on_rows for _ in range(span.length)]
    assert got.row_slots == padded([span.slot for span in rows], 0, key.rows)
    positions = [at for span in on_rows for at in range(span.start, span.start + span.length)]
    assert got.row_positions == padded([*positions], 0, key.rows)
    tokens = [token for span in on_rows for token in (span.known, *(span.following or []))]
    assert got.row_tokens == padded([*tokens], 0, key.rows)
    tiles = [
        (span, at, span.tokens[at : at + size])
        for span in plan.spans[len(on_rows) :]
        for at in range(0, span.length, size)
    ]  # type: ignore[index]
    assert got.tile_slots == padded([span.slot for span, _, _ in tiles], 0, key.tiles)
    assert got.tile_positions == padded([span.start + at for span, at, _ in tiles], 0, key.tiles)
    assert got.tile_lengths == padded([len(tokens) for _, _, tokens in tiles], 0, key.tiles)
    assert got.tile_tokens == padded(
        [padded([*tokens], 0, size) for _, _, tokens in tiles], [0] * size, key.tiles
    )
    if any(layout.shapes[Batch._fields.index(name)][0] for name in ("row_turns", "tile_turns")):
        wanted = [[*turn, span.after] for span in on_rows for turn in turns_of(span)]
        assert got.row_turns == padded(wanted, [0] * 4, key.rows)
        by_tile = [padded(turns_of(span)[at : at + size], [0] * 3, size) for span, at, _ in tiles]
        assert got.tile_turns == padded(by_tile, [[0] * 3] * size, key.tiles)
    else:
        assert got.row_turns == got.tile_turns == []
    if got.tile_ahead:
        aheads = [[0] * size if span.ahead is None else span.ahead[at : at + size] for span, at, _ in tiles]
        assert got.tile_ahead == padded([padded([*one], 0, size) for one in aheads], [0] * size, key.tiles)
    axis = [*rows, *[None] * (key.rows - len(rows))]  # of each place, the span that is there
    axis += [span for span, _, tokens in tiles for _ in padded([*tokens], 0, size)]
    begins = [next(i for i, other in enumerate(axis) if other is span) for span in plan.spans]
    where = [begins[sample.span] + sample.offset for sample in plan.samples]
    assert got.sample_tokens == padded([*where], 0, layout.table.sample_rows(key))
    assert got.sample_slots == padded(
        [sample.slot for sample in plan.samples], 0, layout.table.sample_rows(key)
    )
    entries, resets = layout.rest(plan)
    inside = plan.table[: len(plan.table) - len(entries)]
    assert got.table == padded([[*entry] for entry in inside], [0] * 4, len(got.table)) and (
        not entries or len(inside) == len(got.table)
    )
    packed_resets = [pack_sampling(reset).tolist() for reset in plan.resets]
    assert got.resets == padded(
        packed_resets[: len(plan.resets) - len(resets)], [0] * (1 + SAMPLING_WORDS), key.tiles
    )
    assert not resets or len(plan.resets) - len(resets) == key.tiles


@given(
    st.lists(st.tuples(*[st.integers(1, 9)] * 4), unique_by=lambda entry: entry[:3], max_size=1200),
    st.integers(0, 40),
)
def test_what_a_batch_has_no_room_for_changes_slots_by_itself(
    entries: list[tuple[int, int, int, int]], count: int
) -> None:
    resets = [SlotReset(slot, SamplingParams(top_k=slot), slot, 0, 5, ()) for slot in range(1, count + 1)]
    slots = SlotState(
        np.zeros((50, 2)), np.zeros((10, 50, 10), np.int32), np.zeros((50, SAMPLING_WORDS), np.int32)
    )  # type: ignore[arg-type]
    for packed in pack_updates(entries, resets):
        slots = jax.jit(update_slots)(slots, packed)
    table, sampling = np.array(slots.block_table), np.array(slots.sampling)
    for group, slot, index, page in entries:
        assert table[group, slot, index] == page
        table[group, slot, index] = 0
    assert not table.any()
    for reset in resets:
        assert (sampling[reset.slot] == pack_sampling(reset)[1:]).all()
    assert not sampling[count + 1 :].any() and not sampling[0].any()


def test_a_row_takes_both_token_and_position_from_its_slot_or_neither() -> None:
    layout = BatchLayout.of(TrunkKey(8, 1), ProgramTable((8,), (8,), (1,), 16), page_size=16, groups=1)
    spans = [Span(1, 2, 99), Span(2, 1, 7, known=5), Span(3, 3, 9, known=0), Span(4, 4, 40, 2, [8, 9])]
    last = np.array([[70, 71], [10, 11], [20, 21], [30, 31], [40, 41]], np.int32)
    axis = TokenAxis(last, layout.unpack(layout.pack(StepPlan(layout.key, SamplerKey(8, "greedy"), spans))))  # type: ignore[arg-type]
    assert axis.tokens.tolist() == [20, 5, 0, *[0] * 5, 8, 9, *[0] * 14]
    assert axis.positions.tolist() == [21, 7, 9, *[0] * 5, *range(40, 56)]


def test_rows_and_tiles_rotate_with_positions_of_three_numbers() -> None:
    """A row that takes its position from its slot, too, and what an image's tokens see behind them."""
    layout = BatchLayout.of(
        TrunkKey(8, 1), ProgramTable((8,), (8,), (1,), 16), page_size=16, groups=1, turns=True, ahead=True
    )
    image = np.array([[-1, 0, 1], [-1, 1, 0]])
    spans = [
        Span(1, 2, 99, after=-3),
        Span(2, 1, 7, 2, known=5, following=[6], turns=image, after=-4),
        Span(4, 4, 40, 3, [8, 9, 9], turns=np.array([[0, 0, 0], *image.tolist()]), ahead=np.array([0, 1, 0])),
    ]
    last = np.array([[0, 0], [10, 11], [20, 21], [30, 31], [40, 41]], np.int32)
    axis = TokenAxis(last, layout.unpack(layout.pack(StepPlan(layout.key, SamplerKey(8, "greedy"), spans))))  # type: ignore[arg-type]
    assert axis.positions[:3].tolist() == [21, 7, 8]
    assert axis.rotary[:, :3].tolist() == [[18, 6, 7], [18, 7, 9], [18, 8, 8]]
    assert axis.rotary[:, 8:12].tolist() == [[40, 40, 41, 43], [40, 41, 43, 43], [40, 42, 42, 43]]
    assert axis.until is not None and axis.until[0, :4].tolist() == [40, 42, 42, 43]


def test_each_pack_has_a_buffer_of_its_own() -> None:
    """The previous one may still be in transfer to the device."""
    table = ProgramTable((8,), (8,), (1,), 16)
    layout = BatchLayout.of(TrunkKey(8, 0), table, page_size=16, groups=1)
    plan = StepPlan(TrunkKey(8, 0), SamplerKey(8, "greedy"), [Span(3, 3, 4)])
    first, second = layout.pack(plan), layout.pack(plan)
    assert not np.shares_memory(first, second)
