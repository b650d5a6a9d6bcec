"""Conversations with LLM and AsyncLLM: chat completes the rendered template, with its special tokens once."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from jengine import LLM, AsyncLLM, InvalidArgument, ModelError, SamplingParams
from jengine.api import async_llm
from jengine.api.backend import EngineThread
from jengine.api.chat import chat_prompt
from jengine.api.prompts import TokensPrompt
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL

TEMPLATE = """{{ bos_token }}
{%- for message in messages %}{{ '[' + message.role + '] ' + message.content + '\n' }}{% endfor %}
{%- if messages | length == 2 and messages[0] == messages[1] %}{{ raise_exception('take turns') }}{% endif %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
QUESTION = [{"role": "user", "content": "The quick?"}]
HISTORY = [
    {"role": "system", "content": "Be brief."},
    *QUESTION,
    {"role": "assistant", "content": "fox"},
    *QUESTION,
]


@pytest.fixture(scope="module")
def llm(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(text_model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with on_demand():
        return LLM(folder, progress=False, **SMALL, max_model_len=192)


def test_chat_completes_the_rendered_template(llm: LLM) -> None:
    one, two = llm.chat([QUESTION, HISTORY], GREEDY, use_tqdm=False)
    assert one.prompt == "<s>[user] The quick?\n[assistant]"
    assert (
        two.prompt
        == "<s>[system] Be brief.\n[user] The quick?\n[assistant] fox\n[user] The quick?\n[assistant]"
    )
    for output in (one, two):
        assert output.prompt_token_ids.count(0) == 1, (
            "the tokenizer adds <s>, and so does the template: one is enough"
        )
        again = llm.generate(output.prompt_token_ids, GREEDY, use_tqdm=False)[0]
        assert output.outputs == again.outputs and output.finished
    assert [output.outputs for output in llm.chat(QUESTION, [GREEDY], use_tqdm=False)] == [one.outputs]


def test_options_reach_the_template(llm: LLM) -> None:
    half = [*QUESTION, {"role": "assistant", "content": "brown"}]
    assert (
        llm.chat_prompt(half, continue_final_message=True)["prompt"]
        == "<s>[user] The quick?\n[assistant] brown"
    )
    template = "{{ messages[0].content + suffix }}"
    output = llm.chat(
        QUESTION, GREEDY, use_tqdm=False, chat_template=template, chat_template_kwargs={"suffix": "!"}
    )
    assert output[0].prompt == "The quick?!" and 0 not in output[0].prompt_token_ids


def test_what_cannot_be_answered_is_refused_before_anything_runs(llm: LLM, text_model: Path) -> None:
    with pytest.raises(InvalidArgument, match="take turns"):
        llm.chat([QUESTION, QUESTION * 2], GREEDY)
    with pytest.raises(InvalidArgument, match=r"messages\[0\].role='usr'"):
        llm.chat([{"role": "usr", "content": "x"}])
    with pytest.raises(InvalidArgument, match="at least one message"):
        llm.chat([])
    with pytest.raises(InvalidArgument, match="or as many as prompts"):
        llm.chat([QUESTION, QUESTION], [GREEDY])
    assert not llm.engine.has_work
    with pytest.raises(ModelError, match="has no chat template"), on_demand():
        LLM(text_model, progress=False, **SMALL, max_model_len=192).chat(QUESTION)


def test_async_chat(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.chat(HISTORY, GREEDY, use_tqdm=False)[0]
    renderers = []

    def render(*arguments: Any, **options: Any) -> TokensPrompt:
        renderers.append(threading.current_thread())
        return chat_prompt(*arguments, **options)

    monkeypatch.setattr(async_llm, "chat_prompt", render)

    async def main() -> None:
        async with AsyncLLM.over(EngineThread(llm.engine), llm.tokenizer) as online:
            outputs = [
                output
                async for output in online.chat(HISTORY, GREEDY, output_kind="final", request_id="mine")
            ]
            assert [(o.prompt, o.outputs, o.request_id) for o in outputs] == [
                (expected.prompt, expected.outputs, "mine")
            ]
            with pytest.raises(InvalidArgument, match="must be one of system"):
                await anext(online.chat([{"role": "usr", "content": "x"}]))
            assert threading.current_thread() not in renderers, "the event loop was free meanwhile"
            left = online.chat(HISTORY, GREEDY)
            await anext(left)
            await left.aclose()
            assert not online._requests._handles

    asyncio.run(main())


def test_the_model_shows_itself(llm: LLM) -> None:
    shown = repr(llm)
    assert shown.startswith(f"LLM({llm.model!r}, float32, 1 cpu, ")
    assert (
        shown.endswith("119 pages of 16 tokens, 8 sequences at once, 192 tokens each)") and "\n" not in shown
    )
    html = llm._repr_html_()
    assert html.startswith("<table>") and llm.model in html and "119 pages of 16 tokens" in html
