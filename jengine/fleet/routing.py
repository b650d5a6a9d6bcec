"""Which replica takes a prompt: the one that is predicted to give its first token soonest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as List

FIRST_RATE = 1e-4  # seconds per prompt token, before any was measured
GAIN = 0.1  # weight of a new measurement
FEWEST = 64  # tokens of a prompt that is measured: fewer take as long as any step does
BLOCK = 16  # tokens, where a load does not say the page's size


class PrefixBlocks:
    """The blocks of prompts that a replica has computed lately, as far as they fit in its cache.

    A block is named by its tokens and all before it, and by what else must be equal for the cache to be
    shared.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def hits(self, names: List[int]) -> int:
        """How many of a prompt's blocks, from its beginning, are known."""
        return next((i for i, name in enumerate(names) if name not in self._blocks), len(names))

    def enter(self, names: List[int], limit: int) -> None:
        """Adds a prompt's blocks, and forgets the least recently used ones above `limit`."""
        for name in reversed(names):  # beginnings are forgotten last
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        while len(self._blocks) > limit:
            self._blocks.popitem(last=False)


def block_names(tokens: List[int], size: int, apart: Hashable) -> list[int]:
    """Names of the whole blocks of a prompt.

    Args:
        apart: what else must be equal.
    """
    name, names = hash(apart), list[int]()
    for end in range(size, len(tokens) + 1, size):
        name = hash((name, *tokens[end - size : end]))
        names.append(name)
    return names


class Rate:
    """Seconds that a prompt token takes, learned from prompts that had to wait for no other."""

    def __init__(self) -> None:
        self.seconds = FIRST_RATE

    def learn(self, tokens: int, seconds: float) -> None:
        """A prompt of so many tokens, which were not in the cache, had its first result after this time."""
        if tokens >= FEWEST:
            self.seconds += GAIN * (seconds / tokens - self.seconds)


def first_token_seconds(forecast: float | None, ahead: int, tokens: int, rate: float) -> float:
    """The predicted time to a prompt's first token.

    Args:
        forecast: the replica's, for a typical prompt, which may be a second old; None: it has none.
        ahead: tokens of prompts that were sent there and have no result yet.
        tokens: of the prompt, that are not in the replica's cache.
    """
    return max(forecast or 0.0, rate * ahead) + rate * tokens
