"""Compiles structured outputs to llguidance's matchers, with static limits, and on a stack deep enough for
recursion.

llguidance compiles recursively, without a limit on chains of `$ref` or Lark rules. On a standard stack of 8
MiB, a schema of 100 kB causes an overflow, which kills the process. MAX_CHARACTERS bounds the depth, and
STACK is several times larger than that needs. After compilation nothing (copies, masks, tokens) recurses.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from jengine.base.errors import InvalidArgument
from jengine.core.json_schema import drop_patterns
from jengine.core.structured_outputs import StructuredOutputs
from jengine.text.constraints import ANSWER_JSON, CALL_PARAMETERS, NESTED, schema_text, with_tokens
from jengine.text.mask_thread import MASK_SECONDS
from jengine.text.tokenizer import Tokenizer

MAX_CHARACTERS = 100_000
MAX_RULES = 1_000  # in a Lark grammar; the time for a mask grows with their square
MAX_REFS = 1_000  # distinct `$ref` targets in a JSON schema
STACK = 256 * 2**20  # bytes of address space; only the used part takes memory

# These limits on fuel and items bound most masks to about 20 ms, and the limit on states bounds a request's
# memory to about 100 MB.
_LIMITS = llguidance.LLParserLimits(step_max_items=20_000, max_lexer_states=50_000, verbose_errors=False)
_REF = re.compile(r'"\$ref"\s*:\s*"([^"]*)"')
# begins a rule or a terminal of a Lark grammar: a name, then a colon
_RULE = re.compile(r'^[ \t]*[?!]?[A-Za-z_][^:"/\n]*:', re.MULTILINE)
_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)  # begins a rule; no line of Lark does so
_PLACE = re.compile(r"at (\d+)\(\d+\): ")  # of an error in a Lark grammar: line and column
# the rule of a tool's parameters, up to the schema, which must not prevent answers that are text
_LENIENT = re.compile(rf'^({CALL_PARAMETERS}\d+: %json )(.*"lenient": true.*)$', re.MULTILINE)
_stack_size = threading.Lock()


def check_structure(what: StructuredOutputs) -> None:
    """Checks limits that need no compilation, in time proportional to the length, at most a few ms.

    Raises:
        InvalidArgument: naming `structured_outputs` and the limit.
    """
    text = _text(what)
    if len(text) > MAX_CHARACTERS:
        raise InvalidArgument("structured_outputs", f"{len(text)} characters", f"at most {MAX_CHARACTERS}")
    if what.grammar is not None and (rules := len(_RULE.findall(text))) > MAX_RULES:
        raise InvalidArgument("structured_outputs", f"{rules} rules", f"at most {MAX_RULES}")
    if (what.grammar is not None or what.json is not None) and (
        refs := len(set(_REF.findall(text)))
    ) > MAX_REFS:
        raise InvalidArgument("structured_outputs", f"{refs} different $refs", f"at most {MAX_REFS}")


def compile_structure(
    what: StructuredOutputs, tokenizer: Tokenizer, stack: int = STACK
) -> llguidance.LLMatcher:
    """Returns a matcher at the beginning of an output. `deep_copy` creates others, which share its lexer
    states.

    Args:
        stack: bytes of the compiling thread's stack.

    Raises:
        InvalidArgument: a limit is exceeded, or llguidance cannot read the structure or the tokenizer.
    """
    if not end_ids(tokenizer):
        limit = "the tokenizer has no end-of-sequence token, which is needed to end the output"
        raise InvalidArgument("structured_outputs", shown_value(what), limit)
    check_structure(what)
    try:
        guide = view_of(tokenizer, end_ids(tokenizer))
    except ValueError as unread:
        kind = type(tokenizer.backend.decoder).__name__
        reason = f"its decoder {kind} is unknown" if "decoder type" in str(unread) else str(unread)
        limit = (
            f"llguidance cannot read this model's tokenizer: {reason}; without another tokenizer.json, the"
            " model takes no constraints"
        )
        raise InvalidArgument("structured_outputs", shown_value(what), limit) from None
    try:
        matcher = _on_stack(
            stack, lambda: llguidance.LLMatcher(guide, _grammar(what, tokenizer), log_level=0, limits=_LIMITS)
        )
    except InvalidArgument:
        raise
    except (TypeError, ValueError, RecursionError) as wrong:
        limit = f"must be valid JSON or text: {wrong}"
        raise InvalidArgument("structured_outputs", shown_value(what), limit) from None
    if matcher.is_error():
        if (nested := NESTED.search(what.grammar or "")) is not None:
            # an error in the client's grammar shows it alone, with its line numbers
            compile_structure(StructuredOutputs(grammar=nested[1]), tokenizer, stack)
        if (readable := _on_stack(stack, lambda: _readable(what))) != what:
            return compile_structure(readable, tokenizer, stack)
        raise _unread(what, error_of(matcher))
    return matcher


def probe_structure(what: StructuredOutputs, tokenizer: Tokenizer) -> None:
    """Compiles on half the stack and computes a first mask, so that both are safe on the full stack.

    May kill or block the process, so it must run in a disposable one.

    Raises:
        InvalidArgument: as compile_structure, or the first mask fails or takes more than MASK_SECONDS.
    """
    matcher = compile_structure(what, tokenizer, STACK // 2)
    started = time.thread_time()
    matcher.compute_bitmask()
    if matcher.is_error():
        limit = f"llguidance cannot follow it: {error_of(matcher)}"
        raise InvalidArgument("structured_outputs", shown_value(what), limit)
    if (seconds := time.thread_time() - started) > MASK_SECONDS:
        limit = f"a mask takes {seconds:.1f} s; at most {MASK_SECONDS} s"
        raise InvalidArgument("structured_outputs", shown_value(what), limit)


def end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """All tokens that end an output of the model."""
    ids = (tokenizer.eos_token_id, *tokenizer.model_eos_token_ids)
    return tuple(dict.fromkeys(i for i in ids if i is not None and i < tokenizer.vocab_size))


@functools.lru_cache(maxsize=4)
def view_of(tokenizer: Tokenizer, ends: tuple[int, ...]) -> llguidance.LLTokenizer:
    """llguidance's view of a tokenizer: a trie of the vocabulary. Cached, since it is expensive to create."""
    return llguidance.LLTokenizer(tokenizer.backend.to_str(), eos_token=list(ends))


def error_of(matcher: llguidance.LLMatcher) -> str:
    """The reason why a matcher has failed."""
    return str(matcher.get_error()).partition("\n<")[0]  # the rest is internal state


def shown_value(what: StructuredOutputs) -> str:
    """The structure in an error: what the client gave, as text."""
    return json.dumps(list(what.choice), ensure_ascii=False) if what.choice is not None else _text(what)


def _unread(what: StructuredOutputs, error: str) -> InvalidArgument:
    """The error for a structure that llguidance cannot read. In a grammar of `constraints`, it concerns the
    schema on the line that llguidance names.
    """
    field, value = "structured_outputs", shown_value(what)
    place = _PLACE.match(error)
    lines = value.split("\n")[int(place[1]) - 1 :] if place and what.grammar is not None else []
    line = lines[0] if lines else ""  # what GBNF became may have more lines
    rule, _, schema = line.partition(": %json ")
    if schema and rule == ANSWER_JSON:
        value = schema
    elif schema and rule.startswith(CALL_PARAMETERS):
        field, value = f"tools[{rule.removeprefix(CALL_PARAMETERS)}]", schema
    if place and (schema or what.grammar is None):
        error = re.split(r"\n +\d+ \| ", error[place.end() :], maxsplit=1)[0].rstrip()
    if "coerce_one_of" in error:
        error = (
            "oneOf is supported only if at most one of its schemas can match; use anyOf, or put"
            ' "x-guidance": {"coerce_one_of": true} into the schema, which treats it as anyOf'
        )
    return InvalidArgument(field, value, f"llguidance cannot read it: {error}")


def _readable(what: StructuredOutputs) -> StructuredOutputs:
    """A constraint with any object in the place of a tool's lenient schema that llguidance cannot read. If
    that is because of patterns, such as JavaScript's look-around, it loses only these.
    """

    def rule(match: re.Match[str]) -> str:
        drop_patterns(simple := json.loads(match[2]))
        for schema in (match[2], json.dumps(simple)):
            if not llguidance.LLMatcher.validate_grammar(
                llguidance.LLMatcher.grammar_from_json_schema(schema)
            ):
                return match[1] + schema
        return match[1] + '{"type": "object"}'

    return what if what.grammar is None else StructuredOutputs(grammar=_LENIENT.sub(rule, what.grammar))


def _text(what: StructuredOutputs) -> str:
    if what.choice is not None:
        return "".join(what.choice)
    if what.json is not None and not isinstance(what.json, str):
        try:
            return json.dumps(what.json)
        except (TypeError, ValueError, RecursionError) as wrong:
            limit = f"must be valid JSON or text: {wrong}"
            raise InvalidArgument("structured_outputs", repr(what.json), limit) from None
    return what.json or what.regex or what.grammar or ""


def _grammar(what: StructuredOutputs, tokenizer: Tokenizer) -> str:
    matcher = llguidance.LLMatcher
    if what.json is not None:
        return str(matcher.grammar_from_json_schema(schema_text(_text(what))))
    if what.regex is not None:
        return str(matcher.grammar_from_regex(what.regex))
    # a single terminal, since alternatives of a rule would become that many parser items
    if what.choice is not None:
        options = " | ".join(map(json.dumps, what.choice))
        return str(matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {options}"))
    assert what.grammar is not None
    added = tokenizer.backend.get_added_tokens_decoder()
    ids = {token.content: number for number, token in added.items()}
    nested = NESTED.search(what.grammar)
    start, end = (0, len(what.grammar)) if nested is None else nested.span(1)
    text = what.grammar[:start] + _as_lark(what.grammar[start:end]) + what.grammar[end:]
    return str(matcher.grammar_from_lark(with_tokens(text, ids)))


def _as_lark(grammar: str) -> str:
    """A grammar in Lark's notation, converted if it is GBNF. Takes up to seconds, as compiling does.

    Raises:
        InvalidArgument: it is GBNF, with an error.
    """
    if _GBNF.search(grammar) is None:
        return grammar
    try:
        return gbnf_to_lark(grammar).removeprefix("%llguidance {}\n\n")
    except Exception as wrong:  # of any kind: the converter raises Exception itself, and IndexError
        reason = "it ends within an escape" if isinstance(wrong, IndexError) else str(wrong)
        raise InvalidArgument(
            "structured_outputs", grammar, f"cannot be read as GBNF: {reason[:200]}"
        ) from None


def _on_stack[T](size: int, work: Callable[[], T]) -> T:
    """Runs `work` in a thread with a stack of this size. Threads started meanwhile may get the same size,
    which is harmless.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="grammar")
    with _stack_size:
        usual = threading.stack_size(size)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    return result.result()
