"""Owners of recurrent states: running sequences, shared after forks, and snapshots for prefix hits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jengine.scheduling.pages.block_table import Block, PagePool
from jengine.scheduling.pages.prefix_index import PrefixIndex

SPARSE = 8  # tiles of a long prompt, or of generated tokens, between two snapshots


@dataclass(slots=True)
class StatePages:
    """A sequence's state pages.

    Attributes:
        own: the page that its next step writes. No other sequence holds it, and it cannot be found.
        source: the page that its next step reads, if that is not `own`; 0: the sequence begins with zeros;
            None: `own`.
        branch: length of the prompt's cached prefix of keys and values. Similar prompts may branch off here.
        findable: whether its snapshots may be found.
        snapshots: pages that will become findable, by the number of tokens that they cover.
        drafted: pages that the rows before the last of a step with drafts write, until it is read.
    """

    own: int
    source: int | None
    branch: int
    findable: bool
    snapshots: dict[int, int] = field(default_factory=dict)
    drafted: list[int] = field(default_factory=list)


class States:
    """Pages of recurrent states by sequence number.

    A step reads one page and writes one. If the two differ, the page that was read keeps its state. This is
    how snapshots are kept, samples of one prompt diverge, and a sequence starts from another's snapshot.
    States are never copied. A plan may give away a page that it reads, since rows and tiles run in the plan's
    order.

    A step with drafts writes a page for each row, since only later it is known which of them is right. These
    pages are set apart, so drafts neither shorten hits nor keep requests waiting.

    In the index, a snapshot is the page of its block in the state group, which is the last group. It covers
    all tokens up to the block's end.

    Args:
        group: index of the state group.
        let_find: see BlockManager.commit.
        drafts: number of pages for drafts.
        generated: whether generated tokens leave snapshots.

    Attributes:
        spare: pages for drafts that no step is using.
    """

    def __init__(
        self,
        pool: PagePool,
        index: PrefixIndex,
        group: int,
        page_size: int,
        let_find: Callable[[int, Sequence[int], int], None],
        drafts: int = 0,
        *,
        generated: bool = True,
    ) -> None:
        self.pool, self._index, self._group, self._page_size = pool, index, group, page_size
        self._let_find, self._generated = let_find, generated
        self._of: dict[int, StatePages] = {}
        self.spare = pool.take(drafts)

    def needed(self, blocks: Sequence[Block]) -> int:
        """Pages needed to admit a sequence with this hit."""
        return 1 + (bool(blocks) and not self.pool.holders(blocks[-1].pages[self._group]))

    def admit(self, number: int, blocks: Sequence[Block], branch: int, *, findable: bool) -> None:
        """Starts a sequence with the snapshot at the end of a hit, or with zeros."""
        source = blocks[-1].pages[self._group] if blocks else 0
        if source:
            self.pool.share(source)  # first: taking a page could evict it
        self._of[number] = StatePages(self._take(), source, branch, findable)

    def fork(self, number: int, child: int) -> None:
        """Starts another sequence with the same tokens, all of which are planned."""
        parent = self._of[number]
        if parent.source is None:
            parent.own, parent.source = self._take(), parent.own
        assert parent.source
        self.pool.share(parent.source)
        self._of[child] = StatePages(self._take(), parent.source, 0, parent.findable)

    def row(
        self, number: int, tokens: Sequence[int], known: int, end: int, tile_size: int, drafts: int = 0
    ) -> list[int]:
        """Plans a sequence's next row, or a burst of its rows, up to the token before `end`. Returns [page to
        read, page to write], with drafts a page to write for each row; see `settle`.

        At intervals it leaves a snapshot, which can be found once all of its tokens are known.

        Args:
            known: number of its tokens that are computed and that the host has read.
            drafts: number of rows of drafts, at most as many as there are spare pages.
        """
        of = self._of[number]
        if of.snapshots and min(of.snapshots) <= known:
            self._let_find(number, tokens, known)
        pages = self._step(number)
        if drafts:
            # the last row writes the page that all of them read
            of.drafted, self.spare = self.spare[:drafts], self.spare[drafts:]
            pages[1:1] = of.drafted
        elif self._on_grid(of, end, tile_size):
            self._snapshot(number, end)
        return pages

    def settle(self, number: int, end: int, right: int, tile_size: int) -> None:
        """A step with drafts was read: the sequence's state is that of the last row that counts.

        Args:
            end: number of tokens that this state covers.
            right: number of drafts that were right.
        """
        of = self._of.get(number)
        if of is None or not of.drafted:  # preempted meanwhile
            return
        pages, of.drafted = [*of.drafted, of.own], []
        of.own = pages.pop(right)
        if self._on_grid(of, end, tile_size):
            self._snapshot(number, end)
        for back, page in enumerate(reversed(pages[:right]), 1):
            if self._on_grid(of, end - back, tile_size) and self.pool.available:
                of.snapshots[end - back] = page
                pages[right - back] = self._take()
        self.spare += pages

    @staticmethod
    def until_grid(tokens: int, tile_size: int) -> int:
        """Tokens that a sequence generates after `tokens` until it may leave a snapshot."""
        return SPARSE * tile_size - tokens % (SPARSE * tile_size)

    def _on_grid(self, of: StatePages, end: int, tile_size: int) -> bool:
        """Whether a sequence leaves a snapshot here among the tokens that it generates."""
        grid = end % (SPARSE * tile_size) == 0 and end % self._page_size == 0
        return self._generated and of.findable and grid

    def _step(self, number: int) -> list[int]:
        """[page to read, page to write] of a sequence's next row or tile."""
        pages = self._of[number]
        if pages.source is None:
            return [pages.own, pages.own]
        source, pages.source = pages.source, None
        if source:
            self._release(source)
        return [source, pages.own]

    def tiles(self, number: int, start: int, end: int, tile_size: int, last: int) -> list[int]:
        """Plans tiles of the tokens at [start, end). Returns the page that the first tile reads, then the
        pages that they write.

        Snapshots are taken where a tile and a page end together: at the last two such places before `last`,
        the end of the known tokens; at the last one before the place where other prompts branch off; and at
        intervals in a long prompt.
        """
        pages = self._step(number)
        for border in [*range(start + tile_size, end, tile_size), end]:
            if border > start + tile_size:
                pages.append(self._step(number)[1])
            if (
                self._of[number].findable
                and border % self._page_size == 0
                and self._worth(self._of[number], border, tile_size, last)
            ):
                self._snapshot(number, border)
        return pages

    def _worth(self, pages: StatePages, border: int, tile_size: int, last: int) -> bool:
        ends = border <= last <= border + tile_size or border <= pages.branch < border + tile_size
        return ends or border % (SPARSE * tile_size) < tile_size

    def _snapshot(self, number: int, tokens: int) -> None:
        """Keeps the last tile's page as a snapshot if there is room; the next tile writes to another."""
        if self.pool.available:
            pages = self._of[number]
            pages.snapshots[tokens] = pages.source = pages.own
            self.pool.share(pages.own)
            pages.own = self._take()

    def commit(self, number: int, blocks: Sequence[Block]) -> None:
        """Makes snapshots findable if their blocks are in the index."""
        pages = self._of[number]
        for tokens in [tokens for tokens in pages.snapshots if tokens // self._page_size <= len(blocks)]:
            page = pages.snapshots.pop(tokens)
            self._index.hold(blocks[tokens // self._page_size - 1], self._group, page)
            self._release(page)

    def reset(self) -> None:
        """Nothing that sequences have computed so far can be found any more."""
        for pages in self._of.values():
            pages.findable = False

    def release(self, number: int) -> None:
        """Releases a sequence's pages."""
        pages = self._of.pop(number)
        self.spare += pages.drafted
        for page in (pages.own, pages.source, *pages.snapshots.values()):
            if page:
                self._release(page)

    def held(self) -> Counter[int]:
        """Number of holders of each page."""
        held = Counter(self.spare)
        for of in self._of.values():
            held.update(filter(None, (of.own, of.source, *of.snapshots.values(), *of.drafted)))
        return held

    @property
    def numbers(self) -> set[int]:
        """Numbers of the sequences that have a state."""
        return {*self._of}

    def _take(self) -> int:
        (page,) = self.pool.take(1)
        return page

    def _release(self, page: int) -> None:
        self.pool.release(page, keep=self._index.holds(self._group, page))
