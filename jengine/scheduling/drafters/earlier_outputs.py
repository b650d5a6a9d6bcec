"""Outputs of earlier requests, found by their n-grams. Memory and the work of each call are bounded."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from collections.abc import Sequence as List

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

    def __len__(self) -> int:
        return len(self._outputs)

    @property
    def tokens(self) -> int:
        """Number of tokens that are kept."""
        return self._tokens

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
