"""The documentation builds without warnings, its Python runs, its commands parse, and its names exist."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import api_index
import docs_pages
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

import jengine
import jengine.client
from jengine import LLM, AsyncLLM, EngineConfig, InvalidArgument, SamplingParams
from jengine.checkpoints.in_memory import in_memory
from jengine.parallel.mesh import with_mesh_size
from jengine.serving.config import ServerConfig
from jengine.serving.grpc.client import AsyncClient, Client
from tests.docs.blocks import PAGES, ROOT, Block, blocks_of, name_of
from tests.docs.shell import check, commands
from tests.serving.conftest import TEMPLATE, serve_mock
from tests.text.conftest import byte_level, write

# What the examples' engines are, whatever options they name: these are checked, and one engine serves all
# pages.
ENGINE = {
    "weight_updates": True,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 80,
    "max_model_len": 512,
    "batch_invariant": True,
    "embeddings": True,
    "enable_prompt_embeds": True,
}
GRPC, HTTP = "127.0.0.1:50051", "http://127.0.0.1:8000/v1"
HTTP_ROOT = HTTP.removesuffix("/v1")
# text: output, which varies
CHECKED = {"python", "bash", "console", "json", "toml", "pycon", "promql", "text"}

ids = {"ids": name_of}


# --- the site ----------------------------------------------------------------------------------------


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    # not --quiet, which hides warnings from --strict too
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "max_num_seqs" in (tmp_path / "reference" / "options" / "index.html").read_text()


def test_the_api_has_every_public_name() -> None:
    pages = api_index.pages()
    assert {*pages} == {*api_index.PAGES.glob("*.md")} - {api_index.PAGES / "index.md"}
    found = [name for page in pages for name in api_index.entries(page)]
    assert len({*found}) == len(found)
    assert {name for name in found if "." not in name} == {*jengine.__all__} - {"__version__"}
    assert max(len(api_index.entries(page)) for page in pages) <= 20
    for of in (LLM, AsyncLLM):
        text = "\n".join(page.read_text() for page in pages)
        listed = re.findall(rf"^::: jengine\.{of.__name__}\n.*members: \[(.*)\]", text, re.M)[0].split(", ")
        apart = [name.partition(".")[2] for name in found if name.startswith(f"{of.__name__}.")]
        public = [name for name, _ in inspect.getmembers(of, _has_text) if not name.startswith("_")]
        assert sorted([*listed, *apart]) == sorted(public)


def _has_text(member: object) -> bool:
    return inspect.isfunction(member) or inspect.ismethod(member) or isinstance(member, property)


def test_the_newest_release_is_the_version_that_the_code_reports() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## (\d+)\.(\d+)\.(\d+), (\d{4}-\d\d-\d\d)$", text, re.M)
    assert releases == sorted(releases, reverse=True)
    assert ".".join(releases[0][:3]) == jengine.__version__
    assert (
        re.findall(r"^## (.*)$", text, re.M)[0] == "Unreleased" and text.count("\n## ") == len(releases) + 1
    )
    assert {*re.findall(r"^### (.*)$", text, re.M)} <= {
        "Added",
        "Changed",
        "Deprecated",
        "Removed",
        "Fixed",
        "Security",
    }
    for file in (ROOT / "serving" / "deploy").rglob("kustomization.yaml"):
        for tag in re.findall(r"newTag: (\S+)", file.read_text()):
            assert tag.removesuffix("-cuda") == jengine.__version__
    chart = (ROOT / "serving" / "deploy" / "helm" / "Chart.yaml").read_text()
    assert re.findall(r"^(?:version|appVersion): (\S+)$", chart, re.M) == [jengine.__version__] * 2


@pytest.mark.parametrize("of, sections", [
    (EngineConfig, docs_pages.sections_of(EngineConfig)),
    (ServerConfig, docs_pages.sections_of(ServerConfig)), (SamplingParams, docs_pages.SAMPLING_SECTIONS),
])  # fmt: skip
def test_every_option_is_on_its_page(of: type, sections: dict[str, str]) -> None:
    text = docs_pages.options(of, sections)
    fields = list(of.__dataclass_fields__)  # type: ignore[attr-defined]
    assert re.findall(r"^### `(\w+)`", text, re.M) == fields
    assert re.findall(r"^## (.*)$", text, re.M) == list(sections.values()) and len(sections) > 3
    assert not re.search(r"\n\.\n|`\n\n\n", text), "an option without help"


@pytest.mark.parametrize("page", PAGES, **ids)
def test_files_and_metrics_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    for path in re.findall(
        r"`((?:benchmarks|jengine|notebooks|pallas_kernels|serving|tests|tools)/[\w./-]+)`", text
    ):
        assert (ROOT / path).exists(), path
    exposed = set(re.findall(r"`([\w:]+)`", docs_pages.metrics()))
    for name in re.findall(r"jengine:\w+", text):
        assert re.sub("_(bucket|sum|count)$", "", name) in exposed, name


@pytest.mark.parametrize(
    "name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/NOTES.md"]
)
def test_links_beside_the_site(name: str) -> None:
    """Links to files and headings outside the site; MkDocs checks those between its pages."""
    page = ROOT / name
    headings = {
        re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    }
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        assert (page.parent / path).exists(), path
        assert path or anchor in headings, anchor


# --- blocks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, **ids)
def test_commands_and_data(page: Path) -> None:
    for block in blocks_of(page):
        assert block.language in CHECKED, block.where
        try:
            _check(block)
        except (AssertionError, SystemExit, ValueError, LookupError) as wrong:
            raise AssertionError(f"{block.where}: {wrong!r}") from wrong


def _check(block: Block) -> None:
    match block.language:
        case "bash":
            for words in commands(block.code):
                check(words)
        case "console":
            for line in re.findall(r"^\$ (.*)$", block.code, re.M):
                for words in commands(line):
                    check(words)
        case "json":
            for line in block.code.splitlines():
                json.loads(line)
        case "toml":
            table = tomllib.loads(block.code)
            for model in table.pop("models", {}).values():
                EngineConfig(**model)
            for of in (EngineConfig, ServerConfig):
                of(**{name: table.pop(name) for name in [*table] if name in of.__dataclass_fields__})
            assert not table, table
        case "pycon":
            [expression, said] = block.code.removeprefix(">>> ").splitlines()
            with pytest.raises(InvalidArgument) as raised:
                eval(expression, {"SamplingParams": SamplingParams})
            assert said == f"{raised.typename}: {raised.value}"
        case "python" if not block.runs:
            _check_imports(ast.parse(block.code))


def _check_imports(tree: ast.Module) -> None:
    """Blocks that are not run: the names that they import from this repository exist."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jengine"):
            module = (node.module or "").removeprefix("jengine").strip(".")
            for alias in node.names:
                if module:
                    source = ROOT.joinpath("jengine", *module.split(".")).with_suffix(".py").read_text()
                    assert re.search(rf"\b(class|def) {alias.name}\b|import .*\b{alias.name}\b", source), (
                        alias.name
                    )
                else:
                    assert alias.name in jengine.__all__, alias.name


# --- Python ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", progress=False, **ENGINE) as llm:
        yield llm


@pytest.fixture
def stand_ins(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replaces imports of the examples so that they create no engines and servers."""

    class OneLLM:
        def __new__(cls, model: str, mesh: Any = None, params: Any = None, **options: Any) -> Any:
            EngineConfig.of(model, with_mesh_size(options, mesh))
            assert params is None or in_memory(params)
            return llm

    class OneAsyncLLM:
        def __init__(self, model: str, **options: Any) -> None:
            EngineConfig.of(model, options)

        async def __aenter__(self) -> AsyncLLM:
            self.llm = AsyncLLM("demo", progress=False, **ENGINE)
            return self.llm

        async def __aexit__(self, *_: object) -> None:
            await self.llm.close()

    monkeypatch.setattr(llm, "close", lambda: None)
    monkeypatch.setattr(jengine, "LLM", OneLLM)
    monkeypatch.setattr(jengine, "AsyncLLM", OneAsyncLLM)
    (tmp_path / "tokenizer").mkdir()
    folder = write(byte_level(), tmp_path / "tokenizer")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serve_mock(folder, name="demo", server={"port": 0}) as server:

        def to_server(real: Any, known: str, at: str) -> Any:
            def make(address: str = "", *args: Any, base_url: str = "", **options: Any) -> Any:
                assert known in (address, base_url), "the examples' server"
                return real(at, *args, **options) if address else real(*args, base_url=at, **options)

            return make

        monkeypatch.setattr(jengine.client, "Client", to_server(Client, GRPC, server.address))
        monkeypatch.setattr(jengine.client, "AsyncClient", to_server(AsyncClient, GRPC, server.address))
        monkeypatch.setattr(openai, "OpenAI", to_server(OpenAI, HTTP, server.http))
        root = server.http.removesuffix("/v1")
        monkeypatch.setattr(anthropic, "Anthropic", to_server(Anthropic, HTTP_ROOT, root))
        yield


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(block.runs for block in blocks_of(page, "python"))], **ids
)
def test_python_runs(
    page: Path, stand_ins: None, families: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs a page's blocks from top to bottom in one session."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(page, "python"):
        if block.runs:
            code = compile(block.code, block.where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            waiting = eval(code, names)
            if inspect.iscoroutine(waiting):
                asyncio.run(waiting)
    for value in names.values():
        if isinstance(value, Client | OpenAI | Anthropic):
            value.close()
