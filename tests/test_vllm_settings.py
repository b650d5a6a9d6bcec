"""Settings of vLLM: each is accepted under its name, renamed, accepted without effect, or refused with what
to do instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import jengine
from jengine import EngineConfig, InvalidArgument, SamplingParams, StructuredOutputs, cli
from jengine.checkpoints.folder import kept_format
from jengine.serving import app
from jengine.serving.config import SERVE_DEFAULTS, ServerConfig
from jengine.serving.guards.access import Access
from jengine.serving.http import front
from jengine.serving.metrics.server_metrics import Metrics
from jengine.serving.options import LoraModule
from jengine.utils import FlexibleArgumentParser
from jengine.vllm.modules import MODULES
from jengine.vllm.setting import whole_number
from jengine.vllm.translate import SAMPLING_SETTINGS, SERVE_SETTINGS, STRUCTURED_SETTINGS
from tools.vllm_same import SAME

NOTHING: dict[str, Any] = {}

# Flags of `vllm serve` as scripts give them: the options that they become, or what the refusal says. "" in
# notes: none.
ACCEPTED: list[tuple[str, dict[str, Any], str]] = [
    ("--max-model-len 4k", {"max_model_len": 4000}, ""),
    ("--max-model-len 4K", {"max_model_len": 4096}, ""),
    ("--max_model_len=8192", {"max_model_len": 8192}, ""),
    ("--max-num-batched-tokens 2K", {"max_num_batched_tokens": 2048}, ""),
    ("--max-num-seqs 8", {"max_num_seqs": 8}, ""),
    ("--gpu-memory-utilization 0.8", {"gpu_memory_utilization": 0.8}, ""),
    ("--tensor-parallel-size 2", {"tensor_parallel_size": 2}, ""),
    ("-tp 2", {"tensor_parallel_size": 2}, ""),
    ("--dtype half", {"dtype": "float16"}, ""),
    ("--dtype float", {"dtype": "float32"}, ""),
    ("--dtype bf16", {"dtype": "bfloat16"}, ""),
    ("--kv-cache-dtype fp8_e4m3", {"kv_cache_dtype": "fp8"}, ""),
    ("--quantization awq", {"quantization": "awq"}, ""),
    ("-q fp8", {"quantization": "fp8"}, ""),
    ("--enable-prefix-caching", {"enable_prefix_caching": True}, ""),
    ("--no-enable-prefix-caching", {"enable_prefix_caching": False}, ""),
    ("--served-model-name gpt", {"served_model_name": "gpt"}, ""),
    ("--seed 7", {"seed": 7}, ""),
    ("--generation-config vllm", {"generation_config": "vllm"}, ""),
    ("--host 0.0.0.0 --port 8000", {"host": "0.0.0.0"}, ""),
    ("--served-model-name a b", {"served_model_name": ("a", "b")}, ""),
    (
        '--default-chat-template-kwargs {"enable_thinking":false}',
        {"default_chat_template_kwargs": {"enable_thinking": False}},
        "",
    ),
    (
        '--override-generation-config {"temperature":0.6,"max_new_tokens":99}',
        {"override_generation_config": {"temperature": 0.6, "max_new_tokens": 99}},
        "",
    ),
    ("--max-model-len auto", NOTHING, ""),
    ("--max-model-len -1", NOTHING, ""),
    ("--enable-log-requests", {"request_log": "-"}, ""),
    ('--structured-outputs-config {"disable_additional_properties":true}', NOTHING, ""),
    ("--attention-backend FLASH_ATTN", NOTHING, "kernels are chosen by device, dtype and shape"),
    ("--numa-bind", NOTHING, "start the command with numactl"),
    ("--model demo", {"model": "demo"}, ""),
    ("--api-key sk-secret", {"api_key": ("sk-secret",)}, ""),
    ("--chat-template chat.jinja", {"chat_template": "chat.jinja"}, ""),
    ("--port 0 --tool-call-parser openai", {"port": 0, "tool_call_parser": "harmony"}, ""),
    ("--port 0 --reasoning-parser qwen3", {"port": 0, "reasoning_parser": "qwen3"}, ""),
    ("--otlp-traces-endpoint http://x:4318", {"otlp_traces_endpoint": "http://x:4318"}, ""),
    (
        '--enable-lora --lora-modules a=b {"name":"c","path":"d","base_model_name":"e"}',
        {"enable_lora": True, "lora_modules": (LoraModule("a", "b"), LoraModule("c", "d", "e"))},
        "",
    ),
    ("--block-size 16", {"page_size": 16}, ""),
    ("--num-gpu-blocks-override 100", {"num_pages": 100}, ""),
    ("--kv-cache-memory-bytes 2G", {"kv_cache_memory": 2 * 2**30}, ""),
    ("--scheduling-policy priority", {"policy": "priority"}, ""),
    ("--no-async-scheduling", {"overlap": False}, ""),
    ("--async-scheduling", {"overlap": True}, ""),
    ("--task embed", {"embeddings": True}, ""),
    ("--runner pooling", {"embeddings": True}, ""),
    ("--ssl-keyfile k --ssl-certfile c", {"tls_key": "k", "tls_cert": "c"}, ""),
    ("--trust-request-chat-template", {"client_chat_templates": True}, ""),
    ("--load-format auto --load-format safetensors", NOTHING, ""),
    ("--tokenizer-mode auto", NOTHING, ""),
    ("--enable-chunked-prefill", NOTHING, ""),
    ("--enable-auto-tool-choice", NOTHING, ""),
    ("--disable-log-requests", NOTHING, ""),
    ("--disable-log-stats", {"log_stats": False}, ""),
    (
        "--allowed-media-domains images.example.com static.example.com",
        {"allowed_media_domains": ("images.example.com", "static.example.com")},
        "",
    ),
    ("--allowed-local-media-path tests", {"allowed_local_media_path": "tests"}, ""),
    ("--limit-mm-per-prompt.image 2", {"limit_mm_per_prompt": {"image": 2}}, ""),
    ('--mm-processor-kwargs {"max_pixels":200704}', {"mm_processor_kwargs": {"max_pixels": 200704}}, ""),
    ('--port 0 --allowed-origins ["*"]', {"port": 0, "allowed_origins": '["*"]'}, ""),
    ("--no-enable-log-requests", NOTHING, ""),
    ("-pp 2 -dp 1", {"pipeline_parallel_size": 2}, ""),
    ("--max-logprobs 20", NOTHING, ""),
    (
        '--speculative-config {"method":"suffix","suffix_decoding_max_tree_depth":64}',
        {"speculative_config": {"method": "suffix", "suffix_decoding_max_tree_depth": 64}},
        "",
    ),
    ("--structured-outputs-config.backend xgrammar", NOTHING, ""),
    (
        "--speculative-config.method ngram --speculative_config.num_speculative_tokens 3",
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        "",
    ),
    ('--structured-outputs-config={"backend":"xgrammar"}', NOTHING, ""),
    ("--enforce-eager", NOTHING, "--enforce-eager has no effect: programs are always compiled"),
    (
        "--trust-remote-code",
        NOTHING,
        "code that comes with a model is never run; model families are part of jengine",
    ),
    ("--no-enable-chunked-prefill", NOTHING, "prompts are always computed in chunks"),
    ("-O3", NOTHING, "-O has no effect: a fixed table of programs"),
    ("--compilation-config.mode 3", NOTHING, "a fixed table of programs"),
    ("--disable-custom-all-reduce", NOTHING, "XLA performs all-reduces"),
    ("--enable-expert-parallel", {"enable_expert_parallel": True}, ""),
    ("--guided-decoding-backend outlines", NOTHING, "llguidance"),
    ("--uvicorn-log-level debug", NOTHING, "see log_level"),
]
REFUSED: list[tuple[str, str]] = [
    ("--pipeline-parallel-size 2 --pipeline-layers 3", "pipeline_layers='3': must be 2 numbers of layers"),
    ("--max-cpu-loras 0", "max_cpu_loras=0: must be a whole number, at least 1"),
    ("--lora-modules a=b", "lora_modules=['a=b']: needs enable_lora (command line)"),
    ("--enable-lora --lora-modules a", "lora_modules='a': must be NAME=PATH, or {"),
    ("--enable-lora --lora-modules a=b a=c", "lora_modules='a': is given twice"),
    ('--speculative-config {"method":"ngram"}', "speculative_config.num_speculative_tokens"),
    ('--speculative-config {"method":"eagle","model":"x"}', "must be ngram"),
    ("--speculative-config.a 1 --speculative-config.a.b 2", "'a' has the value 1, so it has no fields"),
    ("--override-generation-config x", "must be a JSON object such as"),
    (
        '--override-generation-config {"temperature":-1}',
        "override_generation_config.temperature=-1: must be a finite number",
    ),
    (
        '--override-generation-config {"eos_token_id":1}',
        "override_generation_config.eos_token_id=1: there",
    ),
    ("--default-chat-template-kwargs 5", "default_chat_template_kwargs=5: must be"),
    ("--served-model-name a a", "must be text, or different texts"),
    ("--uds /tmp/socket", "sockets in the file system are not served"),
    ("--log-config-file log.json", "see log_level and request_log"),
    ("--chat-template-content-format openai", "must be auto or string"),
    ("--tokenizer-mode slow", "must be auto or hf or mistral"),
    ("--load-format dummy", "weights are read in the format that they have"),
    ("--root-path /llm", "let the proxy remove its prefix"),
    ("--allowed-methods GET", "CORS headers allow what the API needs; see allowed_origins"),
    (
        '--kv-transfer-config {"kv_connector":"NixlConnector","kv_role":"kv_both"}',
        "must be one of disk, remote, sockets; instead of NixlConnector: sockets",
    ),
    (
        '--kv-transfer-config {"kv_connector":"disk","kv_connector_extra_config":{"root_dir":"x"}}',
        "swap_space=0.0: must be above 0 with kv_transfer_config",
    ),
    ("--kv-offloading-size 8", "it is called swap_space here: GiB for each device"),
    ("--cpu-offload-gb 4", "quantization makes them smaller"),
    ("--distributed-executor-backend ray", "coordinator, num_processes and process_id"),
    ("--nnodes 2", "it is called num_processes here"),
    ("--ssl-ca-certs ca.pem", "it is called tls_client_ca here"),
    ("--max-logprobs 50", "at most 20 log probabilities"),
    ("--structured-outputs-config.disable_any_whitespace true", "only backend may be set"),
    ("--structured-outputs-config.disable_additional_properties false", "A request opens its objects with"),
    ("--quantization bitsandbytes", "AWQ, GPTQ and other quantized checkpoints need no option"),
    ("--kv-cache-dtype fp8_e5m2", "must be auto, int8, fp8"),
    ("--kv-cache-dtyp fp8", "there is no such option; did you mean --kv-cache-dtype?"),
    ("--apikey sk-secret", "there is no such option; did you mean --api-key?"),
    ("--api-keys=sk-secret", "a key itself is given as JENGINE_API_KEY or --api-key"),
    ("--max-model-len many", "'many': must be a whole number"),
    ("--tensor-paralel-size=2", "did you mean --tensor-parallel-size?"),
]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ServerConfig, EngineConfig]]:
    """What `jengine serve` would serve."""
    found: list[tuple[ServerConfig, EngineConfig]] = []
    for name in ("JENGINE_CACHE_DIR",):
        monkeypatch.delenv(name, raising=False)
    from jengine.serving.processes import engine_fleet

    class Taken:
        def __init__(self, engine: EngineConfig) -> None:
            self.engine = engine

        def spawn(self) -> None: ...

        def quit(self) -> None: ...

    def run(server: ServerConfig, models: Any, services: Any, http: Any) -> None:
        Access(server, Metrics()) if server.tls_cert is None else None  # reads the keys
        found.append((server, models[0].make(None).engine))

    monkeypatch.setattr(engine_fleet, "maker", lambda server, engine: lambda on_end: Taken(engine))
    monkeypatch.setattr(front, "listen", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(app, "run", run)
    return found


@pytest.mark.parametrize("line, options, note", ACCEPTED, ids=[line for line, *_ in ACCEPTED])
def test_serve_accepts(
    line: str, options: dict[str, Any], note: str, served: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", *([] if "--model " in line else ["demo"]), *line.split()]) == 0
    [(server, engine)] = served
    defaults = dataclasses.asdict(ServerConfig()) | dataclasses.asdict(EngineConfig()) | SERVE_DEFAULTS
    found = dataclasses.asdict(server) | dataclasses.asdict(engine)
    assert found == {**defaults, "warm_up": found["warm_up"], **options}
    err = capsys.readouterr().err
    assert note in err and err.count("\n") == bool(note)


@pytest.mark.parametrize("line, says", REFUSED, ids=[line for line, _ in REFUSED])
def test_serve_says_what_to_do(
    line: str, says: str, served: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with exit code 2 and without secrets."""
    with pytest.raises(SystemExit, match=r"^[12]$"):
        raise SystemExit(cli.main(["serve", "demo", *line.split()]))
    err = capsys.readouterr().err
    assert (
        err.startswith(("jengine serve: error: ", "jengine: error: "))
        and says in err
        and err.count("\n") == 1
    )
    assert "unrecognized" not in err and "secret" not in err and not served


def test_more_than_sixty_settings_are_tried() -> None:
    names = {
        re.findall(r"--?[\w.-]+", line)[0].split("=")[0]
        for line in [line for line, *_ in (*ACCEPTED, *REFUSED)]
    }
    assert len(names) >= 60


@pytest.mark.parametrize("setting", SERVE_SETTINGS.values(), ids=SERVE_SETTINGS)
def test_the_table_is_whole(setting: Any) -> None:
    fields = {field.name for of in (ServerConfig, EngineConfig) for field in dataclasses.fields(of)}
    assert setting.name not in fields, "it is an option"
    assert not setting.to or setting.to in fields
    assert all(name in fields for options in setting.gives.values() for name in options)
    assert setting.to or setting.gives or len(setting.why) > 10
    assert setting.take(None) == ({}, ""), "None asks for nothing"
    assert setting.kind != "renamed" or setting.to or setting.gives or setting.variable
    for fit in setting.fits:
        options, note = setting.take(fit)
        assert note == "" and (not options or setting.to or setting.gives)


def test_settings_with_the_same_name_exist() -> None:
    fields = {field.name for of in (ServerConfig, EngineConfig) for field in dataclasses.fields(of)} | {
        "config"
    }
    assert {*SAME} <= fields


@pytest.mark.parametrize(
    "text, number",
    [
        ("12", 12),
        ("-5", -5),
        ("1k", 1000),
        ("1K", 1024),
        ("25.6k", 25600),
        ("2m", 2 * 10**6),
        ("2M", 2 * 2**20),
        ("1G", 2**30),
        ("1g", 10**9),
    ],
)
def test_whole_numbers_are_vllms(text: str, number: int) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize("text", ["", "k", "1.5", "25.6K", "1.2345k", "4kb", "many", "1 000"])
def test_what_is_no_whole_number(text: str) -> None:
    with pytest.raises(ValueError):
        whole_number(text)


# --- Python --------------------------------------------------------------------------------------------


def test_options_in_python() -> None:
    nothing = {
        "pipeline_parallel_size": 1,
        "distributed_executor_backend": "mp",
        "enable_chunked_prefill": True,
        "enable_sleep_mode": None,
    }
    nothing |= {"task": "auto", "load_format": "gguf", "max_logprobs": 5}
    assert EngineConfig.of("demo", {"block_size": 16, **nothing}) == EngineConfig(page_size=16)
    assert EngineConfig.of("demo", {"dtype": "half", "swap_space": 4}) == EngineConfig(
        dtype="float16", swap_space=4
    )
    assert EngineConfig(hf_overrides={}, speculative_config=None, runner="pooling") == EngineConfig(
        embeddings=True, speculative_config=None
    )  # type: ignore[call-arg]
    for options, says in (
        ({"enable_lora": True, "max_lora_rank": 1024}, "max_lora_rank=1024: must be a whole number"),
        ({"max_logprob": 5}, "did you mean max_logprobs?"),
        ({"block_size": 8, "page_size": 16}, "page_size=16: page_size is given as 8 too"),
        ({"quantization": "bitsandbytes"}, "AWQ, GPTQ and other quantized checkpoints need no option"),
    ):
        with pytest.raises(InvalidArgument, match=re.escape(says)) as refused:
            EngineConfig.of("demo", options)
        assert "secret" not in str(refused.value) and len(str(refused.value)) < 240


def test_a_warning_names_the_callers_line() -> None:
    with pytest.warns(UserWarning, match="enforce_eager=True has no effect") as found:
        EngineConfig.of("demo", {"enforce_eager": True})
    assert Path(found[0].filename).name == Path(__file__).name


def test_sampling_parameters() -> None:
    params = SamplingParams(spaces_between_special_tokens=True, best_of=1, extra_args=None)  # type: ignore[call-arg]
    assert params == SamplingParams()
    schema = {"json": {"type": "object"}}
    for given in (
        StructuredOutputs(json_object=True),
        {"json_object": True},
        StructuredOutputs(**schema, backend="auto"),
    ):  # type: ignore[call-arg,arg-type]
        assert SamplingParams(structured_outputs=given) == SamplingParams(structured_outputs=schema)
    assert SamplingParams(guided_decoding=schema) == SamplingParams(structured_outputs=schema)  # type: ignore[call-arg]
    with pytest.raises(InvalidArgument, match=r"structural_tag='<a>': use a grammar"):
        SamplingParams(structured_outputs={**schema, "structural_tag": "<a>"})
    with pytest.warns(UserWarning, match="spaces_between_special_tokens=False has no effect"):
        SamplingParams(spaces_between_special_tokens=False)  # type: ignore[call-arg]
    for settings, of in ((SAMPLING_SETTINGS, SamplingParams), (STRUCTURED_SETTINGS, StructuredOutputs)):
        assert not {*settings} & {field.name for field in dataclasses.fields(of)}


def test_names_of_the_package() -> None:
    assert jengine.AsyncLLMEngine is jengine.AsyncLLM  # type: ignore[attr-defined]
    assert jengine.AsyncEngineArgs is jengine.EngineArgs is EngineConfig  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="jengine has no 'ModelRegistry': families of jengine are"):
        from jengine import ModelRegistry  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from jengine import Nothing  # type: ignore[attr-defined]  # noqa: F401
    assert not hasattr(jengine, "Nothing")


@pytest.mark.parametrize(
    "options, says",
    [
        (
            {"quantization": "awq"},
            "quantization='awq': this checkpoint is not quantized; None keeps weights as they are",
        ),
        ({"chat_template": "nowhere.jinja"}, "there is no such file, and it is no Jinja template either"),
        ({"tensor_parallel_size": 99}, "JAX_NUM_CPU_DEVICES=99"),
    ],
)
def test_what_only_the_start_can_refuse(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(says)):
        jengine.LLM("demo", progress=False, max_model_len=64, **options)


def test_a_format_that_a_checkpoint_has_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    assert (
        kept_format("gptq", tmp_path)
        is kept_format("gptq_marlin", tmp_path)
        is kept_format(None, tmp_path)
        is None
    )
    assert kept_format("int4", tmp_path) == "int4"
    with pytest.raises(InvalidArgument, match="quantization='awq': this checkpoint is stored as gptq"):
        kept_format("awq", tmp_path)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "modelopt"}}')
    assert kept_format("modelopt", tmp_path) is kept_format("modelopt_fp4", tmp_path) is None


def test_attributes_of_engines() -> None:
    """An AttributeError names what to use instead."""
    for of in (jengine.LLM, jengine.AsyncLLM):
        engine = of.__new__(of)
        for name, says in (
            ("encode", "embed gives embeddings"),
            ("collective_rpc", "LLM.engine is the engine"),
            ("add_lora", "use loras.load"),
        ):
            with pytest.raises(AttributeError, match=re.escape(says)):
                getattr(engine, name)
        assert not hasattr(engine, "nothing_of_the_kind")


@pytest.mark.parametrize("name", ["allowed_media_domains", "allowed_local_media_path"])
def test_options_of_the_server_that_vllms_library_has(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name}='x': .*`jengine serve` has this option"):
        EngineConfig(model="demo", **{name: "x"})


@pytest.mark.parametrize("imported", [True, False])
def test_options_that_become_environment_variables(imported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if huggingface_hub has read them already. Child processes inherit them."""
    constants = SimpleNamespace(HF_HUB_CACHE="before")
    if imported:
        monkeypatch.setitem(sys.modules, "huggingface_hub.constants", constants)
    else:
        monkeypatch.delitem(sys.modules, "huggingface_hub.constants", raising=False)
    for name in ("HF_HUB_CACHE", "HF_TOKEN"):
        monkeypatch.setenv(name, "before")
    assert EngineConfig.of("demo", {"download_dir": None, "hf_token": True}) == EngineConfig()
    assert (os.environ["HF_HUB_CACHE"], os.environ["HF_TOKEN"]) == ("before", "before")
    assert EngineConfig.of("demo", {"download_dir": "/models", "hf_token": "hf_x"}) == EngineConfig()
    assert (os.environ["HF_HUB_CACHE"], os.environ["HF_TOKEN"]) == ("/models", "hf_x")
    assert ("/models" if imported else "before") == constants.HF_HUB_CACHE


def test_a_script_has_the_options_as_flags() -> None:
    parser = FlexibleArgumentParser(description="A script.")
    assert jengine.EngineArgs.add_cli_args(parser) is parser
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("text", nargs="?")
    assert parser.parse_args(["--", "--my_option.x"]).text == "--my_option.x"
    parser.set_defaults(model="other", runner="pooling")
    args = parser.parse_args(["--max_num_seqs", "8", "--block-size=32", "-tp", "1", "--seed", "5"])
    assert args.prompts == 3 and not hasattr(args, "dtype"), "only what is given"
    options = jengine.EngineArgs.from_cli_args(args)
    expected = EngineConfig(model="other", max_num_seqs=8, page_size=32, seed=5, embeddings=True)
    assert dataclasses.asdict(options) == dataclasses.asdict(expected)


@pytest.mark.parametrize("module", MODULES)
def test_modules_of_vllm(module: str) -> None:
    """Each name is that of jengine, or at its home."""
    made = importlib.import_module(f"jengine.{module}")
    assert dir(made) == sorted(made.__all__) != []
    for name in made.__all__:
        assert getattr(made, name) is not None
        if hasattr(jengine, name):
            assert getattr(made, name) is getattr(jengine, name)
    stub = Path(str(jengine.__file__)).parent / (module.replace(".", "/") + ".pyi")
    if stub.exists():  # for type checkers
        names = re.findall(r"^(\w+) = \w+$| as (\w+)$", stub.read_text(), re.MULTILINE)
        assert {*made.__all__} == {alias or name for alias, name in names}


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        (
            "import jengine.distributed.parallel_state",
            "there is no module 'jengine.distributed': devices exchange",
        ),
        ("from jengine.assets.image import ImageAsset", "there is no module 'jengine.assets': it downloads"),
        (
            "from jengine.entrypoints.openai import api_server",
            "jengine.entrypoints.openai': run `jengine serve`",
        ),
        (
            "from jengine.outputs import PoolingOutput",
            "jengine.outputs has no 'PoolingOutput': use EmbeddingOutput",
        ),
        ("from jengine.outputs import Nothing", "cannot import name 'Nothing'"),
        ("import jengine.nothing", "No module named 'jengine.nothing'"),
        ("import jengine.engine.nothing", "No module named 'jengine.engine.nothing'"),
    ],
)
def test_modules_that_do_not_exist(statement: str, says: str) -> None:
    with pytest.raises(ImportError) as failed:
        exec(statement)
    assert says in str(failed.value)
