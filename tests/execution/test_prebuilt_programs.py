"""Prebuilt programs on a CPU: an engine loads them and compiles nothing, or rejects the folder with the
reason.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jengine import cli
from jengine.base.errors import InvalidArgument
from jengine.capacity.planning.ahead_of_time import compile_table
from jengine.core.config import EngineConfig
from jengine.engine.start import start_engine
from jengine.execution.memory import DeviceMemory, ProgramMemory, check_room, pages_beside, pages_that_fit
from jengine.execution.program_store import PrebuiltPrograms, difference
from jengine.execution.programs import program_keys
from tests.execution.specs import make_spec
from tests.golden.weights import Golden, write_model

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 68, "max_model_len": 192, "kv_cache_memory": "512KiB",
    "swap_space": 0.01,
}  # fmt: skip
START = """
import json, sys
from jengine.base.compiles import compile_count
before = compile_count()
from jengine.core.config import EngineConfig
from jengine.core.request import Request, SamplingParams
from jengine.engine.start import start_engine
engine, started = start_engine(EngineConfig.of(sys.argv[1], json.loads(sys.argv[2])), progress=False)
params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
engine.add(Request(request_id="0", prompt_token_ids=json.loads(sys.argv[3]), params=params))
tokens = []
while engine.has_work:
    tokens += [update.token for update in engine.step()]
print(json.dumps([started.programs_compiled, started.programs_loaded, compile_count() - before, tokens]))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and one with its programs, which were compiled from a copy that has config.json
    alone.
    """
    root: Path = tmp_path_factory.mktemp("ahead")
    write_model(root / "model", "llama_gqa")
    (root / "config only").mkdir()
    shutil.copy(root / "model" / "config.json", root / "config only")
    done = compile_table(
        EngineConfig.of(str(root / "config only"), OPTIONS), root / "programs", progress=False
    )
    assert len(done.file_bytes) == len(program_keys(done.spec)) and done.autotune is None
    return root


@pytest.fixture
def programs(compiled: Path, tmp_path: Path) -> Path:
    """A copy that tests may damage."""
    folder: Path = shutil.copytree(compiled / "programs", tmp_path / "programs")
    return folder


def refusal(compiled: Path, programs: Path, **options: Any) -> str:
    """The reason why an engine does not start."""
    config = EngineConfig(**{"model": str(compiled / "model"), **OPTIONS, "programs": programs, **options})
    with pytest.raises(InvalidArgument, match=r"^programs=") as refused:
        start_engine(config, progress=False)
    return str(refused.value)


def test_an_engine_that_is_given_programs_compiles_nothing(compiled: Path, tmp_path: Path) -> None:
    """Counted over the whole life of a process, weights and tokens included."""
    case = Golden.read("llama_gqa").cases[0]
    options = json.dumps({**OPTIONS, "cache_dir": str(tmp_path), "programs": str(compiled / "programs")})
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        START,
        str(compiled / "model"),
        options,
        json.dumps(case.prompt.tolist()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    programs_compiled, programs_loaded, compilations, tokens = json.loads(done.stdout.splitlines()[-1])
    assert (programs_compiled, compilations, tokens) == (0, 0, case.tokens.tolist())
    assert programs_loaded == len(list((compiled / "programs").glob("*.bin")))
    assert {path.name for path in tmp_path.iterdir()} <= {
        "costs",
        "kernels",
    }, "no program is written to the cache"


def test_the_manifest_says_what_was_compiled(compiled: Path) -> None:
    manifest = json.loads((compiled / "programs" / "manifest.json").read_text())
    names = {"memory", "bytes", "compile_seconds"}
    assert (
        names == set(manifest["notes"]) and len({frozenset(manifest["notes"][name]) for name in names}) == 1
    )
    sizes = sorted(file.stat().st_size for file in (compiled / "programs").glob("*.bin"))
    assert sizes == sorted(manifest["notes"]["bytes"].values())
    assert manifest["identity"]["max_model_len"] == 192 and manifest["identity"]["model"]["family"] == "llama"


def test_what_is_left_to_the_machine_is_as_the_folder_has_it(compiled: Path) -> None:
    given = PrebuiltPrograms(compiled / "programs")
    model = str(compiled / "model")
    assert given.complete(EngineConfig(model=model)).num_pages == given.manifest().identity["num_pages"]
    assert given.complete(EngineConfig(model=model)).dtype == "float32"
    chosen = EngineConfig(model=model, dtype="bfloat16", kv_cache_memory="1MiB")
    assert given.complete(chosen) == chosen


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"max_num_seqs": 3}, "max_slots is 4 there, 3 is wanted"),
        ({"max_model_len": 48}, "max_model_len is 192 there, 48 is wanted"),
        ({"dtype": "bfloat16"}, 'dtype is "float32" there, "bfloat16" is wanted'),
        ({"quantization": "int8"}, 'quantization is null there, "int8" is wanted'),
        ({"kv_cache_memory": None, "num_pages": 9}, "num_pages is "),
        ({"page_size": 8}, "page_size is 16 there, 8 is wanted"),
        ({"max_num_batched_tokens": 132}, "table.tile_buckets is [1] there, [1, 2] is wanted"),
    ],
)
def test_other_options_are_refused(compiled: Path, options: dict[str, Any], fact: str) -> None:
    assert f"its programs are for something else: {fact}" in refusal(
        compiled, compiled / "programs", **{**OPTIONS, **options}
    )


def test_another_model_is_refused(compiled: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "other", "llama_mqa")
    assert "model.vocab_size is 96 there, 101 is wanted" in refusal(
        compiled, compiled / "programs", model=str(tmp_path / "other")
    )


def change_fact(name: str, value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["identity"][name] = value
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return change


def a_program(folder: Path) -> Path:
    return next(file for file in folder.iterdir() if file.name.startswith("trunk-"))


def flip_a_bit(folder: Path) -> None:
    data = bytearray(a_program(folder).read_bytes())
    data[len(data) // 2] ^= 1
    a_program(folder).write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (change_fact("jaxlib", "0.0.1"), 'jaxlib is "0.0.1" there, '),
        (change_fact("device", "NVIDIA H200"), 'device is "NVIDIA H200" there, "cpu" is wanted'),
        (change_fact("mesh", {"tensor": 8}), "mesh.tensor is 8 there, 1 is wanted"),
        (flip_a_bit, "is damaged: its hash is not the recorded one"),
        (lambda folder: a_program(folder).unlink(), "cannot be read: No such file or directory"),
        (lambda folder: a_program(folder).chmod(0o602), "writable by no one else"),
        (lambda folder: folder.chmod(0o777), "writable by no one else"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json cannot be read"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json cannot be read"),
    ],
)
def test_a_folder_in_doubt_is_refused(
    compiled: Path, programs: Path, damage: Callable[[Path], object], why: str
) -> None:
    damage(programs)
    assert why in refusal(compiled, programs)


def test_a_program_that_the_manifest_does_not_name_is_not_compiled(compiled: Path, programs: Path) -> None:
    manifest = json.loads((programs / "manifest.json").read_text())
    del manifest["programs"]["count"]
    (programs / "manifest.json").write_text(json.dumps(manifest))
    assert "manifest.json does not name count" in refusal(compiled, programs)


def test_no_folder(compiled: Path, tmp_path: Path) -> None:
    assert "No such file or directory" in refusal(compiled, tmp_path / "nowhere")


def test_a_folder_with_files_is_not_written_to(
    compiled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["compile", str(compiled / "model"), "--out", str(tmp_path)]) == 2
    assert "must be a new or an empty folder" in capsys.readouterr().err


def test_differences_are_named() -> None:
    assert difference({"a": 1, "b": {"c": [1]}}, {"a": 1, "b": {"c": [1]}}) is None
    assert (
        difference({"a": 1, "b": {"c": [1]}}, {"a": 1, "b": {"c": [2]}}) == "b.c is [1] there, [2] is wanted"
    )
    assert difference({"a": 1}, {}) == "a is 1 there, null is wanted"
    assert difference({"a": {"b": 1}}, {"a": None}) == 'a is {"b": 1} there, null is wanted'


def test_pages_are_what_the_rest_leaves() -> None:
    """1 MiB less a fiftieth, weights, state and the largest program's needs; in pages, rounded down to the
    grid of 64.
    """
    spec = make_spec()
    programs = [
        ProgramMemory(arguments=10**9, outputs=9000, aliased=8000, temporaries=2000),
        ProgramMemory(0, 0, 0, 2999),
    ]
    memory = DeviceMemory.of(1 << 20, spec, programs)
    # layers, keys and values, tokens, float32
    page = 2 * 2 * spec.model.config.num_kv_heads * 16 * spec.model.config.head_dim * 4
    assert (memory.working, memory.margin, memory.page) == (
        3000,
        20971,
        page,
    ) and spec.model.config.num_layers == 2
    free = (1 << 20) - 20971 - memory.weights - memory.state - 3000
    assert memory.pages == free // page // 64 * 64 > 0
    config = EngineConfig(model="demo")
    assert pages_beside(config, spec, memory) == min(memory.pages, 1 + 16 * 12)
    assert pages_beside(EngineConfig(model="demo", num_pages=7), spec, memory) == 7
    assert pages_beside(EngineConfig(model="demo", kv_cache_memory=10 * page), spec, memory) == 10


def test_memory_is_that_of_a_device_of_this_process() -> None:
    """Of several processes, the first device may be another's."""
    here = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 1 << 30, "bytes_in_use": 9})
    other = SimpleNamespace(platform="gpu")  # has no statistics here
    mesh = SimpleNamespace(devices=np.array([other, here]), local_devices=[here], shape={"tensor": 1})
    spec = replace(make_spec(), mesh=mesh)
    assert pages_that_fit(EngineConfig(model="demo"), spec) == 1 + 16 * 12
    here.memory_stats = lambda: None  # as of a CPU
    check_room(spec, [])
