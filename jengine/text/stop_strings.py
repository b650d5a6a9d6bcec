"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    """A state of the automaton: the longest prefix of a stop string with which the text so far ends."""

    depth: int  # characters of that prefix
    next: dict[str, _Node] = field(default_factory=dict)
    fail: _Node | None = None  # the longest proper suffix that is a prefix too; None at the root
    stop: str | None = None  # the longest stop that ends here


class StopAutomaton:
    """Compiled stop strings. Immutable, so it can be used for any number of texts. Compilation takes about 1
    us a character.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops, self.root = stops, _automaton(stops)


class StopStrings:
    """Cuts a text at the first completed stop string, reading character by character.

    So the result does not depend on how the text was cut into pieces. If several stop strings end at the same
    place, the longest counts. Text is held back only while it may still become part of a stop string. Each
    character is one step of an Aho-Corasick automaton: a push costs O(len(delta) + longest stop).
    """

    def __init__(self, automaton: StopAutomaton) -> None:
        self._root = self._state = automaton.root
        self._held = ""
        self._none = not automaton.stops

    def push(self, delta: str, *, early: bool = False) -> tuple[str, str | None]:
        """Returns text that is safe to emit, and the stop string that was completed or None. After a stop,
        push no more.

        early: no stop may be completed in this text; one that begins in it and ends later may.
        """
        if self._none:
            return delta, None
        text, state = self._held + delta, self._state
        for end, character in enumerate(delta, start=len(self._held) + 1):
            while character not in state.next and state.fail is not None:
                state = state.fail
            state = state.next.get(character, self._root)
            if state.stop is not None and not early:
                self._state, self._held = self._root, ""
                return text[: end - len(state.stop)], state.stop
        safe = len(text) - state.depth
        self._state, self._held = state, text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """Returns the text held back, if the output ended for another reason."""
        held, self._held, self._state = self._held, "", self._root
        return held


def _automaton(stops: tuple[str, ...]) -> _Node:
    """Aho and Corasick, "Efficient string matching", 1975."""
    root = _Node(depth=0)
    for stop in stops:
        node = root
        for character in stop:
            node = node.next.setdefault(character, _Node(node.depth + 1))
        node.stop = stop
    nodes = deque(root.next.values())
    for node in nodes:
        node.fail = root
    while nodes:
        node = nodes.popleft()
        for character, child in node.next.items():
            fail = node.fail
            while fail is not None and character not in fail.next:
                fail = fail.fail
            child.fail = fail.next[character] if fail is not None else root
            child.stop = child.stop or child.fail.stop
            nodes.append(child)
    return root
