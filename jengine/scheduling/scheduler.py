"""Which sequences run next: continuous batching with prompts prefilled in chunks beside decode rows."""

from __future__ import annotations

import time

from jengine.errors import InvalidArgument
from jengine.program_table import VARIANTS, ProgramTable
from jengine.request import FinishReason, Request
from jengine.scheduling.costs import StepCosts
from jengine.scheduling.page_pool import PagePool
from jengine.scheduling.policy import Policy, WaitingQueue, order_of, victim
from jengine.scheduling.sequence import Sequence, State
from jengine.scheduling.sequence_limits import SequenceLimits
from jengine.scheduling.step_plan import SlotReset, StepPlan, Tile


class Scheduler:
    """Plans steps, one program of the table each, and takes in the tokens they sampled.

    Plans run on the device in the order in which they were made, each once, and each is collected once, in that order.
    A plan may be made before earlier ones are collected: every running sequence is then taken to get one more token from
    each. Where one of these turns out to end the sequence, rows planned after it were in vain, and what they sample is dropped.

    Slots and pages are freed as soon as a sequence finishes or is preempted, even if a dispatched
    step still uses them. Steps cannot overtake each other, since each takes the cache and the slots that the one before it gives
    (they are donated): the next owner's writes come after the last use by the former one.

    Args:
        page_size: tokens a page holds.
        num_pages: of the cache, the null page included.
        max_num_seqs: sequences running at once; they own slots 1 to max_num_seqs, slot 0 is the null slot.
        max_num_batched_tokens: of one step, decode rows and whole tiles together; at least max_num_seqs + one tile.
        max_model_len: tokens of a sequence, prompt and output together.
    """

    def __init__(
        self,
        table: ProgramTable,
        *,
        page_size: int,
        num_pages: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: Policy = "fcfs",
        costs: StepCosts | None = None,
    ) -> None:
        self.table = table
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.policy: Policy = policy
        self.costs = StepCosts() if costs is None else costs
        self.pool = PagePool(num_pages)
        self.sequence = SequenceLimits(max_model_len=max_model_len, page_size=page_size, pages=self.pool.capacity)
        self.num_preemptions = 0
        self._arrivals = 0
        self._live: dict[str, Sequence] = {}  # waiting and running, by request id
        self._waiting = WaitingQueue()
        self._running: dict[Sequence, None] = {}
        self._free_slots = list(range(max_num_seqs, 0, -1))

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._live)

    def check_id(self, request_id: str) -> None:
        """Raises InvalidArgument where an unfinished request has this id."""
        if request_id in self._live:
            raise InvalidArgument("request_id", request_id, "a request with this id is not finished yet")

    def add(self, request: Request, *, seed: int, eos_token_ids: tuple[int, ...]) -> Sequence:
        """Queues a request, which SequenceLimits.validate has let pass. max_tokens beyond max_model_len is cut to what fits, as
        vLLM does.

        Raises:
            InvalidArgument: as `check_id`; nothing has been queued then.
        """
        self.check_id(request.request_id)
        params = request.params
        suppressed = tuple(dict.fromkeys((*params.stop_token_ids, *eos_token_ids)))
        sequence = Sequence(
            request=request,
            seed=seed,
            order=order_of(self.policy, request, self._arrivals),
            max_len=self.sequence.max_len(request),
            eos_token_ids=eos_token_ids,
            stop_token_ids=frozenset(params.stop_token_ids if params.ignore_eos else suppressed),
            suppressed_token_ids=suppressed,
            tokens=list(request.prompt_token_ids),
        )
        self._arrivals += 1
        self._live[request.request_id] = sequence
        self._waiting.push(sequence)
        return sequence

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to do before earlier steps are collected or requests added.

        Every decoding sequence gets a row. Prompts follow, in tiles: first of sequences that have begun,
        then of those waiting. A plan has at most one slot reset a tile, and at most
        rows + tiles * (tile_size // page_size + 1) page updates.
        """
        rows, updates = self._decode_rows()
        chunks = self._pending_chunks((self.max_num_batched_tokens - len(rows)) // self.table.tile_size)
        if not rows and not chunks:
            return None
        positions = [sequence.num_computed for sequence in rows]
        for sequence in rows:
            sequence.num_computed += 1
            sequence.in_flight += 1
        longest = max(positions, default=-1) + 1  # tokens of the longest sequence in the step
        tiles: list[Tile] = []
        resets: list[SlotReset] = []
        prefilled: list[tuple[int, Sequence]] = []  # last tile, sequence
        if chunks:
            pending = sum(count for _, count, _ in chunks)
            pages = self.sequence.pages_of(max(longest, *[end for _, _, end in chunks]))
            budget = self.costs.best_tiles(self.table, rows=len(rows), pending=pending, pages=pages)
            for sequence, count, _ in chunks:
                if sequence.state is State.WAITING:
                    resets.append(self._admit(sequence))
                self._cut(sequence, min(count, budget - len(tiles)), tiles, updates)
                longest = max(longest, sequence.num_computed)
                if sequence.state is State.DECODING:
                    prefilled.append((len(tiles) - 1, sequence))
                if len(tiles) == budget:
                    break
        trunk = self.table.trunk(len(rows), len(tiles), self.sequence.pages_of(longest))
        sampled = list(enumerate(rows))
        sampled += [(trunk.rows + tile, sequence) for tile, sequence in prefilled]
        rank = max([sequence.variant_rank for _, sequence in sampled], default=0)
        return StepPlan(
            trunk=trunk,
            sampler=self.table.sampler(trunk, VARIANTS[rank]),
            row_slots=[sequence.slot for sequence in rows],
            row_positions=positions,
            tiles=tiles,
            resets=resets,
            page_updates=updates,
            sampled=sampled,
        )

    def collect(self, plan: StepPlan, tokens: list[int]) -> list[tuple[Sequence, int]]:
        """Takes in a step's tokens, `tokens[sampler row]`, and finishes the sequences that they end.

        Returns (sequence, new token), in the plan's order. A token of a sequence that has finished
        meanwhile is dropped; that of a preempted one is kept and recomputed with the others.
        """
        collected = []
        finished = State.FINISHED
        for row, sequence in plan.sampled:
            sequence.in_flight -= 1
            if sequence.state is finished:
                continue
            token = tokens[row]
            known = sequence.tokens
            known.append(token)
            collected.append((sequence, token))
            if token in sequence.stop_token_ids:
                at_eos = token in sequence.eos_token_ids and not sequence.request.params.ignore_eos
                self.finish(sequence, "stop", None if at_eos else token)
            elif len(known) == sequence.max_len:
                self.finish(sequence, "length")
        return collected

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a sequence. For one that has ended, changes only the reason: its last token may also have completed a stop string."""
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        if sequence.state is State.FINISHED:
            return
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
        else:
            self._release(sequence)
        sequence.state = State.FINISHED
        del self._live[sequence.request_id]

    def find(self, request_id: str) -> Sequence | None:
        """The unfinished request with this id."""
        return self._live.get(request_id)

    def abort(self, request_id: str) -> Sequence | None:
        """Ends a request; None if there is none with this id, or it has ended."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self.finish(sequence, "abort")
        return sequence

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page, slot and request is where it belongs, once."""
        self.pool.check_integrity()
        running, waiting = list(self._running), list(self._waiting)
        pages = [page for sequence in running for page in sequence.pages]
        assert len(set(pages)) == len(pages) == self.pool.owned, "a page is shared or lost"
        slots = sorted([*self._free_slots, *(sequence.slot for sequence in running)])
        assert slots == list(range(1, self.max_num_seqs + 1)), f"a slot is shared or lost: {slots}"
        assert all(s.slot == 0 and not s.pages and s.state is State.WAITING for s in waiting), "a waiting sequence owns something"
        assert all(s.state in (State.PREFILLING, State.DECODING) for s in running), "a running sequence neither prefills nor decodes"
        assert {*running, *waiting} == {*self._live.values()}, "a request is lost"
        assert len(running) + len(waiting) == len(self._live), "a request is in two places"

    def _decode_rows(self) -> tuple[list[Sequence], list[tuple[int, int, int]]]:
        """Sequences that decode in this step, and the page updates for those that enter a new page.

        Preempts, the policy's last first, until there are pages enough. That ends, at the latest, with one
        sequence running, for which alone the pool was found large enough when it was added.
        """
        decoding, page_size = State.DECODING, self.page_size
        while True:
            # One whose last token is in flight stays out, and finishes when that is collected.
            rows = [s for s in self._running if s.state is decoding and s.num_computed < s.last_position]
            growing = [s for s in rows if s.num_computed % page_size == 0]
            if len(growing) <= self.pool.free:
                break
            self._preempt(victim(self._running))
        updates = []
        for sequence, page in zip(growing, self.pool.allocate(len(growing)), strict=True):
            updates.append((sequence.slot, len(sequence.pages), page))
            sequence.pages.append(page)
        return rows, updates

    def _pending_chunks(self, limit: int) -> list[tuple[Sequence, int, int]]:
        """Prompts that can be worked on now, in order: (sequence, tiles, tokens it then has computed), `limit` tiles at most.

        A waiting sequence is admitted with pages for all its known tokens, so a prefill never stops half-way for want
        of pages. One page is left over for each running sequence, so that it is not soon preempted again.
        """
        chunks = []
        limit = min(limit, self.table.max_tiles)
        tile_size = self.table.tile_size

        def take(sequence: Sequence) -> int:
            left = len(sequence.tokens) - sequence.num_computed
            tiles = min(-(-left // tile_size), limit)
            chunks.append((sequence, tiles, sequence.num_computed + min(left, tiles * tile_size)))
            return tiles

        for sequence in self._running:  # at most one has begun and not ended: each is cut to its end before the next one's turn
            if sequence.state is State.PREFILLING:
                limit -= take(sequence)
        slots, pages, running = len(self._free_slots), self.pool.free, len(self._running)
        for sequence in self._waiting:
            needed = self.sequence.pages_of(len(sequence.tokens))
            # A preempted sequence with tokens in flight is not known in full yet; nobody passes it.
            if limit <= 0 or not slots or needed + running > pages or sequence.in_flight:
                break
            limit -= take(sequence)
            slots, pages, running = slots - 1, pages - needed, running + 1
        return chunks

    def _admit(self, sequence: Sequence) -> SlotReset:
        self._waiting.remove(sequence)
        self._running[sequence] = None
        sequence.state = State.PREFILLING
        sequence.scheduled = sequence.scheduled or time.monotonic()
        sequence.slot = self._free_slots.pop()
        sequence.pages = self.pool.allocate(self.sequence.pages_of(len(sequence.tokens)))
        return SlotReset(
            slot=sequence.slot,
            params=sequence.request.params,
            seed=sequence.seed,
            sample_index=sequence.request.sample_index,
            prompt_len=sequence.prompt_len,
            stop_token_ids=sequence.suppressed_token_ids,
            counted=list(sequence.tokens) if sequence.request.params.penalizes else None,
        )

    def _cut(self, sequence: Sequence, count: int, tiles: list[Tile], updates: list[tuple[int, int, int]]) -> None:
        """Appends `count` tiles of a sequence's known tokens, with the pages that they enter."""
        for _ in range(count):
            start = sequence.num_computed
            end = min(start + self.table.tile_size, len(sequence.tokens))
            updates += [(sequence.slot, i, sequence.pages[i]) for i in range(self.sequence.pages_of(start), self.sequence.pages_of(end))]
            ends = end == len(sequence.tokens)
            tiles.append(Tile(sequence.slot, start, sequence.tokens[start:end], ends, _scored(sequence, start, end)))
            sequence.num_computed = end
            if ends:
                sequence.state = State.DECODING
                sequence.in_flight += 1

    def _preempt(self, sequence: Sequence) -> None:
        """Takes everything from a running sequence; it waits to compute all its tokens again."""
        self._release(sequence)
        sequence.state = State.WAITING
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.push(sequence)

    def _release(self, sequence: Sequence) -> None:
        del self._running[sequence]
        self.pool.release(sequence.pages)
        self._free_slots.append(sequence.slot)
        sequence.pages, sequence.slot = [], 0


def _scored(sequence: Sequence, start: int, end: int) -> tuple[Sequence, list[int]] | None:
    """The prompt's tokens that follow positions [start, end), where their log probabilities are asked for."""
    request = sequence.request
    if request.params.prompt_logprobs is None:
        return None
    following = request.prompt_token_ids[start + 1 : end + 1]
    return (sequence, following) if following else None
