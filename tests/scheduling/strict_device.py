"""A device without a model: runs plans exactly as given and rejects every one that a real device could not run rightly.

Its cache remembers who wrote what where, so reading another sequence's page, a stale page or an unwritten place
fails at once. Its next token is a function of the seed and of all tokens before it, read through the block table: a wrong
token anywhere shows in everything that follows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jengine.program_table import VARIANTS, ProgramTable, sampler_variant
from jengine.request import Request, SamplingParams
from jengine.scheduling.scheduler import Scheduler
from jengine.scheduling.sequence import Sequence
from jengine.scheduling.step_plan import SlotReset, StepPlan

VOCAB = 50
EOS = (0,)


def next_token(seed: int, tokens: list[int], params: SamplingParams, prompt_len: int, suppressed: tuple[int, ...]) -> int:
    token = hash((seed, *tokens)) % VOCAB
    while len(tokens) - prompt_len < params.min_tokens and token in suppressed:
        token = (token + 1) % VOCAB
    return token


def alone(request: Request, seed: int, max_model_len: int) -> tuple[list[int], str, int | None]:
    """Output, finish reason and stop reason of a request that has the device for itself."""
    params, prompt_len = request.params, len(request.prompt_token_ids)
    tokens = list(request.prompt_token_ids)
    while True:
        token = next_token(seed, tokens, params, prompt_len, (*params.stop_token_ids, *EOS))
        tokens.append(token)
        if token in EOS and not params.ignore_eos:
            return tokens[prompt_len:], "stop", None
        if token in params.stop_token_ids:
            return tokens[prompt_len:], "stop", token
        if len(tokens) == max_model_len or len(tokens) - prompt_len == params.max_tokens:
            return tokens[prompt_len:], "length", None


@dataclass
class Slot:
    reset: SlotReset
    table: dict[int, int] = field(default_factory=dict)  # index -> page; empty on reset, so a stale entry cannot pass
    written: int = 0  # tokens
    last_token: int | None = None


class StrictDevice:
    def __init__(self, table: ProgramTable, *, page_size: int, num_pages: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.table, self.page_size, self.num_pages = table, page_size, num_pages
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.slots: dict[int, Slot] = {}
        self.cache: dict[tuple[int, int], tuple[int, int, int]] = {}  # (page, offset) -> (seed of the owner, position, token)

    def run(self, plan: StepPlan) -> list[int]:
        """A token for every row of the sampler; rows that nobody samples get -1."""
        self._check_size(plan)
        self._take_updates(plan)
        for slot, position in zip(plan.row_slots, plan.row_positions, strict=True):
            last = self.slots[slot].last_token
            assert last is not None, "a decode row without a token to start from"
            self._write(slot, position, [last], plan.trunk.pages)
        for tile in plan.tiles:
            assert 1 <= len(tile.token_ids) <= self.table.tile_size
            self._write(tile.slot, tile.position, tile.token_ids, plan.trunk.pages)
        # Writes come first: a tile attends to the tiles before it in the same step.
        sampling = list(enumerate(plan.row_slots))
        sampling += [(plan.trunk.rows + j, tile.slot) for j, tile in enumerate(plan.tiles) if tile.samples]
        assert [(row, sequence.slot) for row, sequence in plan.sampled] == sampling
        tokens = [-1] * plan.sampler.rows
        for row, number in sampling:
            slot = self.slots[number]
            reset, prefix = slot.reset, self._read(slot)
            assert VARIANTS.index(plan.sampler.variant) >= VARIANTS.index(sampler_variant(reset.params))
            tokens[row] = slot.last_token = next_token(reset.seed, prefix, reset.params, reset.prompt_len, reset.stop_token_ids)
        for tile in plan.tiles:
            self._read(self.slots[tile.slot])
        return tokens

    def _check_size(self, plan: StepPlan) -> None:
        rows, tiles, table = len(plan.row_slots), len(plan.tiles), self.table
        assert rows + tiles > 0, "an empty step"
        assert plan.trunk in table.trunks() and plan.sampler in table.samplers(), "a program that is not in the table"
        assert plan.sampler.rows == table.sample_rows(plan.trunk)
        assert rows <= plan.trunk.rows and tiles <= plan.trunk.tiles
        assert table.trunk(rows, tiles, plan.trunk.pages) == plan.trunk, "a larger program than needed"
        assert rows + tiles * table.tile_size <= self.max_num_batched_tokens
        assert len(plan.resets) <= tiles
        assert len(plan.page_updates) <= rows + tiles * (table.tile_size // self.page_size + 1)
        assert len(set(plan.row_slots)) == rows and not {*plan.row_slots} & {tile.slot for tile in plan.tiles}
        needed = max(plan.sampled, key=lambda s: s[1].variant_rank)[1].variant_rank if plan.sampled else 0
        assert plan.sampler.variant == VARIANTS[needed], "a costlier sampler than needed"

    def _take_updates(self, plan: StepPlan) -> None:
        for reset in plan.resets:
            assert 1 <= reset.slot <= self.max_num_seqs
            self.slots[reset.slot] = Slot(reset)
        for slot, index, page in plan.page_updates:
            assert 1 <= page < self.num_pages
            self.slots[slot].table[index] = page

    def _write(self, number: int, position: int, tokens: list[int], page_bucket: int) -> None:
        slot = self.slots[number]
        assert position == slot.written, "a gap, or a token computed twice"
        for at, token in enumerate(tokens, position):
            page = slot.table[at // self.page_size]
            self.cache[page, at % self.page_size] = (slot.reset.seed, at, token)
        slot.written += len(tokens)
        assert page_bucket == 0 or (slot.written - 1) // self.page_size < page_bucket, "a program that reads too few pages"

    def _read(self, slot: Slot) -> list[int]:
        tokens = []
        for at in range(slot.written):
            owner, position, token = self.cache[slot.table[at // self.page_size], at % self.page_size]
            assert (owner, position) == (slot.reset.seed, at), "another's page, or a stale one"
            tokens.append(token)
        return tokens


class Loop:
    """The engine's loop around a scheduler and a strict device, with every promise checked after every action."""

    def __init__(self, *, max_model_len: int, tile_size: int, page_size: int, num_pages: int, max_num_seqs: int,
                 max_num_batched_tokens: int, page_buckets: tuple[int, ...] = (0,), **options: object) -> None:  # fmt: skip
        limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        table = ProgramTable.build(tile_size=tile_size, page_buckets=page_buckets, **limits)
        pages = {"page_size": page_size, "num_pages": num_pages}
        self.scheduler = Scheduler(table, max_model_len=max_model_len, **pages, **limits, **options)  # type: ignore[arg-type]
        self.device = StrictDevice(table, **pages, **limits)
        self.max_model_len = max_model_len
        self.sequences: list[Sequence] = []
        self.outputs: dict[Sequence, list[int]] = {}
        self.ended: dict[Sequence, list[int]] = {}  # with the output it had when it ended
        self.dispatched: list[tuple[StepPlan, list[int]]] = []
        self.admitted: list[int] = []  # seeds, in the order of the slot resets
        self.exhausted = False  # whether every page has been owned

    def add(self, prompt: list[int], priority: int = 0, **params: object) -> Sequence:
        seed = len(self.sequences)
        request = Request(request_id=f"r{seed}", prompt_token_ids=prompt, params=SamplingParams(**params), priority=priority)  # type: ignore[arg-type]
        self.scheduler.sequence.validate(request, EOS)
        sequence = self.scheduler.add(request, seed=seed, eos_token_ids=EOS)
        self.sequences.append(sequence)
        self.outputs[sequence] = []
        self.check()
        return sequence

    def abort(self, sequence: Sequence) -> None:
        found = self.scheduler.abort(sequence.request_id)
        assert found is (None if sequence in self.ended else sequence)
        self.check()

    def stop_at_string(self, sequence: Sequence) -> None:
        """What the engine does when a sequence's text completes a stop string."""
        self.scheduler.finish(sequence, "stop", "text")
        self.check()

    def step(self, ahead: int) -> bool:
        """Plans and runs one step, then collects all but the last `ahead` steps. False if there was nothing to run."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.admitted += [reset.seed for reset in plan.resets]
            self.dispatched.append((plan, self.device.run(plan)))
        self.check()
        self.exhausted |= self.scheduler.pool.free == 0
        while len(self.dispatched) > (0 if plan is None else ahead):
            for sequence, token in self.scheduler.collect(*self.dispatched.pop(0)):
                assert sequence not in self.ended, "a token after the end"
                self.outputs[sequence].append(token)
            self.check()
        return plan is not None

    def drain(self, ahead: int, limit: int = 10_000) -> None:
        """Steps until everything has ended."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            under_way = bool(self.dispatched)
            assert self.step(ahead) or under_way, "unfinished requests, and nothing to run or to wait for"
        else:
            raise AssertionError(f"not done after {limit} steps")
        self.step(ahead=0)  # collects what is still under way
        self.check_idle()

    def check(self) -> None:
        self.scheduler.check_integrity()
        for sequence in self.sequences:
            assert sequence.output_token_ids == self.outputs[sequence]
            if sequence.finish_reason is not None:
                assert self.ended.setdefault(sequence, sequence.output_token_ids) == sequence.output_token_ids

    def check_idle(self) -> None:
        scheduler = self.scheduler
        assert not scheduler.has_work and scheduler.num_running == scheduler.num_waiting == 0
        assert scheduler.pool.free == scheduler.pool.capacity
        for sequence in self.sequences:
            assert sequence in self.ended and sequence.in_flight == 0
            expected, reason, stop_reason = alone(sequence.request, sequence.seed, self.max_model_len)
            if sequence.finish_reason == "abort" or sequence.stop_reason == "text":
                assert self.outputs[sequence] == expected[: len(self.outputs[sequence])]
            else:
                assert (self.outputs[sequence], sequence.finish_reason, sequence.stop_reason) == (expected, reason, stop_reason)
