"""Beam search from one step to the next: surviving beams are forked, the others dropped."""

from __future__ import annotations

from jengine.core.updates import ScoredToken
from jengine.scheduling.requests.beams import Beams, Path
from jengine.scheduling.requests.registry import Registry
from jengine.scheduling.requests.sequence import Sequence, State
from jengine.scheduling.rows import PlanBuilder, Rows
from jengine.scheduling.rules.rule import Rule


class BeamSearches(Rule):
    """Running beam searches. A beam gets no row until the candidates of all beams of its prompt are known."""

    def __init__(self, registry: Registry, rows: Rows) -> None:
        self._registry, self._rows = registry, rows
        self._leaders: dict[Sequence, Beams[Sequence]] = {}

    @property
    def running(self) -> bool:
        """Whether any beam search is running."""
        return bool(self._leaders)

    @property
    def awaited(self) -> bool:
        """Whether a step is in flight whose results determine the next rows of beams."""
        return any(member.in_flight for beams in self._leaders.values() for member in beams.members)

    def begin(self, leader: Sequence) -> list[Sequence]:
        """Returns new sequences to hold a request's other beams; none if it is no beam search."""
        params = leader.request.beams
        if params is None:
            return []
        beams = self._leaders[leader] = leader.beams = Beams(
            params, leader, leader.prompt_len, leader.eos_token_ids
        )
        others = [self._registry.add_beam(leader, beams) for _ in range(params.beam_width - 1)]
        beams.members += others
        return others

    def planned(self, plan: PlanBuilder) -> None:
        """Makes beams' rows take tokens from the host; holds the beams until their successors are known."""
        if self._leaders:
            for span, sequence in zip(plan.spans, plan.rows, strict=False):
                if sequence.searches:
                    span.known, sequence.state = sequence.tokens[span.start], State.HELD

    def take(self, beam: Sequence, token: ScoredToken | None) -> Sequence | None:
        """Records a beam's candidates. Returns the search's leader if the search ends here."""
        if beam.beams is None or token is None:  # the search was preempted meanwhile
            return None
        beams, leader = beam.beams, beam.beams.leader
        chosen = beams.take(beam, token)
        if chosen is None:
            return None
        if chosen and chosen[0][1].length < leader.max_len:
            beams.live = dict(self._assign(beams.members, chosen))
            return None
        leader.found = beams.end([path for _, path in chosen], leader.request.params.logprobs is not None)
        return leader

    def _assign(
        self, members: list[Sequence], chosen: list[tuple[Sequence, Path]]
    ) -> list[tuple[Sequence, Path]]:
        """Assigns a sequence to each chosen beam: its parent's, or a free one if that is taken."""
        parents = {parent for parent, _ in chosen}
        free = [member for member in members if member not in parents]
        beams: dict[Sequence, Path] = {}
        for parent, path in chosen:
            beam = parent if parent not in beams else free.pop()
            if beam is not parent:
                self._rows.fork(parent, beam)
            beams[beam] = path
        for beam in free:
            self._rows.empty(beam)
            beam.state = State.HELD
        for beam, path in beams.items():
            beam.tokens.append(path.token)
            beam.state = State.DECODING
        return list(beams.items())

    def forget(self, sequence: Sequence) -> None:
        self._leaders.pop(sequence, None)

    def check_integrity(self) -> None:
        members = [member for beams in self._leaders.values() for member in beams.members]
        running = {sequence for sequence in self._registry.running if sequence.searches}
        assert {*members} == running and len({*members}) == len(members), "a beam is lost"
