"""The page's Markdown, in Node.js: what it becomes, that nothing else becomes of it, and that it ends."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from typing import Any

import pytest

from tests.docs.blocks import ROOT

MODULE = ROOT / "jengine" / "serving" / "playground" / "static" / "markdown.js"
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs node on the PATH")
TAGS = {
    "a", "blockquote", "code", "del", "em", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "strong",
    "table", "td", "th", "tr", "ul",
}  # fmt: skip
PIECES = [
    "# ", "**", "*", "`", "```", "\n", "\n\n", "- ", "1. ", "> ", "| a | b |\n", "|---|---|\n", "~~", "    ",
    "a", "[x](http://a)", "[x](javascript:a)", "<script>", "---\n", "\\", "wörd ", "](", "&amp;",
]  # fmt: skip


def parsed(*texts: str) -> list[Any]:
    """What each text becomes: [tag, children, address], or text."""
    script = (
        f"import {{ parse }} from {json.dumps(MODULE.as_uri())};"
        "let all = ''; for await (const part of process.stdin) all += part;"
        "console.log(JSON.stringify(JSON.parse(all).map((text) => parse(text))));"
    )
    command = [NODE or "", "--input-type=module", "-e", script]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Hello\nthere", [["p", ["Hello\nthere"]]]),
        ("# A *b* #", [["h3", ["A ", ["em", ["b"]]]]]),
        ("**a `*b*`**", [["p", [["strong", ["a ", ["code", ["*b*"]]]]]]]),
        ("```py\n**a**\n<b>\n```\nx", [["pre", [["code", ["**a**\n<b>"]]]], ["p", ["x"]]]),
        ("```\nnot ended", [["pre", [["code", ["not ended"]]]]]),
        (
            "- a\n- b\n  1. c\n\nd",
            [["ul", [["li", ["a"]], ["li", ["b", ["ol", [["li", ["c"]]], 1]]]], None], ["p", ["d"]]],
        ),
        ("3. a\n4. b", [["ol", [["li", ["a"]], ["li", ["b"]]], 3]]),
        ("> a\n> b\n---", [["blockquote", [["p", ["a\nb"]]]], ["hr", []]]),
        ("| a |\n|:-:|\n| *b* |", [["table", [["tr", [["th", ["a"]]]], ["tr", [["td", [["em", ["b"]]]]]]]]]),
        ("[a](https://b.c/d)", [["p", [["a", ["a"], "https://b.c/d"]]]]),
        ("[a](javascript:b) <img src=x>", [["p", ["[a](javascript:b) <img src=x>"]]]),
        ("2 * 3 * 4, snake_case_name, **open", [["p", ["2 * 3 * 4, snake_case_name, **open"]]]),
    ],
)
def test_what_it_becomes(text: str, expected: list[Any]) -> None:
    assert parsed(text) == [expected]


def check(node: Any) -> str:
    """Only known elements. Returns the text."""
    if isinstance(node, str):
        return node
    tag, children, *more = node
    assert tag in TAGS and (tag != "a" or more[0].startswith(("http://", "https://")))
    return "".join(map(check, children))


def test_any_text() -> None:
    """No letter is lost or added, whatever the text."""
    rng = random.Random(0)
    texts = ["".join(rng.choices(PIECES, k=rng.randrange(40))) for _ in range(2000)]
    for text, nodes in zip(texts, parsed(*texts), strict=True):
        shown = "".join(map(check, nodes))
        assert shown.count("wörd") == text.count("wörd") and shown.count("<script>") == text.count("<script>")


def test_long_texts_end() -> None:
    assert len(parsed(*(piece * 5000 for piece in PIECES))) == len(PIECES)
