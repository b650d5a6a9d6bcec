"""Traces of each format, as their publishers write them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jengine.base.errors import InvalidArgument
from jengine.capacity.simulation.trace import read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:49.2224670,879,55
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01.259930+00:00,2399,6
"""
BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,API log
119.5,GPT-4,1,276,277,API log
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 27482, "input_length": 1030, "output_length": 26, "hash_ids": [46, 47, 90]}
"""
OURS = """{"jengine_trace": 1, "block": 4}
{"arrival": 2.5, "prompt_tokens": 9, "output_tokens": 3, "prefix": ["a", "b"], "client": "x", \
"lora": "y", \
"ttft_ms": 200, "priority": 2}

{"arrival": 0.5, "prompt_tokens": 7, "output_tokens": 2, "prefix": ["a"]}
{"arrival": 3, "prompt_tokens": 7, "output_tokens": 0}
"""


@pytest.fixture
def read(tmp_path):
    def make(text: str):
        (tmp_path / "trace").write_text(text)
        return read_trace(tmp_path / "trace")

    return make


def test_azure(read):
    trace = read(AZURE)
    np.testing.assert_allclose(trace.arrivals, [0, 2.541877, 4.314579], atol=1e-5)
    assert trace.prompts.tolist() == [374, 879, 396] and trace.outputs.tolist() == [44, 55, 109]
    np.testing.assert_allclose(read(AZURE_2024).arrivals, [0, 1.25], atol=1e-5)


def test_burst_gpt_without_failed_requests(read):
    trace = read(BURST_GPT)
    assert trace.arrivals.tolist() == [0, 40, 114.5] and trace.outputs.tolist() == [18, 230, 276]


def test_mooncakes_equal_ids_are_equal_tokens(read):
    trace = read(MOONCAKE)
    assert trace.arrivals.tolist() == [0, 27.482]
    first, second = trace.prompt_token_ids(0), trace.prompt_token_ids(1)
    assert (len(first), len(second)) == (1100, 1030)
    assert first[:1024] == second[:1024] and not {*first[1024:]} & {*second[1024:]}


def test_recordings(read):
    trace = read(OURS)
    assert trace.arrivals.tolist() == [0, 2]
    assert trace.clients == [None, "x"] and trace.priorities.tolist() == [0, 2]
    np.testing.assert_equal(trace.ttft_ms, [np.nan, 200.0])
    early, late = trace.prompt_token_ids(0), trace.prompt_token_ids(1)
    assert early[:4] == late[:4] and not {*early[4:]} & {*late[4:]} and len(late) == 9


def test_tokens_instead_of_lengths(read):
    lines = [{"jengine_trace": 1}, {"arrival": 0, "prompt_token_ids": [7, 7, 9], "output_tokens": 1},
             {"arrival": 1, "prompt_token_ids": [7, 7, 7], "output_tokens": 1}]  # fmt: skip
    trace = read("\n".join(map(json.dumps, lines)))
    first, second = trace.prompt_token_ids(0), trace.prompt_token_ids(1)
    assert trace.prompts.tolist() == [3, 3] and first[:2] == second[:2] and first[2] != second[2]


def test_no_prompt_is_like_another_where_nothing_is_known(read):
    trace = read(AZURE)
    assert not {*trace.prompt_token_ids(0)} & {*trace.prompt_token_ids(1)}


def test_rates_and_subsets(read):
    trace = read(AZURE).scaled(2.0)
    np.testing.assert_allclose(trace.arrivals, [0, 1.2709385, 2.1572895], atol=1e-5)
    assert trace.take(np.array([1])).prompts.tolist() == [879]
    with pytest.raises(InvalidArgument, match="rate_scale=0"):
        trace.scaled(0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b\n1,2\n", "must have a first line of Azure's CSV"),
        ("", "must have a first line of"),
        ('{"jengine_trace": 2}\n', "jengine_trace=2: must be 1"),
        ('{"jengine_trace": 1}\n{"arrival": 0, "prompt_tokens": 1}\n', "output_tokens.*is missing.*line 2"),
        (
            '{"jengine_trace": 1}\n{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1, "prompt": "x"}\n',
            "no such field.*line 2",
        ),
        ('{"jengine_trace": 1}\n', "at least one request"),
        (MOONCAKE + '{"input_length": 1, "output_length": 1}', "None.*cannot be read.*line 3"),
        (MOONCAKE.replace("[46, 47, 90]", "null"), "None.*not a list.*line 2"),
        (MOONCAKE.replace("[46, 47, 90]", "[[46]]"), "unhashable.*line 2"),
        ('{"jengine_trace": 1}\n{"prompt_token_ids": 5, "output_tokens": 1}', "5.*not a list.*line 2"),
        (OURS.replace('["a"]', '"a"'), "'a'.*not a list.*line 4"),
        (MOONCAKE + "{", "cannot be read.*line 3"),
        (MOONCAKE + "[]", "must be a JSON object.*line 3"),
        (AZURE + "2023-11-16 18:15:50,1\n", "must have 3 columns.*line 5"),
        (AZURE + "yesterday,1,2\n", "yesterday.*line 5"),
        (BURST_GPT + "soon,GPT-4,1,2,3,API log\n", "soon.*line 6"),
        (BURST_GPT.replace("472", "many"), "many.*line 2"),
    ],
)
def test_bad_lines_are_named(read, text, says):
    with pytest.raises(InvalidArgument, match=says):
        read(text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidArgument, match=r"nowhere.*cannot be read"):
        read_trace(tmp_path / "nowhere")
