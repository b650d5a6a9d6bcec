"""Drafts from the request itself and from earlier outputs: what followed the longest match, by majority."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from collections.abc import Sequence as List
from dataclasses import dataclass, field

from jengine.core.suffix_decoding import SHORTEST, SuffixDecoding
from jengine.scheduling.drafters.drafter import Draft
from jengine.scheduling.drafters.earlier_outputs import EarlierOutputs, Output
from jengine.scheduling.drafters.places import AT_ONCE, Places, agreed, continued
from jengine.scheduling.requests.sequence import Sequence

MOST_TOKENS = 2**20  # of earlier outputs, together; 32 MiB


class Suffix:
    """Looks for a sequence's last tokens in its own prompt and output, and in outputs of its tenant's other
    requests, running or ended. A tenant is a client with a cache salt; others' outputs are never found.

    Of the places with the longest match it takes, token after token, what most of them say.

    Args:
        how: lengths and bounds.
        most: see Drafter.
        most_tokens: of earlier outputs that are kept.
    """

    def __init__(self, how: SuffixDecoding, most: int, most_tokens: int = MOST_TOKENS) -> None:
        self._how, self.most = how, most
        self._running: dict[Sequence, _Running] = {}
        self._earlier: EarlierOutputs | None = None
        if how.max_cached_requests:
            self._earlier = EarlierOutputs(SHORTEST, how.max_cached_requests, most_tokens)

    def draft(self, sequence: Sequence, most: int) -> Draft | None:
        """See Drafter."""
        tokens, own, deep = sequence.tokens, self._entered(sequence), self._how.max_tree_depth
        found: list[tuple[int, List[int], int]] = [
            (agreed(tokens, end, tokens, deep), tokens, end) for end in own.places.of_end(tokens)
        ]
        if self._earlier is not None and len(tokens) >= SHORTEST:
            found += [
                (agreed(output.tokens, end, tokens, deep), output.tokens, end)
                for output, end in self._earlier.places(own.tenant, tokens)
                if output is not own.output
            ]
        length = max([same for same, _, _ in found], default=0)
        if length < SHORTEST:
            return None
        most = min(most, int(self._how.max_spec_factor * length))
        texts = [
            continued(text, end, most) if text is tokens else text[end : end + most]
            for same, text, end in found
            if same == length
        ]
        drafts = self._majority(texts, most)
        return Draft(drafts, length, "suffix") if drafts else None

    def forget(self, sequence: Sequence) -> None:
        """See Drafter. The output stays, for others, unless its last tokens may be those of a mask that
        failed.
        """
        if not sequence.searches and sequence.finish_reason != "error":
            self._entered(sequence)
        self._running.pop(sequence, None)

    def _entered(self, sequence: Sequence) -> _Running:
        """Enters the new tokens of a sequence's output, at most AT_ONCE."""
        tokens, own = sequence.tokens, self._running.get(sequence)
        if own is None:
            # one that was preempted has entered its output before
            entered = len(tokens) if sequence.num_preemptions else sequence.prompt_len
            tenant = sequence.client, sequence.request.cache_salt
            own = self._running[sequence] = _Running(tenant, entered)
        if self._earlier is not None and len(tokens) > own.entered:
            if own.output is None or not own.output.kept:
                own.output = self._earlier.open(own.tenant)
            new = tokens[own.entered : own.entered + AT_ONCE]
            self._earlier.extend(own.output, new)
            own.entered += len(new)
        return own

    def _majority(self, texts: List[List[int]], most: int) -> list[int]:
        """Token after token what most of these texts say, the latest first, until that is unlikely."""
        draft, chance = list[int](), 1.0
        while len(draft) < most:
            if len(texts) == 1:
                return [*draft, *texts[0][len(draft) :]]
            votes = Counter([text[len(draft)] for text in texts if len(text) > len(draft)])
            if not votes:
                break
            token, count = votes.most_common(1)[0]  # the first one among equals
            chance *= count / len(texts)
            if chance < self._how.min_token_prob:
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
