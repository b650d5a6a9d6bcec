"""The parts of the comparison that need no other engine: the workload, and the summary of answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare
from benchmarks.peers import environments, worker
from benchmarks.peers.registry import ENVIRONMENTS, PEERS, WEIGHTS
from benchmarks.peers.tables import agreement, cell, first_difference, goals, spread, table
from benchmarks.peers.workload import MAX_MODEL_LEN, OUTPUT, PROMPT, SEQUENCES, workload

VOCABULARY = 1000


def facts(**medians: float) -> dict[str, Any]:
    measured = {
        name.replace("_", " "): {"median": value, "min": value, "max": value, "runs": 1}
        for name, value in medians.items()
    }
    return {"measured": measured, "failed": {}}


def test_the_workload_is_the_same_for_all_and_within_its_limits() -> None:
    work = workload(VOCABULARY)
    assert work == workload(VOCABULARY)
    batch = work["measures"]["batch"]
    assert len(batch["prompts"]) == len(batch["outputs"]) == SEQUENCES
    assert all(PROMPT[0] <= len(prompt) <= PROMPT[1] for prompt in batch["prompts"])
    assert all(OUTPUT[0] <= tokens <= OUTPUT[1] for tokens in batch["outputs"])
    stream, prefill = work["measures"]["stream"], work["measures"]["prefill"]
    prompts = [
        work["first"],
        *work["check"]["prompts"],
        *batch["prompts"],
        *stream["prompts"],
        *prefill["prompts"],
    ]
    assert all(2 <= token < VOCABULARY for prompt in prompts for token in prompt)
    # none could be answered from another's cache
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)
    assert all(len(prompt) < MAX_MODEL_LEN for prompt in prompts)
    assert all(
        len(prompt) + tokens <= MAX_MODEL_LEN
        for prompt, tokens in zip(batch["prompts"], batch["outputs"], strict=True)
    )


def test_a_scaled_workload_asks_for_less() -> None:
    measures = workload(VOCABULARY, 0.1)["measures"]
    assert len(measures["batch"]["prompts"]) == len(measures["batch"]["outputs"]) == 3
    assert max(measures["batch"]["outputs"]) <= 26
    assert measures["stream"]["tokens"] == 13


def test_spread() -> None:
    assert spread([3.0, 1.0, 2.004]) == {"median": 2.0, "min": 1.0, "max": 3.0, "runs": 3}


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1


def test_tokens_that_differ_at_a_near_tie_are_counted_apart() -> None:
    ours = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    gaps = [[1.0, 1.0, 1.0], [1.0, 1e-5, 1.0], [1.0, 1.0, 0.5]]
    theirs = [[1, 2, 3], [4, 0, 6], [7, 8, 0]]
    assert agreement(ours, gaps, theirs) == {
        "sequences": 3,
        "same": 1,
        "differ_at_near_ties": 1,
        "differ": 1,
        "tokens_before": 3 + 1 + 2,
        "tokens": 9,
    }


def test_a_cell_tells_the_spread_of_several_runs() -> None:
    assert cell(None, 0) == "-"
    assert cell(spread([10.0]), 1) == "10.0"
    assert cell(spread([10.0, 12.0, 11.0]), 0) == "11 (10..12)"


def test_the_table_marks_the_best_of_each_column() -> None:
    arms = {
        "jengine float32": facts(stream=50, later_start=2),
        "vllm bfloat16": facts(stream=40, later_start=60),
    }
    arms["vllm bfloat16"]["agreement"] = {"tokens_before": 5, "tokens": 9}
    rows = table(arms).splitlines()
    assert len(rows) == 4
    assert "| **50** |" in rows[2] and "| **2.0** |" in rows[2]
    assert "| 40 |" in rows[3] and "| 60.0 |" in rows[3] and rows[3].endswith("| 5 of 9 |")


def test_goals_compare_like_with_like() -> None:
    arms = {
        "jengine float32": facts(stream=40, batch=300, later_start=2),
        "jengine bfloat16": facts(stream=90, batch=500, later_start=3),
        "jengine w8a8": facts(stream=120, batch=600, later_start=4),
        "vllm bfloat16": facts(stream=50, batch=550, later_start=60),
        "openvino float32": facts(stream=60, batch=200),
        "openvino int8+bfloat16": facts(stream=160, batch=700),
    }
    reached = {goal["goal"]: goal for goal in goals(arms)}
    found = {name: (goal["ratio"], goal["ours"], goal["against"]) for name, goal in reached.items()}
    assert found == {
        "ahead of vLLM at bfloat16: one stream": (1.8, "jengine bfloat16", "vllm bfloat16"),
        "ahead of vLLM at bfloat16: 32 at once": (0.91, "jengine bfloat16", "vllm bfloat16"),
        "ahead of OpenVINO at float32: one stream": (0.67, "jengine float32", "openvino float32"),
        "ahead of OpenVINO at float32: 32 at once": (1.5, "jengine float32", "openvino float32"),
        "w8a8 against OpenVINO's int8: one stream": (0.75, "jengine w8a8", "openvino int8+bfloat16"),
        "w8a8 against OpenVINO's int8: 32 at once": (0.86, "jengine w8a8", "openvino int8+bfloat16"),
        # seconds: less is better
        "ahead of vLLM at bfloat16: start": (20, "jengine bfloat16", "vllm bfloat16"),
        "each at its best: one stream": (0.75, "jengine w8a8", "openvino int8+bfloat16"),
        "each at its best: 32 at once": (0.86, "jengine w8a8", "openvino int8+bfloat16"),
    }, "prompts were not measured"
    assert reached["w8a8 against OpenVINO's int8: one stream"]["wanted"] == 0.9


def test_chosen_arms_alternate_with_jengine() -> None:
    names = [arm.name for arm in compare.chosen(["vllm:bfloat16", "openvino"], ["float32", "bfloat16"])]
    assert names == [
        "jengine float32",
        "openvino float32",
        "jengine bfloat16",
        "vllm bfloat16",
        "openvino bfloat16",
    ]


def test_every_peer_names_what_there_is() -> None:
    for peer in PEERS.values():
        assert (Path(worker.__file__).parent / f"{peer.module}.py").exists()
        assert peer.environment is None or peer.environment in ENVIRONMENTS
        assert set(peer.precisions.values()) <= {"", *WEIGHTS}
        assert set(peer.precisions) <= set(compare.ORDER)
    assert {weights.environment for weights in WEIGHTS.values()} <= set(ENVIRONMENTS)


class Counting:
    """Counts up from each prompt's last token. The answer to a prompt of one token is too short."""

    def generate(self, prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
        return [
            list(range(prompt[-1], prompt[-1] + tokens))[len(prompt) == 1 :]
            for prompt, tokens in zip(prompts, outputs, strict=True)
        ]


def test_measures_refuse_answers_of_another_length() -> None:
    engine = Counting()
    assert worker.check(engine, {"prompts": [[1, 2]], "outputs": [3]}) == [[2, 3, 4]]
    assert len(worker.prefill(engine, {"prompts": [[1, 2], [3, 4]]})) == 2
    with pytest.raises(ValueError, match="asked for"):
        worker.batch(engine, {"prompts": [[1]], "outputs": [3]})


def test_expected_seconds_come_from_the_last_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    arms = compare.chosen([], ["float32", "bfloat16"])
    assert set(compare.expected(arms).values()) == {PEERS["jengine"].seconds}
    (tmp_path / f"{compare.result_name()}.json").write_text(
        json.dumps({"arms": {"jengine float32": {"seconds": [90.0, 20.0, 21.0]}}})
    )
    assert compare.expected(arms)["jengine float32"] == (90.0, 21.0)


def test_a_run_saves_what_was_measured_and_why_the_rest_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything except the processes: ctranslate2 produces no first token, llama.cpp answers one of its
    sequences differently."""
    calls: list[str] = []
    saved: dict[str, Any] = {}

    def run(
        arm: compare.Arm, model: Path, cache: Path, work: dict[str, Any], measures: dict[str, Any]
    ) -> dict[str, Any]:
        calls.append(arm.peer)
        arm.seconds.append(1.0)
        if arm.peer == "ctranslate2":
            raise compare.Unavailable("no such instruction")
        if "check" in measures:
            answers = [[7] * tokens for tokens in measures["check"]["outputs"]]
            given = {"check": answers, "gaps": [[1.0] * len(answer) for answer in answers]}
            if arm.peer == "llama.cpp":
                answers[0] = [*answers[0][:-1], 8]
        else:
            given = {"warm up": [1.0], "stream": [50.0, 52.0], "prefill": [900.0], "batch": [300.0]}
        return {"start": 2.0, "versions": {}, "measured": given, "failed": {}}

    monkeypatch.setattr(compare, "run", run)
    monkeypatch.setattr(compare, "made_model", lambda shape: tmp_path)
    monkeypatch.setattr(compare, "environment_python", lambda name: tmp_path)
    monkeypatch.setattr(compare, "weights_folder", lambda name, model: tmp_path)
    monkeypatch.setattr(compare, "save", lambda name, result: saved.update({name: result}))
    monkeypatch.setattr(compare, "PEERS_FOLDER", tmp_path)
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    monkeypatch.setattr(compare.os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(compare.signal, "signal", lambda *_: None)
    command = "compare --peers llama.cpp ctranslate2 --precisions float32 --rounds 2 --once llama.cpp"
    monkeypatch.setattr(compare.sys, "argv", command.split())
    compare.main()
    assert calls == ["jengine", "llama.cpp", "ctranslate2", "jengine", "llama.cpp", "jengine"]
    result = saved[compare.result_name()]
    assert result["not_measured"] == {"ctranslate2 float32": "no such instruction"}
    ours, theirs = result["arms"]["jengine float32"], result["arms"]["llama.cpp float32"]
    assert ours["measured"]["stream"] == {"median": 51.0, "min": 50.0, "max": 52.0, "runs": 4}
    assert theirs["measured"]["later start"]["runs"] == 1
    assert ours["agreement"]["differ"] == 0 and theirs["agreement"]["differ"] == 1
    assert json.loads(json.dumps(result)) == result


FEATURES = """
import faulthandler, subprocess, sys, threading
import llvmlite.binding as llvm

NEWER = "avx512", "amx", "avxvnni", "avx10"

def show():
    known = llvm.get_host_cpu_features()
    assert known["avx2"] and known["fma"], known
    print([name for name, has in known.items() if has and name.startswith(NEWER)], flush=True)

faulthandler.enable()  # another handler of the signal
show()
thread = threading.Thread(target=show)
thread.start()
thread.join()
if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, "again"], check=True)
"""


def test_a_process_takes_its_processor_for_an_older_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So do its threads and the processes that it starts, and what it does about faults works as before."""
    monkeypatch.setattr(environments, "PEERS_FOLDER", tmp_path)
    try:
        variables = environments.as_avx2_only.__wrapped__()
    except environments.Unavailable as reason:
        pytest.skip(str(reason))
    environment = {**os.environ, **variables}
    script = tmp_path / "features.py"
    script.write_text(FEATURES)
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert (done.stdout.split(), done.returncode) == (["[]"] * 4, 0), done.stderr
    crash = [sys.executable, "-X", "faulthandler", "-c", "import ctypes; ctypes.string_at(8)"]
    done = subprocess.run(crash, env=environment, capture_output=True, text=True)
    assert done.returncode == -11 and "Segmentation fault" in done.stderr and "string_at" in done.stderr
