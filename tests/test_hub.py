"""Models by name: `jengine pull`, `list`, `rm` and `run`, with huggingface_hub's client and a hub of ours."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest

from jengine.base.errors import ModelError
from jengine.hub.files import HubName, bytes_on_disk, choose_gguf, is_cached, model_files, quantization_of
from jengine.hub.repository import Repository
from tests.checkpoints.gguf_models import write_gguf
from tests.hub_server import COMMIT, Hub, serve_hub
from tests.serving.test_serve_demo import FLAGS
from tests.text.conftest import byte_level
from tests.text.test_gguf_tokenizer import described

DEMO = Path(__file__).parent.parent / "jengine" / "demo"
CHUNK = 10 * 2**20  # bytes; huggingface_hub resumes after whole ones
# runs commands in one process, since imports take seconds
DRIVER = """
import json, sys
from jengine.cli import main
for words in json.loads(sys.argv[1]):
    print("$", flush=True)
    print("$", file=sys.stderr, flush=True)
    print(f"= {main(words)}", flush=True)
"""
Run = Callable[..., list[tuple[str, str]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Repositories: with safetensors, with two GGUF files, and one that jengine does not support."""
    folder = tmp_path_factory.mktemp("hub")
    shutil.copytree(DEMO, folder / "demo")
    (folder / "demo" / "original").mkdir()
    (folder / "demo" / "original" / "consolidated.safetensors").write_bytes(b"x" * 100)
    (folder / "demo" / "README.md").write_text("a model")
    (folder / "demo" / "large.txt").write_bytes(b"x" * (2 * CHUNK + 1))
    (folder / "ggufs").mkdir()
    tokenizer = described(byte_level(), "gpt2", **{"ggml.pre": "llama-bpe"})
    for file, kind in (("tiny-q8_0.gguf", "Q8_0"), ("tiny-Q4_K_M.gguf", "F16")):
        write_gguf(folder / "ggufs" / file, "llama_tied", {"": kind}, tokenizer, intermediate_size=128)
    (folder / "ggufs" / "mmproj-F16.gguf").write_bytes(b"GGUF")
    (folder / "other").mkdir()
    (folder / "other" / "config.json").write_text('{"model_type": "unheard_of"}')
    (folder / "other" / "model.safetensors").write_bytes(b"x" * 1000)
    return {f"some/{name}": folder / name for name in ("demo", "ggufs", "other")}


@pytest.fixture
def hub(models: dict[str, Path]) -> Iterator[Hub]:
    with serve_hub(models) as hub:
        yield hub


@pytest.fixture
def run(hub: Hub, tmp_path: Path) -> Run:
    """Runs commands with an empty cache of models. Returns stdout, with the exit code, and stderr of each."""

    def run(*commands: list[str], stdin: str = "", **more: str) -> list[tuple[str, str]]:
        home = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, json.dumps(commands)],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "HF_TOKEN": "", **home, **more},
        )
        answers = [*zip(done.stdout.split("$\n")[1:], done.stderr.split("$\n")[1:], strict=True)]
        assert len(answers) == len(commands), done.stderr
        return answers

    return run


def test_a_model_is_pulled_and_run(hub: Hub, run: Run, tmp_path: Path) -> None:
    hub.cuts["large.txt"] = [CHUNK + 1]  # the connection breaks in the middle
    pulled, again, ran = run(
        ["pull", "some/demo"],
        ["pull", "some/demo"],
        ["run", "some/demo", "def f(", "--max-tokens", "4", "--temperature", "0", "--quiet", *FLAGS],
        stdin="x):",
    )
    assert pulled[0] == "= 0\n" and "some/demo, revision 01234567: " in pulled[1], pulled
    assert "An engine takes" in pulled[1] and "of weights" in pulled[1]
    assert hub.ranges == [("large.txt", f"bytes={CHUNK}-")], "resumed, not begun again"
    assert hub.sent["model.safetensors"] == (DEMO / "model.safetensors").stat().st_size
    assert not hub.sent["README.md"] and not hub.sent["consolidated.safetensors"]
    assert again == ("= 0\n", "some/demo is complete; nothing to download\n")
    assert ran[0].endswith("\n= 0\n") and len(ran[0]) > len("\n= 0\n"), ran


def test_a_gguf_file_by_its_quantization(hub: Hub, run: Run, tmp_path: Path) -> None:
    code = "from jengine.checkpoints import resolve; import sys; print(resolve(sys.argv[1]).name)"
    (hub.folders["some/ggufs"] / "config.json").write_text('{"model_type": "llama"}')  # no model by itself
    unnamed, planned, pulled, other, wrong = run(
        ["plan", "some/ggufs", "--target", "l4", "--quiet"],
        ["plan", "some/ggufs:Q8_0", "--target", "l4", "--quiet"],
        ["pull", "some/ggufs:q8_0"],
        ["pull", "some/ggufs:Q4_K_M"],
        ["pull", "some/ggufs:Q2_K"],
    )
    assert unnamed[0].endswith("= 0\n") and planned[0].endswith("= 0\n"), (unnamed, planned)
    assert pulled[0] == other[0] == "= 0\n", (pulled, other)
    size = (hub.folders["some/ggufs"] / "tiny-q8_0.gguf").stat().st_size
    assert size <= hub.sent["tiny-q8_0.gguf"] <= 3 * size, "headers before, and the file once"
    assert wrong[0] == "= 2\n" and "it has some/ggufs:Q4_K_M, some/ggufs:Q8_0" in wrong[1]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    for name in ("some/ggufs", "some/ggufs:Q4_K_M"):
        found = subprocess.run(
            [sys.executable, "-c", code, name], capture_output=True, text=True, env={**os.environ, **offline}
        )
        assert found.stdout == "tiny-Q4_K_M.gguf\n", found.stderr


def test_what_the_cache_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = partial(huggingface_hub.scan_cache_dir, tmp_path)
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", scan)
    for repository, files in {
        "some--demo": {"config.json": 2, "model.safetensors": 1000},
        "some--ggufs": {"tiny-Q8_0.gguf": 50, "tiny-Q4_K_M.gguf": 30},
    }.items():
        snapshot = tmp_path / f"models--{repository}" / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (snapshot.parent.parent / "refs").mkdir()
        (snapshot.parent.parent / "refs" / "main").write_text(COMMIT)
        for file, size in files.items():
            (snapshot / file).write_bytes(bytes(size))
    for text, size in {
        "some/demo": 1002,
        "some/ggufs": 50,
        "some/ggufs:q4_k_m": 30,
        "some/ggufs:Q2_K": 0,
    }.items():
        name = HubName.of(text)
        assert name is not None and is_cached(name) == is_cached(name, COMMIT[:7]) == (size > 0)
        assert bytes_on_disk(text) == size and not is_cached(name, "other")
    assert bytes_on_disk("some/other") == 0 and bytes_on_disk(str(tmp_path / "nowhere")) == 0


def test_what_does_not_fit_is_refused_before_its_download(hub: Hub, run: Run) -> None:
    hub.tells["model.safetensors"] = 1 << 60
    hub.gated.add("some/ggufs")
    disk, memory, unsupported, forced, gated, missing, revision, local = run(
        ["pull", "some/demo"],
        ["run", "some/demo", "x", "--kv-cache-memory", "900000GiB"],
        ["pull", "some/other", "--quiet"],
        ["pull", "some/other", "--quiet", "--force"],
        ["pull", "some/ggufs:Q8_0"],
        ["pull", "some/nothing"],
        ["pull", "some/demo", "--revision", "v9"],
        ["pull", str(DEMO)],
        stdin="x",
    )
    assert disk[0] == "= 2\n" and "the disk has" in disk[1] and "--force downloads it anyway" in disk[1]
    assert memory[0] == "= 2\n" and "of memory, and this machine has" in memory[1]
    assert unsupported[0] == "= 2\n" and "an engine cannot load it: " in unsupported[1]
    assert forced[0] == "= 0\n" and hub.sent["model.safetensors"] == 1000
    assert "some/ggufs: is gated: accept its conditions at http://" in gated[1]
    assert "the hub has no such model; if it is private" in missing[1]
    assert "the hub has no revision 'v9' of this model" in revision[1]
    assert "must be a model of the hub" in local[1]


@pytest.mark.parametrize(
    ("file", "quantization"),
    [
        ("Qwen3-0.6B-Q4_K_M.gguf", "Q4_K_M"),
        ("q/model.q8_0.gguf", "Q8_0"),
        ("a-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("a-IQ3_XXS.gguf", "IQ3_XXS"),
        ("a-BF16-00001-of-00002.gguf", "BF16"),
        ("F16.gguf", "F16"),
        ("llama-8b.gguf", None),
    ],
)
def test_quantizations_in_names(file: str, quantization: str | None) -> None:
    assert quantization_of(file) == quantization


def test_which_files_a_model_needs() -> None:
    config = ["config.json", "tokenizer.json", "1_Pooling/config.json", "onnx/model.bin", "README.md"]
    bins = [*config, "pytorch_model.bin"]
    assert model_files(HubName("a/b"), bins) == [*config[:2], "pytorch_model.bin", config[2]]
    both = [*bins, "model.safetensors", "consolidated.safetensors"]
    assert model_files(HubName("a/b"), both) == [*config[:2], "model.safetensors", config[2]]
    for config in [], ["config.json"]:
        assert model_files(HubName("a/b"), [*config, "m-Q8_0.gguf", "m-q4_k_m.gguf"]) == ["m-q4_k_m.gguf"]
    parts = ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf", "m-F16.gguf", "n-F16.gguf"]
    for quantization, message in (
        ("Q8_0", "in 2 files"),
        ("F16", "several files of F16: m-F16.gguf, n-F16.gguf"),
        ("Q2_K", "it has a/b:F16, a/b:Q8_0"),
    ):
        with pytest.raises(ModelError, match=message):
            choose_gguf("a/b", parts, quantization)
    with pytest.raises(ModelError, match=r"neither config\.json nor GGUF files"):
        model_files(HubName("a/b"), ["README.md"])


@pytest.mark.parametrize(
    ("commit", "files", "says"),
    [
        (
            "/elsewhere",
            {"m-Q4_K_M.gguf": 1},
            "names '/elsewhere' as its commit: must be 40 hexadecimal",
        ),
        ("../" + COMMIT, {}, "must be 40 hexadecimal digits"),
        ("None", {}, "must be 40 hexadecimal digits"),
        (COMMIT, {"../x.gguf": 1}, "names '../x.gguf' as a file: must lie within the repository"),
        (COMMIT, {"/x.gguf": 1}, "must lie within the repository"),
        (COMMIT, {"a/./x.gguf": 1}, "must lie within the repository"),
        (COMMIT, {"a\\..\\x.gguf": 1}, "must lie within the repository"),
        (COMMIT, {"a\n.gguf": 1}, "must lie within the repository"),
        (COMMIT, {"x.gguf": -1}, "has -1 bytes: must be from 0"),
        (COMMIT, {"x.gguf": 2**70}, "bytes: must be from 0"),
    ],
)
def test_words_of_a_hub_that_become_paths_are_checked(
    commit: str, files: dict[str, int], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    siblings = [types.SimpleNamespace(rfilename=name, size=size) for name, size in files.items()]
    info = types.SimpleNamespace(sha=commit, siblings=siblings)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: info)
    with pytest.raises(ModelError, match=f"own/model: the hub .*{re.escape(says)}"):
        Repository.find(HubName("own/model", "Q4_K_M"))


def test_many_names_are_cut() -> None:
    files = [f"m{i}-Q4_K_M.gguf" for i in range(20_000)]
    with pytest.raises(ModelError, match="has several files of Q4_K_M") as caught:
        choose_gguf("own/model", files, "Q4_K_M")
    assert len(str(caught.value)) < 2100
