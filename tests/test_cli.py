"""The commands themselves: flags, streams, exit codes. A stand-in replaces the engine."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jengine
from jengine import EngineConfig, InvalidArgument, SamplingParams, cli
from jengine.base.options import texts_of
from jengine.base.progress import progress_bar
from jengine.commands import compile as compile_command
from jengine.commands import flags, terminal
from jengine.core.image_options import ImageOptions
from jengine.core.request import CompletionOutput, RequestOutput

STAND_IN = """
import itertools, sys, time
from concurrent.futures import ThreadPoolExecutor
import jengine
from jengine import cli
from jengine.core.request import CompletionOutput, RequestOutput

class Endless:
    def __init__(self, model, **options): pass
    def stream(self, prompt, params, *, lora_request):
        completion = CompletionOutput()
        for token in itertools.count():
            completion.text += "word "
            completion.token_ids.append(token)
            yield RequestOutput(request_id="0", prompt=prompt, prompt_token_ids=[1], outputs=[completion])
            time.sleep(0.001)

jengine.LLM = Endless
sys.exit(cli.main(["generate", "demo", "go"]))
"""


COMPILING = """
import atexit, threading, time
import jengine
from jengine import cli
from jengine.core.request import CompletionOutput, RequestOutput

class Compiling:
    def __init__(self, model, **options):
        threading.Thread(target=time.sleep, args=(600,), name=cli.LATER_PROGRAMS).start()
        atexit.register(print, "the end")
    def stream(self, prompt, params, *, lora_request):
        if prompt == "bad":
            raise jengine.InvalidArgument("prompt", prompt, "must be good")
        completion = CompletionOutput(text="word", token_ids=[1], finish_reason="stop")
        yield RequestOutput(request_id="0", prompt=prompt, prompt_token_ids=[1], outputs=[completion])

jengine.LLM = Compiling
cli.run_process()
"""


class StandIn:
    """Streams its text, one character per token."""

    made: list[tuple[str, dict[str, Any], SamplingParams]] = []  # noqa: RUF012

    def __init__(self, model: str, **options: Any) -> None:
        self.model, self.options = model, options
        self.stats = {"programs_compiled": 3, "programs_loaded": 4, "programs_ready": 7, "programs": 9}
        self.stats["start_seconds"] = {"programs": 1.25}

    def stream(self, prompt: str, params: SamplingParams, *, lora_request: object) -> Iterator[RequestOutput]:
        if prompt == "bad":
            raise InvalidArgument("prompt", prompt, "must be good")
        self.made.append((self.model, self.options, params))
        return self._outputs(prompt)

    def _outputs(self, prompt: str) -> Iterator[RequestOutput]:
        completion = CompletionOutput()
        for token, character in enumerate(f"<{prompt}>"):
            completion.text += character
            completion.token_ids.append(token)
            yield RequestOutput(request_id="0", prompt=prompt, prompt_token_ids=[1], outputs=[completion])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any], SamplingParams]]:
    """The model, engine options and sampling parameters of each generation that the command asked for."""
    monkeypatch.setattr(jengine, "LLM", StandIn, raising=False)
    monkeypatch.delenv("JENGINE_CACHE_DIR")
    monkeypatch.setattr(StandIn, "made", [])
    return StandIn.made


@pytest.mark.parametrize(("prompt", "code", "text"), [("go", 0, "word\nthe end\n"), ("bad", 2, "the end\n")])
def test_the_end_does_not_wait_for_programs_that_are_still_compiled(
    prompt: str, code: int, text: str
) -> None:
    """Exit handlers run nevertheless."""
    command = [sys.executable, "-c", COMPILING, "generate", "demo", prompt, "--no-stats"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (code, text), done.stderr


def test_streams_text_to_stdout_and_statistics_to_stderr(
    made: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "demo", "été"]) == 0
    out, err = capsys.readouterr()
    assert out == "<été>\n"
    assert err.startswith("5 tokens, ") and err.endswith(
        " s after process start, programs: 3 compiled, 4 loaded in 1.2 s, 7 of 9 ready by now\n"
        "The compiled programs are saved: the next start loads them.\n"
    )
    model, options, params = made[0]
    assert (model, options) == ("demo", {"progress": True})
    assert params == SamplingParams(**flags.SAMPLING_DEFAULTS)


@pytest.mark.parametrize("flag", ["--quiet", "--no-stats"])
def test_statistics_can_be_left_out(flag: str, made: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "demo", "go", flag, "--echo"]) == 0
    assert capsys.readouterr() == ("go<go>\n", "")
    assert made[0][1]["progress"] is (flag != "--quiet")


def test_every_field_has_a_flag(made: list[Any]) -> None:
    values: dict[str, Any] = {
        "n": 2, "temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125, "seed": -5, "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True, "stop": ("a", "b"), "stop_token_ids": (3, 4), "logprobs": 2,
        "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "logit_bias": {"5": 2.0},
        "allowed_token_ids": (1, 2), "bad_words": ("no",), "structured_outputs": {"regex": "a+"},
        "include_stop_str_in_output": True,
        "skip_special_tokens": False, "detokenize": True, "prompt_logprobs": 3,
        "revision": "main", "tokenizer": "other",
        "chat_template": "chat.jinja", "dtype": "bfloat16", "max_model_len": 99, "max_num_seqs": 4,
        "max_num_batched_tokens": 100, "page_size": 8, "tile_size": 32, "kv_cache_memory": "64MiB",
        "gpu_memory_utilization": 0.5,
        "enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 4,
        "enable_expert_parallel": True, "data_parallel_size": 2,
        "lora_target_modules": ["q_proj", "experts"],
        "limit_mm_per_prompt": {"image": 0}, "mm_processor_kwargs": {"max_pixels": 9999},
        "image_pool_rows": 4096, "enable_prompt_embeds": True,
        "weight_updates": True, "logprobs_mode": "processed_logprobs",
        "num_pages": 12, "enable_prefix_caching": False, "swap_space": 2.5, "batch_invariant": True,
        "policy": "priority", "priority_ageing": 5.0, "strategy": "memory", "ttft_ms": 500.0, "tpot_ms": 40.0,
        "on_late": "reject",
        "batching": "dynamic", "batch_wait_ms": 7.0,
        "overlap": False, "cache_dir": "somewhere", "cache_max_size": "2GiB", "compile_threads": 3,
        "cpu_threads": 1,
        # with 1 it would follow
        "pipeline_parallel_size": 2, "pipeline_layers": "3,1",
        "tensor_parallel_size": 4, "coordinator": "host:7000", "num_processes": 2, "process_id": 0,
        "generation_config": "vllm", "override_generation_config": {"top_k": 5}, "programs": "compiled",
        "quantization": "int4", "quantization_group_size": 64, "calibration_data": "text",
        "kv_cache_dtype": "int8", "warm_up": "all",
        # batch_invariant allows no other
        "record_trace": "trace", "embeddings": True, "stream_interval": 3, "num_scheduler_steps": "1",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "kv_events_config": {"enable_kv_cache_events": False, "topic": "pages"}, "thinking_token_budget": 9,
        "kv_transfer_config": {"kv_connector": "disk", "kv_connector_extra_config": {"root_dir": "pages"}},
    }  # fmt: skip
    sampling = {field.name for field in dataclasses.fields(SamplingParams)} - {"output_kind"}
    engine = {field.name for field in dataclasses.fields(EngineConfig)} - {"model", "seed"}
    assert set(values) == sampling | engine, "a field was added: give it a value here, other than its default"
    arguments = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            texts = (
                [json.dumps(value)]
                if isinstance(value, dict)
                else value
                if isinstance(value, tuple | list)
                else (value,)
            )
            arguments += [f"--{flag}={text}" for text in texts]
    assert cli.main(["generate", "demo", "go", *arguments]) == 0
    _, options, params = made[0]
    assert params == SamplingParams(**{name: values[name] for name in sampling})
    assert options == {"progress": True, **{name: values[name] for name in engine}}


def test_engine_options_come_from_variables_and_files_too(
    made: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flags override variables, and variables override the file; the server's options in them do not affect
    commands.
    """
    file = tmp_path / "jengine.toml"
    file.write_text("max_num_seqs = 2\ntile_size = 16\npage_size = 8\nport = 1\nmodel = 'other'\n")
    monkeypatch.setenv("JENGINE_TILE_SIZE", "32")
    monkeypatch.setenv("JENGINE_MAX_NUM_SEQS", "3")
    assert cli.main(["generate", "demo", "go", "--max-num-seqs=4", f"--config={file}"]) == 0
    assert made[0][:2] == ("demo", {"progress": True, "max_num_seqs": 4, "tile_size": 32, "page_size": 8})
    monkeypatch.setenv("JENGINE_TILE_SIZE", "0")
    assert cli.main(["generate", "demo", "go"]) == 2
    assert (
        "tile_size=0: must be a whole number, at least 1 (environment variable JENGINE_TILE_SIZE)"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "give either a PROMPT (- reads it from stdin) or --input FILE"),
        (["go", "--input=a", "--output=b"], "give either a PROMPT (- reads it from stdin) or --input FILE"),
        (["go", "--output=b"], "needs --input FILE"),
        (["go", "--retry-errors"], "retry_errors=True: needs --input FILE"),
        (["--input=a", "--retry-errors"], "retry_errors=True: needs --output FILE, which holds the errors"),
    ],
)
def test_either_a_prompt_or_files(
    arguments: list[str], message: str, made: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "demo", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert made == []


@pytest.mark.parametrize("command, common", [("run", "system"), ("chat", "server"), ("serve", "grpc-port")])
def test_help_is_short_and_all_of_it_is_there(
    command: str, common: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for flag in ("--help", "-h", "--help-all"):
        with pytest.raises(SystemExit, match="0"):
            cli.main([command, flag])
        shown.append(capsys.readouterr().out)
    short, same, whole = shown
    assert short == same and len(short.splitlines()) < 110 and 3 * len(short) < len(whole)
    for flag in (f"--{common}", "--max-model-len", "--help-all"):
        assert flag in short and flag in whole
    assert "--page-size" not in short and "--page-size" in whole


def test_the_output_of_a_profile_has_a_short_name() -> None:
    parsed = cli._parser().parse_args(["profile", "-o", "a.html", "localhost:1"])
    assert str(parsed.output) == "a.html"


def test_without_a_command_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: jengine ") and "generate" in out and err == ""


@pytest.mark.parametrize(
    "text, value", [("auto", "auto"), ("none", "none"), (' {"method": "x"}', {"method": "x"})]
)
def test_an_option_that_is_a_word_or_an_object(text: str, value: object) -> None:
    parser = argparse.ArgumentParser()
    flags.add_engine(parser)
    assert parser.parse_args(["--speculative-config", text]).speculative_config == value


def test_compile_prints_flags_that_can_be_given() -> None:
    how = {"method": "draft_model", "model": "small", "num_speculative_tokens": 3}
    flags = compile_command._flags(argparse.Namespace(out="programs", speculative_config=how, page_size=32))
    shown = f"--speculative-config={json.dumps(how)}"
    assert sorted(flags) == ["--page-size=32", "--programs=programs", shown]
    given = {"enable_lora": True, "weight_updates": False, "lora_target_modules": ["q_proj", "v_proj"]}
    flags = compile_command._flags(argparse.Namespace(out="programs", max_model_len=None, **given))
    parsed = cli._parser().parse_args(["generate", "demo", "hi", *flags])
    assert {name: getattr(parsed, name) for name in given} == given and "--max-model-len" not in str(flags)


@pytest.mark.parametrize(
    "command", ["generate", "chat", "serve", "convert", "compile", "plan", "completions"]
)
def test_help_has_no_python_in_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help-all" if command in ("generate", "chat", "serve") else "--help"])
    text = capsys.readouterr().out
    assert not re.findall(r"None|MAX_|True|False|VALUE", text)


def test_help_says_what_repeats_and_how_many(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help-all"])
    text = " ".join(capsys.readouterr().out.split())
    assert (
        re.search(r"--stop TEXT [^-]* \(repeatable\)", text)
        and "at most 64, each" in text
        and "(default: on)" in text
    )


@pytest.mark.parametrize(
    "variables, styled",
    [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"TERM": "xterm", "NO_COLOR": "1"}, False)],
)
def test_notes_are_dim_where_styles_are_wanted(
    variables: dict[str, str],
    styled: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    terminal.note("hello")
    assert capsys.readouterr().err == ("\033[2mhello\033[0m\n" if styled else "hello\n")


@pytest.mark.parametrize(
    "at_terminal, notebook, show, drawn",
    [(1, 0, 1, True), (0, 1, 1, True), (0, 0, 1, False), (1, 0, 0, False)],
)
def test_bars_are_for_people(
    at_terminal: int,
    notebook: int,
    show: int,
    drawn: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: bool(at_terminal))
    from ipykernel.kernelapp import IPKernelApp  # which any process may import

    monkeypatch.setattr(IPKernelApp, "initialized", lambda: bool(notebook))
    assert list(progress_bar([1, 2], show=bool(show), desc="counting")) == [1, 2]
    assert ("counting" in capsys.readouterr().err) == drawn


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completions(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completions", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("generate", "serve", "temperature", "max-num-seqs"))
    if shell == "bash":
        words = (
            "source /dev/stdin; COMP_WORDS=(jengine generate --temp); COMP_CWORD=2; _shtab_jengine; echo"
            " ${COMPREPLY[@]}"
        )
        done = subprocess.run(["bash", "-c", words], input=script, capture_output=True, text=True, check=True)
        assert done.stdout == "--temperature\n"


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", STAND_IN], stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert (done.returncode, done.stderr) == (2, b"jengine: error: No space left on device\n")


def test_flags_whatever_python_does_to_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    """3.13 takes their indentation, -OO all of them."""
    for of in (SamplingParams, ImageOptions):
        helps = texts_of(of)
        monkeypatch.setattr(of, "__doc__", inspect.cleandoc(of.__doc__ or ""))
        assert texts_of(of) == helps
        monkeypatch.setattr(of, "__doc__", None)
        assert texts_of(of) == {}
    with pytest.raises(SystemExit) as exit_:
        cli.main(["generate", "--help-all"])
    assert exit_.value.code == 0


def test_every_flag_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for of in (SamplingParams, EngineConfig):
        helps = texts_of(of)
        assert all(helps[field.name] for field in dataclasses.fields(of))
    with pytest.raises(SystemExit) as exit_:
        cli.main(["generate", "--help-all"])
    assert exit_.value.code == 0
    assert "(default: 0.8)" in capsys.readouterr().out


def test_several_completions_are_written_one_below_the_other(
    made: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first that is unfinished as it comes; those after it, which grow meanwhile, when their turn has
    come.
    """
    first, second, third = (CompletionOutput(index=i) for i in range(3))
    written = []

    def outputs(self: StandIn, prompt: str) -> Iterator[RequestOutput]:
        for completion, text, reason in [
            (second, "b", None), (first, "a", None), (second, "B", "stop"), (first, "A", "length"),
            (third, "c", None), (third, "C", "stop")
        ]:  # fmt: skip
            completion.text, completion.finish_reason = completion.text + text, reason
            completion.token_ids.append(1)
            yield RequestOutput(
                request_id="0", prompt=prompt, prompt_token_ids=[1], outputs=[first, second, third]
            )
            written.append(capsys.readouterr().out)

    monkeypatch.setattr(StandIn, "_outputs", outputs)
    assert cli.main(["generate", "demo", "go", "--n=3", "--echo"]) == 0
    out, err = capsys.readouterr()
    assert written == ["--- 1 of 3 ---\ngo", "a", "", "A\n--- 2 of 3 ---\ngobB\n--- 3 of 3 ---\ngo", "c", "C"]
    assert out == "\n" and err.startswith("6 tokens, ") and made[0][2].n == 3


def test_prompt_from_stdin(
    made: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("two\nlines ü".encode())))
    assert cli.main(["generate", "demo", "-", "--quiet"]) == 0
    assert capsys.readouterr().out == "<two\nlines ü>\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["bad"], "prompt='bad': must be good"),
        (["go", "--temperature=-1"], "temperature=-1.0: must be a finite number, at least 0"),
        (
            ["go", "--n=2", "--temperature=0"],
            "n=2: must be 1 if temperature is 0: greedy completions would all be the same",
        ),
        (["go", "--top-p=nan"], "top_p=nan: must be in (0, 1]"),
        (
            ["go", "--kv-cache-memory=lots"],
            "kv_cache_memory='lots': must be a number of bytes, or text such as 512MiB (command line)",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, made: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "demo", *arguments]) == 2
    assert capsys.readouterr() == ("", f"jengine: error: {message}\n")
    assert made == []


def start(code: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


def test_interrupt_leaves_no_traceback() -> None:
    with start(STAND_IN) as process:
        assert process.stdout is not None
        assert process.stdout.read(10) == b"word word "
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"\n")


def test_interrupt_does_not_wait_for_threads_that_compile() -> None:
    compiling = (
        "with ThreadPoolExecutor() as pool: print('compiling', flush=True); pool.submit(time.sleep, 300)"
    )
    code = STAND_IN.replace(": pass", ":\n        " + compiling)
    with start(code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"compiling\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"\n")


def test_a_reader_that_leaves_is_no_error() -> None:
    with start(STAND_IN) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(10) == b"word word "
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == b""


def test_help_and_version_do_not_wait_for_jax() -> None:
    code = (
        "import sys; from jengine import cli\ntry: cli.main([sys.argv[1]])\nfinally: assert not {'jax',"
        " 'numpy'} & set(sys.modules)"
    )
    for flag, shown in (("--help", "generate"), ("--version", jengine.__version__)):
        done = subprocess.run(
            [sys.executable, "-c", code, flag],
            capture_output=True,
            text=True,
            check=True,
            env=dict(os.environ),
        )
        assert shown in done.stdout
