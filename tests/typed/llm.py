"""What a type checker says of LLM and AsyncLLM. Not run: mypy, which is strict, rejects a `type: ignore` that
suppresses nothing, so each of these lines must be an error to it, and the others must not.
"""

from __future__ import annotations

from jengine import LLM, AsyncLLM, SamplingParams


def misspelt(llm: LLM, async_llm: AsyncLLM) -> None:
    llm.genrate("x")  # type: ignore[attr-defined]
    async_llm.genrate("x")  # type: ignore[attr-defined]
    llm.pause("later")  # type: ignore[arg-type]
    LLM("demo", max_num_seqz=8)  # type: ignore[call-arg]
    AsyncLLM("demo", max_num_seqz=8)  # type: ignore[call-arg]
    LLM("demo", max_num_seqs="eight")  # type: ignore[arg-type]
    SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def right(llm: LLM) -> str:
    LLM("demo", max_num_seqs=8, dtype="float32", page_size=16)
    AsyncLLM("demo", progress=False, swap_space=1.0)
    return llm.generate("x", SamplingParams(temperature=1.0))[0].outputs[0].text
