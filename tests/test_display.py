"""Display of a model and its answers in terminals and notebooks."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from jengine.api.embeddings import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from jengine.base import display
from jengine.base.display import Summary, answer_html, counted, image_html, short, table_html
from jengine.core.request import CompletionOutput, RequestOutput
from jengine.insight.recording.trace import Trace
from tests.observe.virtual import make_virtual

NASTY = "</pre><script>alert('&')</script> \"quoted\"\n  indented"


class Visible(HTMLParser):
    """The text that a browser would show; checks that tags are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.open, self.tags = "", [], set()
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def output(text: str, prompt: str | None = "def f", finished: bool = True) -> RequestOutput:
    ended = {"finish_reason": "stop", "stop_reason": "\n"} if finished else {}
    completion = CompletionOutput(text=text, token_ids=[1] * 500, **ended)  # type: ignore[arg-type]
    return RequestOutput(
        request_id="7", prompt=prompt, prompt_token_ids=[1], outputs=[completion], finished=finished
    )


def test_a_line_in_a_terminal() -> None:
    expected = (
        "RequestOutput('7', prompt='def f', 1 prompt token, finished=True, "
        "outputs=[CompletionOutput('(x)', 500 tokens, finish_reason='stop', stop_reason='\\n')])"
    )
    assert repr(output("(x)")) == expected
    assert "CompletionOutput('', 500 tokens, unfinished)" in repr(output("", finished=False))
    assert len(repr(output("x" * 10_000, prompt="y" * 10_000))) < 350


def test_a_notebook_shows_text_as_it_is() -> None:
    shown = Visible(output(NASTY, prompt=NASTY)._repr_html_())
    assert (
        shown.text == NASTY + NASTY + "500 tokens, finish_reason='stop', stop_reason='\\n'"
        and "script" not in shown.tags
    )
    assert Visible(output("x", prompt=None)._repr_html_()).text.startswith("[1 token] x")
    several = output("one")
    several.outputs.append(CompletionOutput(text="two"))
    assert Visible(several._repr_html_()).text.count("def f") == 2
    assert Visible(table_html([(NASTY, NASTY)])).text == NASTY * 2
    assert Visible(answer_html("", [])).text == ""


def test_small_parts() -> None:
    assert short(None) == "None" and short("a'b") == '"a\'b"' and short("x" * 61) == repr("x" * 60) + "..."
    assert [counted(n, "page") for n in (0, 1, 2)] == ["0 pages", "1 page", "2 pages"]


def test_a_notebook_shows_embeddings_and_scores() -> None:
    embedding = EmbeddingRequestOutput(
        request_id="1",
        outputs=EmbeddingOutput(embedding=[0.5] * 8),
        prompt_token_ids=[1, 2],
        num_cached_tokens=0,
    )
    assert (
        Visible(embedding._repr_html_()).text
        == "prompt2 tokens, 0 cachedembedding8 dimensions: " + "0.5000, " * 6 + "..."
    )
    score = ScoringRequestOutput(
        request_id="1", outputs=ScoringOutput(score=0.25), prompt_token_ids=[1], num_cached_tokens=0
    )
    assert Visible(score._repr_html_()).text == "prompt1 token, 0 cachedscore0.2500"


def test_a_notebook_shows_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    virtual = make_virtual(monkeypatch)
    virtual.ask(40, 20)
    virtual.ask(40, 20, at=0.05)
    trace = virtual.run()
    html = trace._repr_html_()
    assert trace.plot().startswith(b"\x89PNG") and 'src="data:image/png;base64,' in html
    shown = html.partition("<img")[0]
    assert "2 requests" in shown and "38 tokens" in shown and "80 tokens of prompts" in shown
    monkeypatch.setattr(display, "find_spec", lambda name: None)
    assert "<img" not in trace._repr_html_(), "without matplotlib"
    empty = Trace.empty(trace.facts)
    assert "0 steps" in empty._repr_html_() and empty.plot()
    assert "<script" not in image_html(lambda: b"", "<script>")


def test_a_summary() -> None:
    """It has only text, so that a notebook may keep it when the model is gone."""
    shown = Summary("LLM", (("model", "demo"), ("numbers", "float32"), ("state", "<open>")))
    assert repr(shown) == "LLM('demo', float32, <open>)"
    assert Visible(shown._repr_html_()).text == "modeldemonumbersfloat32state<open>"
