"""What a terminal and a notebook show of a model and its answers."""

from __future__ import annotations

from html.parser import HTMLParser

from jengine.display import answer_html, counted, short, table_html
from jengine.request import CompletionOutput, RequestOutput

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
    return RequestOutput(request_id="7", prompt=prompt, prompt_token_ids=[1], outputs=[completion], finished=finished)


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
    assert shown.text == NASTY + NASTY + "500 tokens, finish_reason='stop', stop_reason='\\n'" and "script" not in shown.tags
    assert Visible(output("x", prompt=None)._repr_html_()).text.startswith("[1 token] x")
    several = output("one")
    several.outputs.append(CompletionOutput(text="two"))
    assert Visible(several._repr_html_()).text.count("def f") == 2
    assert Visible(table_html([(NASTY, NASTY)])).text == NASTY * 2
    assert Visible(answer_html("", [])).text == ""


def test_small_parts() -> None:
    assert short(None) == "None" and short("a'b") == '"a\'b"' and short("x" * 61) == repr("x" * 60) + "..."
    assert [counted(n, "page") for n in (0, 1, 2)] == ["0 pages", "1 page", "2 pages"]
