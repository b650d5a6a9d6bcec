"""The source files on which a saved program depends: no program is loaded if they changed."""

from __future__ import annotations

import ast
import functools
import gc
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest

from jengine.execution import sources
from jengine.execution.programs import lower
from jengine.execution.sources import KERNELS, PACKAGES, TRACED, source_files
from tests.execution.specs import make_spec

FILES = [file.relative_to(PACKAGES).as_posix() for file in source_files()]


# searched once only: tests change few texts, and no names
REMEMBERED = {
    "_imported": functools.cache(lambda source, imported=sources._imported: [*imported(source)]),
    "_modules": functools.cache(sources._modules),
}


def digest(packages: Path) -> str:
    with mock.patch.multiple(sources, **REMEMBERED):
        return sources.source_digest.__wrapped__(packages)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of all sources."""
    folder: Path = tmp_path_factory.mktemp("packages")
    for name in ("jengine", KERNELS):
        shutil.copytree(PACKAGES / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "demo"))
    return folder


@pytest.fixture(scope="module")
def before(packages: Path) -> str:
    """The digest that every test finds, as each puts back a file that counts; the same without what is
    remembered.
    """
    whole: str = sources.source_digest.__wrapped__(packages)
    assert digest(packages) == whole
    return whole


def test_every_module_that_lowering_imports_is_hashed() -> None:
    """Modules executed by a process that only imports the code that lowers programs."""
    code = (
        f"import sys, {TRACED}; print(*(m.__file__ for n, m in sys.modules.items() if"
        f" n.startswith(('jengine.', '{KERNELS}'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {Path(file).relative_to(PACKAGES).as_posix() for file in done.stdout.split()}
    assert {
        "jengine/core/request.py",
        "jengine/core/config.py",
        "jengine/models/llama.py",
        "pallas_kernels/attention/xla.py",
    } <= imported
    # which jengine/__init__.py uses, and no program depends on
    names = {"jengine/base/lazy_names.py", "jengine/base/process.py", "jengine/vllm/modules.py"}
    assert imported - set(FILES) == names


def test_every_function_that_tracing_calls_is_in_a_hashed_file() -> None:
    called: set[str] = set()
    mine = threading.get_ident()

    def start(code: object, offset: int) -> object:
        if threading.get_ident() != mine:  # of another test's engine
            return None
        called.add(code.co_filename)  # type: ignore[attr-defined]
        return sys.monitoring.DISABLE

    # a shape that no other test has traced
    spec = make_spec(quantization="w8a8", kv_cache_dtype="int8", num_pages=63)
    keys = spec.table.trunks()[-1], spec.table.samplers()[-1], spec.table.scores()[-1], "count"
    tool, events = sys.monitoring.PROFILER_ID, sys.monitoring
    events.use_tool_id(tool, "sources")
    gc.disable()  # an engine of another test may note its pauses
    try:
        events.register_callback(tool, events.events.PY_START, start)
        events.set_events(tool, events.events.PY_START)
        for key in keys:
            lower(spec, key)
    finally:
        gc.enable()
        events.set_events(tool, 0)
        events.free_tool_id(tool)
    folders = [f"{PACKAGES / name}/" for name in ("jengine", KERNELS)]
    ours = {Path(file).relative_to(PACKAGES).as_posix() for file in called if file.startswith(tuple(folders))}
    assert {"jengine/execution/trunk.py", "jengine/execution/sampler.py", "jengine/models/config.py"} <= ours
    assert ours - set(FILES) <= {"jengine/execution/kernel_objects.py"}, (
        "it only keeps the code of kernels, which are hashed"
    )


def test_imports_are_found_as_python_reads_them() -> None:
    for file in (file for file in source_files() if file.suffix == ".py"):
        source = file.read_bytes()
        found = set(sources._imported(source))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                assert {alias.name for alias in node.names} <= found, file
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0 and {f"{node.module}.{alias.name}" for alias in node.names} <= found, (
                    file
                )


@pytest.mark.parametrize("name", FILES)
def test_a_change_to_any_of_them_changes_the_digest(name: str, packages: Path, before: str) -> None:
    file = packages / name
    text = file.read_bytes()
    file.write_bytes(text + b"# changed\n")
    assert digest(packages) != before
    file.write_bytes(text)
    assert digest(packages) == before


@pytest.mark.parametrize(
    "name", ["cli.py", "commands/serve.py", "text/tokenizer.py", "scheduling/scheduler.py"]
)
def test_other_files_do_not_matter(name: str, packages: Path, before: str) -> None:
    with (packages / "jengine" / name).open("ab") as file:
        file.write(b"# changed\n")
    assert digest(packages) == before


def test_the_digest_and_the_version_are_part_of_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec()
    fingerprints = {spec.fingerprint()}
    monkeypatch.setattr("jengine.execution.spec.source_digest", lambda: "other sources")
    fingerprints.add(spec.fingerprint())
    monkeypatch.setattr("jengine.execution.spec.__version__", "0.0.0")
    fingerprints.add(spec.fingerprint())
    assert len(fingerprints) == 3
