"""Beam search from one step to the next: surviving beams are forked, the others dropped."""

from __future__ import annotations

from jengine.scheduling.beams import Path
from jengine.scheduling.prompt_tiles import PromptTiles
from jengine.scheduling.sequence import Sequence, State
from jengine.updates import ScoredToken


class BeamSearches(PromptTiles):
    """Sequences, and their beams. A beam gets no row until the candidates of all beams of its prompt are known."""

    @property
    def searching(self) -> bool:
        """Whether any beam search is running."""
        return bool(self._searching)

    @property
    def awaits_beams(self) -> bool:
        """Whether a step is in flight whose results determine the next rows of beams."""
        return any(member.in_flight for beams in self._searching.values() for member in beams.members)

    def _search(self, beam: Sequence, found: ScoredToken | None) -> Sequence | None:
        """Records a beam's candidates. Returns the search's leader if the search ends here."""
        if beam.beams is None or found is None:  # the search was preempted meanwhile
            return None
        beams, leader = beam.beams, beam.beams.leader
        chosen = beams.take(beam, found)
        if chosen is None:
            return None
        if chosen and chosen[0][1].length < leader.max_len:
            beams.set_live(self._assign(beams.members, chosen))
            return None
        leader.found = beams.end([path for _, path in chosen], leader.request.params.logprobs is not None)
        self.finish(leader, leader.found[0].finish_reason)
        leader.tokens = [*leader.request.prompt_token_ids, *leader.found[0].tokens]
        return leader

    def _assign(self, members: list[Sequence], chosen: list[tuple[Sequence, Path]]) -> list[tuple[Sequence, Path]]:
        """Assigns a sequence to each chosen beam: its parent's sequence, or a free one if another successor took that."""
        parents = {parent for parent, _ in chosen}
        free = [member for member in members if member not in parents]
        beams: dict[Sequence, Path] = {}
        for parent, path in chosen:
            beam = parent if parent not in beams else free.pop()
            if beam is not parent:
                self._fork_beam(parent, beam)
            beams[beam] = path
        for beam in free:
            self.blocks.empty(beam.number, beam.request.cache_salt)
            beam.state, beam.num_computed = State.HELD, 0
            self._forked.pop(beam, None)
        for beam, path in beams.items():
            beam.tokens.append(path.token)
            beam.state = State.DECODING
        return list(beams.items())

    def _fork_beam(self, parent: Sequence, beam: Sequence) -> None:
        """Makes `beam` a fork of `parent`, before the parent is extended."""
        self.blocks.replace(parent.number, beam.number)
        beam.tokens, beam.num_computed = [*parent.tokens], parent.num_computed
        self._forked[beam] = None
        if parent.num_computed % self.blocks.page_size:
            self._sharing[parent] = self._sharing[beam] = None
