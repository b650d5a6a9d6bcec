"""Ends of prompts on rows: a few tokens that would waste most of a tile."""

from __future__ import annotations

from jengine.scheduling.costs.predictor import ChunkEnd, RowsOrTiles
from jengine.scheduling.rows import PlanBuilder
from jengine.scheduling.rules.rule import Rule
from jengine.scheduling.step_plan import Sample, Span


class PromptRows(Rule):
    """Lays tokens at the ends of chunks on consecutive rows if the step is then predicted to be shorter.

    All rows and tiles of a layer write their keys and values before any of them reads, so a row sees the
    rows before it, and the tiles of its own prompt. Tokens whose hidden states are needed, for log
    probabilities of the prompt or for an embedding, stay in tiles, as do tokens that see later ones.
    """

    def __init__(self, costs: RowsOrTiles, tile_size: int) -> None:
        self._costs, self._size = costs, tile_size

    def lengthen(self, plan: PlanBuilder) -> None:
        if not plan.tiles or not self._costs.max_rows:
            return
        first = len(plan.rows)
        ends = sorted(
            (ChunkEnd(rest, span.start + span.length - rest), i)
            for i, span in enumerate(plan.spans[first:], first)
            if self._costs.fits(rest := span.length % self._size)
            and span.targets is None is span.pool
            and (span.ahead is None or not span.ahead[-rest:].any())
        )
        rows = first + plan.more_rows
        count, _ = self._costs.best(
            rows, plan.tiles, plan.work, plan.longest, [end for end, _ in ends], plan.rank
        )
        if count:
            plan.work = self._costs.moved(plan.work, [end for end, _ in ends[:count]])
            self._move(plan, {number: end.length for end, number in ends[:count]})

    def _move(self, plan: PlanBuilder, ends: dict[int, int]) -> None:
        """Moves ends of these spans, given with their lengths, to rows."""
        first, on_rows, in_tiles = len(plan.rows), list[Span](), list[Span]()
        last: dict[int, Span] = {}  # by the span's old number, the one that now has its last token
        for number, span in enumerate(plan.spans[first:], first):
            assert span.tokens is not None and span.states is None
            last[number] = span
            if length := ends.get(number, 0):
                tokens, at = span.tokens[-length:], span.start + span.length - length
                last[number] = Span(
                    span.seq, span.slot, at, length, known=tokens[0], following=tokens[1:] or None
                )
                on_rows.append(last[number])
                span.length, span.tokens = span.length - length, span.tokens[:-length]
            if span.length:
                in_tiles.append(span)
        plan.spans[first:] = [*on_rows, *in_tiles]
        numbers = {id(span): number for number, span in enumerate(plan.spans)}
        plan.samples = [
            sample
            if sample.span < first
            else Sample(numbers[id(last[sample.span])], last[sample.span].length - 1, sample.seq, sample.slot)
            for sample in plan.samples
        ]
        plan.more_rows += sum(ends.values())
        plan.tiles -= len(ends)
