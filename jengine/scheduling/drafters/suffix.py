"""Drafts from the request itself and from earlier outputs: what followed the longest match, by majority."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, field

from jengine.core.speculation import SHORTEST, SuffixDecoding
from jengine.scheduling.drafters.drafter import AT_ONCE, Draft, Drafter, Places, agreed, continued
from jengine.scheduling.requests.sequence import Sequence

PROBES = 8  # places that a search looks at


class Output:
    """The tokens of one request's output. Only its tenant's requests find it.

    Attributes:
        kept: False once it had to leave.
    """

    __slots__ = ("kept", "number", "salt", "tenant", "tokens")

    def __init__(self, tenant: Hashable, number: int) -> None:
        self.tenant, self.number, self.salt = tenant, number, hash(tenant)
        self.tokens, self.kept = array("i"), True


class EarlierOutputs:
    """Outputs by tenant, with the places of their n-grams.

    Places lie in a ring, in the order in which they came. Each refers to the previous one with the same hash,
    and a search follows this chain from the latest place on. The oldest outputs leave first; searches skip
    their places until newer ones take the room.

    Args:
        length: tokens of an n-gram.
        most_outputs, most_tokens: what is kept at most. A token takes 32 bytes, which are touched as the ring
            fills.
    """

    def __init__(self, length: int, most_outputs: int, most_tokens: int) -> None:
        self._length, self._most_outputs, self._most_tokens = length, most_outputs, most_tokens
        self._outputs: OrderedDict[int, Output] = OrderedDict()
        self._opened = self._tokens = 0
        self._size = 1 << max(most_tokens - 1, 1).bit_length()  # of the ring
        self._entered = 0  # number of the latest place; the first one is 1
        self._latest = _zeros("q", self._size)  # place, by hash of its n-gram
        self._previous = _zeros("q", self._size)  # place with the same hash, by place
        self._owner = _zeros("q", self._size)  # number of the output, by place
        self._end = _zeros("i", self._size)  # of the n-gram in the output, by place

    def open(self, tenant: Hashable) -> Output:
        """Adds an empty output."""
        self._opened += 1
        output = self._outputs[self._opened] = Output(tenant, self._opened)
        self._make_room()
        return output

    def extend(self, output: Output, more: List[int]) -> None:
        """Adds tokens to an output that is kept, in time proportional to their number."""
        tokens, length, mask = output.tokens, self._length, self._size - 1
        for token in more:
            if len(tokens) >= length:  # an n-gram is entered once a token follows it
                self._entered += 1
                place, chain = self._entered & mask, hash((output.salt, *tokens[-length:])) & mask
                self._previous[place], self._latest[chain] = self._latest[chain], self._entered
                self._owner[place], self._end[place] = output.number, len(tokens)
            tokens.append(token)
        self._tokens += len(more)
        self._make_room()

    def places(self, tenant: Hashable, tokens: List[int]) -> Iterator[tuple[Output, int]]:
        """Places in the tenant's outputs that may follow the n-gram at the end of `tokens`, the latest first.
        The caller must compare the tokens. Looks at PROBES places at most, whatever is kept.
        """
        mask, oldest = self._size - 1, max(self._entered - self._size, 0)
        number = self._latest[hash((hash(tenant), *tokens[-self._length :])) & mask]
        for _ in range(PROBES):
            if number <= oldest:
                return
            output = self._outputs.get(self._owner[number & mask])
            if output is not None and output.tenant == tenant:
                yield output, self._end[number & mask]
            number = self._previous[number & mask]

    def _make_room(self) -> None:
        while len(self._outputs) > self._most_outputs or self._tokens > self._most_tokens:
            _, output = self._outputs.popitem(last=False)
            output.kept, self._tokens = False, self._tokens - len(output.tokens)


def _zeros(kind: str, count: int) -> memoryview:
    """Numbers, all 0, in memory that is not touched yet."""
    return memoryview(bytearray(count * array(kind).itemsize)).cast(kind)  # type: ignore[call-overload,no-any-return]


MOST_TOKENS = 2**20  # of earlier outputs, together; 32 MiB


class Suffix(Drafter):
    """Looks for a sequence's last tokens in its own prompt and output, and in outputs of its tenant's other
    requests, running or ended. A tenant is a client with a cache salt; others' outputs are never found.

    Of the places with the longest match it takes, token after token, what most of them say.

    Args:
        options: lengths and bounds.
        max_drafts: see Drafter.
        most_tokens: of earlier outputs that are kept.
    """

    def __init__(self, options: SuffixDecoding, max_drafts: int, most_tokens: int = MOST_TOKENS) -> None:
        super().__init__(max_drafts)
        self._options = options
        self._running: dict[Sequence, _Running] = {}
        self._earlier: EarlierOutputs | None = None
        if options.max_cached_requests:
            self._earlier = EarlierOutputs(SHORTEST, options.max_cached_requests, most_tokens)

    def draft(self, sequence: Sequence, limit: int) -> Draft | None:
        tokens, running, deep = sequence.tokens, self._entered(sequence), self._options.max_tree_depth
        matches: list[tuple[int, List[int], int]] = [
            (agreed(tokens, end, tokens, deep), tokens, end) for end in running.places.of_end(tokens)
        ]
        if self._earlier is not None and len(tokens) >= SHORTEST:
            matches += [
                (agreed(output.tokens, end, tokens, deep), output.tokens, end)
                for output, end in self._earlier.places(running.tenant, tokens)
                if output is not running.output
            ]
        length = max([same for same, _, _ in matches], default=0)
        if length < SHORTEST:
            return None
        limit = min(limit, int(self._options.max_spec_factor * length))
        texts = [
            continued(text, end, limit) if text is tokens else text[end : end + limit]
            for same, text, end in matches
            if same == length
        ]
        drafts = self._majority(texts, limit)
        return Draft(drafts, length, "suffix") if drafts else None

    def forget(self, sequence: Sequence) -> None:
        """Forgets a sequence. Its output stays for others, unless a mask may have failed at its end."""
        if not sequence.searches and sequence.finish_reason != "error":
            self._entered(sequence)
        self._running.pop(sequence, None)

    def _entered(self, sequence: Sequence) -> _Running:
        """Enters the new tokens of a sequence's output, at most AT_ONCE."""
        tokens, running = sequence.tokens, self._running.get(sequence)
        if running is None:
            # one that was preempted has entered its output before
            entered = len(tokens) if sequence.num_preemptions else sequence.prompt_len
            tenant = sequence.client, sequence.request.cache_salt
            running = self._running[sequence] = _Running(tenant, entered)
        if self._earlier is not None and len(tokens) > running.entered:
            if running.output is None or not running.output.kept:
                running.output = self._earlier.open(running.tenant)
            new = tokens[running.entered : running.entered + AT_ONCE]
            self._earlier.extend(running.output, new)
            running.entered += len(new)
        return running

    def _majority(self, texts: List[List[int]], limit: int) -> list[int]:
        """Token after token what most of these texts say, the latest first, until that is unlikely."""
        draft, chance = list[int](), 1.0
        while len(draft) < limit:
            if len(texts) == 1:
                return [*draft, *texts[0][len(draft) :]]
            votes = Counter([text[len(draft)] for text in texts if len(text) > len(draft)])
            if not votes:
                break
            token, count = votes.most_common(1)[0]  # the first one among equals
            chance *= count / len(texts)
            if chance < self._options.min_token_prob:
                break
            texts = [text for text in texts if len(text) > len(draft) and text[len(draft)] == token]
            draft.append(token)
        return draft


@dataclass(slots=True)
class _Running:
    """What is known of a running sequence.

    Attributes:
        entered: number of its tokens that are the prompt, or in the output.
        output: the one that earlier outputs have of it.
    """

    tenant: Hashable
    entered: int
    output: Output | None = None
    places: Places = field(default_factory=lambda: Places(SHORTEST))
