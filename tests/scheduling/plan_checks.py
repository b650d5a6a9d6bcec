"""What the strict device requires of every plan before it runs it."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import TYPE_CHECKING

from jengine.scheduling.step_plan import Span, StepPlan
from jengine.table.program_table import VARIANTS, SamplerKey, ScoreKey

if TYPE_CHECKING:
    from tests.scheduling.strict_device import StrictDevice


def check_plan(device: StrictDevice, plan: StepPlan) -> int:
    """Returns the number of spans on rows."""
    table, placement = device.table, device.table.place(plan.spans)
    rows, tiles, on_rows = placement.rows, len(placement.tiles), placement.on_rows
    assert rows + tiles > 0, "an empty step"
    assert all((span.tokens is None) == (i < on_rows) for i, span in enumerate(plan.spans)), "rows come first"
    decoding = len(plan.spans) - plan.prompts
    assert decoding <= on_rows and all(span.known >= 0 for span in plan.spans[decoding:on_rows])
    assert plan.trunk in table.trunks() and plan.sampler in table.samplers(), (
        "a program that is not in the table"
    )
    assert plan.sampler.rows == table.sample_rows(plan.trunk) >= len(plan.samples)
    _check_adapters(device, plan)
    assert rows <= plan.trunk.rows and tiles <= plan.trunk.tiles
    _check_ready(device, plan, rows, tiles)
    assert rows + tiles * table.tile_size <= device.max_num_batched_tokens
    if table.batch_invariant:
        _check_places(device, plan.spans, on_rows)
    for part in (plan.spans[:on_rows], plan.spans[on_rows:]):  # a prompt may lie on rows and in tiles
        assert len({span.slot for span in part}) == len(part), "a sequence twice"
    assert not {s.seq for s in plan.spans[:decoding]} & {s.seq for s in plan.spans[decoding:]}
    if on_rows > decoding:
        assert not device.states.pages and all(
            span.targets is None is span.pool for span in plan.spans[decoding:on_rows]
        )
    assert len({sample.slot for sample in plan.samples}) + plan.guesses == len(plan.samples)
    assert plan.guesses == sum(span.guesses for span in plan.spans)
    ranks = [device.sequences[sample.seq].variant_rank for sample in plan.samples]
    variants = VARIANTS[max(ranks, default=0) :]
    cheapest = next(v for v in variants if SamplerKey(plan.sampler.rows, v) in device.ready)
    assert plan.sampler.variant == cheapest, "a costlier sampler than needed"
    return on_rows


def run_drafts(device: StrictDevice, plan: StepPlan) -> None:
    """Lets the draft model propose tokens, and enters them into the plan."""
    for span in _check_drafting(device, plan):
        sequence = device.sequences[span.seq]
        known = span.start + 1 - sequence.prompt_len
        span.following = [*device.propose(sequence)[known:], *[0] * span.guesses][: span.guesses]
        device.drafted += 1


def _check_adapters(device: StrictDevice, plan: StepPlan) -> None:
    """Writes adapters to their places, and checks that sequences read their own."""
    device.loras |= {place: number for number, place in plan.loras}
    for sequence in [device.sequences[span.seq] for span in plan.spans]:
        if sequence.lora is not None:
            assert device.loras[sequence.place] == sequence.lora.number, "another's adapter"
            assert sequence.place <= plan.trunk.adapted, "a program that computes too few places"


def _check_drafting(device: StrictDevice, plan: StepPlan) -> List[Span]:
    """After the plan's updates. Returns the spans for which a draft model proposes tokens, whose keys need
    pages.
    """
    spans, draft = plan.drafting, plan.draft
    assert (draft is not None) == bool(spans)
    if draft is None:
        return []
    assert draft in device.ready and len(spans) <= draft.rows
    for span in spans:
        assert span.following == [*range(-2, -2 - span.guesses, -1)]
        assert 0 < span.guesses <= draft.tokens and span.known < 0
        slot = device.slots[span.slot]
        assert slot.last is not None and slot.last[1] == span.start, "a wrong position"
        end = (span.start + span.guesses - 1) // device.page_size
        assert {*range(end + 1)} <= {*slot.tables[0]}, "a draft's key without a page"
        assert not draft.pages or end < draft.pages
    return spans


def _check_places(device: StrictDevice, spans: List[Span], rows: int) -> None:
    """Checks that a token's program, and its place in a tile, depend on its request alone."""
    assert not 0 < rows < len(spans), "rows beside tiles"
    for span in spans:
        prompt_len, end = len(device.sequences[span.seq].request.prompt_token_ids), span.start + span.length
        if span.tokens is None:
            assert span.start >= prompt_len
        else:
            assert span.start % device.table.tile_size == 0 and end <= prompt_len
            assert end % device.table.tile_size == 0 or end == prompt_len


def _check_ready(device: StrictDevice, plan: StepPlan, rows: int, tiles: int) -> None:
    """Checks that programs are ready, and are the smallest ready ones."""
    table = device.table
    assert plan.trunk in device.ready and plan.sampler in device.ready, "a program that is not ready"
    assert ScoreKey(table.passed_tiles(plan.trunk.tiles)) in device.ready or not any(
        span.targets for span in plan.spans
    )
    serving = [
        key
        for key in table.trunks()
        if key in device.ready and SamplerKey(table.sample_rows(key), "full") in device.ready
    ]
    holding = [
        key
        for key in serving
        if key.rows >= rows
        and key.tiles >= tiles
        and key.pages >= plan.trunk.pages
        and table.sample_rows(key) >= len(plan.samples)
        if not key.tiles or ScoreKey(table.passed_tiles(key.tiles)) in device.ready
    ]
    assert table.tokens(plan.trunk) == min(map(table.tokens, holding)), "a larger program than needed"
