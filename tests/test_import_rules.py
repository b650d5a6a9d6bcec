"""Import rules between packages, checked in the source; and that importing jengine has no side effects."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import jengine
from jengine import cli, spi
from jengine.models import FAMILIES
from tools import layers

ROOT = Path(__file__).parent.parent
FOLDERS = ("jengine", "pallas_kernels")
SERVING = "jengine.serving"
GENERATED = ROOT / "jengine" / "serving" / "generated"
MAX_LINES = 500
MAX_OBJECT_LINES = 450  # of a class with its bases, without docstrings
BUDGET = 99_580  # lines of production code, what is generated included; lower it when there are fewer
MAX_CHAIN = 3  # classes from the most derived to the last base of ours
VAGUE = {"found", "given", "how", "kept", "most", "one", "own", "told"}
# of docstrings: they say nothing without their neighbours
EMPTY_BEGINNINGS = ("See ", "The same", "Of ", "Those ")
# packages of packages, among which there is no circle either
ROOFS = ("jengine.serving", "jengine.insight", "jengine.capacity", "jengine.integrations")
# of pallas_kernels, from the lowest: a folder imports from those before it
KERNEL_FOLDERS = (
    "mosaic",
    "llvm",
    "quantization",
    "elementwise",
    "cache",
    "attention",
    "products",
    "recurrence",
    "compilation",
)
# users of the library, as others are, that come with it
COMMANDS = (
    "jengine.cli",
    "jengine.commands",
    "jengine.integrations",
)
SERVE, CHAT = "jengine.commands.serve", "jengine.commands.chat"  # and these of the network
BATCH = "jengine.commands.batch_openai"  # answers requests as the service does
FLAGS = "jengine.commands.flags"  # takes the engine's options from where the server's come from
# the service's application elsewhere, and a service beside its own
OVER_SERVICE = (
    "jengine.integrations.ray.serve",
    "jengine.integrations.ray.llm_engine",
    "jengine.integrations.smg",
)
CLIENT = "jengine.client"  # the network's client, under a name for users
SPI = "jengine.spi"  # what the service imports beside users' names
# other public names are asked of the module that has them, not of the front door
OPEN_TO_ALL = {"jengine", "jengine.__version__"}
SETUP = "jengine.capacity.simulation.setup"  # from an engine's options; what it makes is plain data
STEP_PLAN = "jengine.scheduling.step_plan"


@dataclass(frozen=True)
class Import:
    importer: str  # module
    target: str  # module, or module.name
    lazy: bool  # inside a function

    def __str__(self) -> str:
        return f"{self.importer} imports {self.target}" + (" (lazily)" if self.lazy else "")


@cache
def sources() -> dict[str, str]:
    """Module name to source, for both packages, without generated code."""
    out = {}
    for folder in FOLDERS:
        for file in sorted(set((ROOT / folder).rglob("*.py")) - set(GENERATED.rglob("*.py"))):
            parts = (folder, *file.relative_to(ROOT / folder).with_suffix("").parts)
            out[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file.read_text()
    return out


def imports_of(modules: dict[str, str]) -> list[Import]:
    return [found for name, source in modules.items() for found in _imports_of_module(name, source)]


@cache
def _imports_of_module(name: str, source: str) -> list[Import]:
    return [*_imports(name, ast.parse(source), lazy=False)]


def _imports(importer: str, node: ast.AST, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(importer, alias.name, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0 and child.module, f"{importer}: relative import; say the full name"
            yield from (Import(importer, f"{child.module}.{alias.name}", lazy) for alias in child.names)
        else:
            yield from _imports(
                importer,
                child,
                lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda),
            )


def inside(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def broken_rules(imports: list[Import]) -> list[str]:
    public = {f"jengine.{name}" for name in jengine.__all__} | {"jengine"}
    exported = {f"{SPI}.{name}" for name in spi.__all__} | {SPI}
    out = []
    for found in imports:
        who, what = found.importer, found.target
        forbidden = (
            (inside(who, "jengine.scheduling") and inside(what, "jax", "jaxlib", "flax", "jengine.execution"))
            or (
                inside(who, "jengine.execution")
                and inside(what, "jengine.scheduling")
                and not inside(what, "jengine.scheduling.step_plan")
            )
            or (
                inside(who, "jengine.capacity.simulation")
                and who != SETUP
                and inside(what, "jax", "jaxlib", "flax", "jengine.execution")
            )
            or (inside(who, "jengine.models") and inside(what, "jengine.execution"))
            or (inside(who, "pallas_kernels") and inside(what, "jengine"))
            or (
                inside(who, SERVING)
                and inside(what, "jengine")
                and not inside(what, SERVING)
                and what not in public | exported
            )
            or (
                not inside(who, SERVING)
                and inside(what, SERVING)
                and not (
                    who == CLIENT
                    or inside(who, *OVER_SERVICE)
                    or (who in (SERVE, CHAT, BATCH, FLAGS) and found.lazy)
                )
            )
            or (
                inside(who, "jengine")
                and not inside(who, SERVING, *COMMANDS)
                and who != "jengine"
                and (what in public - OPEN_TO_ALL or inside(what, SPI))
            )
        )
        if forbidden:
            out.append(str(found))
    return out


def node_of(name: str, modules: dict[str, str]) -> str:
    """The node of a module, or of a name in it: its package within jengine (jengine.text of
    jengine.text.tokenizer), else the module.
    """
    if inside(name, "jengine"):
        return ".".join(name.split(".")[: 3 if inside(name, *ROOFS) else 2])
    return module_of(name, modules)


def module_of(name: str, modules: dict[str, str]) -> str:
    """The module that is imported, or that has the name."""
    return name if name in modules or "." not in name else module_of(name.rpartition(".")[0], modules)


def cycle(
    imports: list[Import],
    modules: dict[str, str],
    node_of: Callable[[str, dict[str, str]], str] = node_of,
) -> list[str]:
    """The nodes along some import cycle; empty when there is none."""
    nodes = {node_of(module, modules) for module in modules}
    graph: dict[str, set[str]] = {}
    for found in imports:
        importer, target = node_of(found.importer, modules), node_of(found.target, modules)
        # the front door imports nothing until asked
        if {importer, target} <= nodes and importer not in (target, "jengine"):
            graph.setdefault(importer, set()).add(target)
    path: list[str] = []
    done: set[str] = set()

    def visit(node: str) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        path.append(node)
        for following in sorted(graph.get(node, ())):
            if loop := visit(following):
                return loop
        done.add(path.pop())
        return []

    return next((loop for node in sorted(graph) if (loop := visit(node))), [])


def test_the_house_keeps_its_rules() -> None:
    assert broken_rules(imports_of(sources())) == []


def test_nothing_outside_of_models_knows_a_family() -> None:
    own = {kind.__module__ for family in FAMILIES.values() for kind in (family.module, *family.parts)}
    found = [
        found
        for found in imports_of(sources())
        if inside(found.target, *own) and not inside(found.importer, "jengine.models")
    ]
    assert len(own) > 15 and not found


def test_no_import_cycle() -> None:
    modules = sources()
    assert cycle(imports_of(modules), modules) == []


def test_no_cycle_between_modules_of_the_engine() -> None:
    """Not even for types alone."""
    modules = {
        name: source for name, source in sources().items() if inside(name, "jengine.engine", "jengine.api")
    }
    assert len(modules) > 40 and cycle(imports_of(modules), modules, module_of) == []


def test_folders_of_kernels_import_downwards() -> None:
    levels = {f"pallas_kernels.{folder}": level for level, folder in enumerate(KERNEL_FOLDERS)}
    folders = {path.parent.name for path in (ROOT / "pallas_kernels").glob("*/__init__.py")}
    assert folders == {*KERNEL_FOLDERS}

    def level(module: str) -> int:
        """Files beside the folders are below them, except for the last one."""
        if module == "pallas_kernels.registration":
            return len(levels)
        return levels.get(".".join(module.split(".")[:2]), -1)

    found = [found for found in imports_of(sources()) if inside(found.importer, "pallas_kernels")]
    assert [str(found) for found in found if level(found.target) > level(found.importer)] == []


@pytest.mark.parametrize(
    "module, source",
    [
        ("jengine.scheduling.requests.policy", "import jax.numpy as jnp"),
        ("jengine.scheduling.requests.policy", "def f():\n    from jengine.execution import runner"),
        ("jengine.execution.batch", "from jengine.scheduling import scheduler"),
        ("jengine.execution.batch", "from jengine.scheduling.pages.blocks import BlockManager"),
        ("jengine.capacity.simulation.replay", "def f():\n    from jengine.execution import memory"),
        ("jengine.models.llama", "from jengine.execution.trunk import Trunk"),
        ("pallas_kernels.attention.xla", "from jengine.core.config import EngineConfig"),
        ("jengine.serving.grpc.server", "from jengine.engine.loop.engine import Engine"),
        ("jengine.serving.grpc.server", "import jengine.engine.loop.engine"),
        ("jengine.serving.grpc.server", "from jengine.vllm.setting import Setting"),
        ("jengine.serving.grpc.server", "from jengine.spi import Setting"),
        ("jengine.engine.loop.engine", "from jengine import SamplingParams"),
        ("jengine.engine.loop.engine", "from jengine.spi import Request"),
        ("jengine.commands.serve", "import jengine.serving"),
        ("jengine.engine.loop.engine", "def f():\n    import jengine.serving.grpc.server"),
        ("jengine.commands.chat", "from jengine.serving.grpc.client import Client"),
        ("jengine.commands.generate", "def f():\n    import jengine.serving.grpc.client"),
    ],
)
def test_each_rule_fires(module: str, source: str) -> None:
    assert broken_rules(imports_of({module: source}))


@pytest.mark.parametrize(
    "module, source",
    [
        ("jengine.execution.batch", "from jengine.scheduling.step_plan import StepPlan"),
        ("jengine.execution.batch", "from jengine.scheduling import step_plan"),
        ("jengine.serving.grpc.server", "import jengine\nfrom jengine import LLM, SamplingParams"),
        ("jengine.serving.grpc.server", "from jengine.spi import Request, start_engine"),
        ("jengine.client", "from jengine.serving.grpc.client import Client"),
        ("jengine.commands.serve", "def serve():\n    from jengine.serving.grpc.server import run"),
        ("jengine.commands.chat", "from jengine import SamplingParams"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert broken_rules(imports_of({module: source})) == []


def test_cycles_are_found() -> None:
    modules = {"jengine": "", "jengine.a": "", "jengine.b.x": "from jengine.a import thing", "jengine.b": ""}
    assert cycle(imports_of(modules), modules) == []
    modules["jengine.a"] = "def lazily():\n    import jengine.b.x"
    assert cycle(imports_of(modules), modules) == ["jengine.a", "jengine.b", "jengine.a"]
    modules = {"pallas_kernels.a.x": "from pallas_kernels.b.y import f", "pallas_kernels.b.y": ""}
    assert cycle(imports_of(modules), modules) == []
    modules["pallas_kernels.b.y"] = "from pallas_kernels.a import x"
    assert cycle(imports_of(modules), modules) == [
        "pallas_kernels.a.x",
        "pallas_kernels.b.y",
        "pallas_kernels.a.x",
    ]


def test_files_stay_short() -> None:
    folders = (*FOLDERS, "tests", "tools", "benchmarks")
    files = {f for folder in folders for f in (ROOT / folder).rglob("*.py")} - set(GENERATED.rglob("*.py"))
    lines = {str(f.relative_to(ROOT)): len(f.read_text().splitlines()) for f in files}
    assert len(lines) > 20
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_production_code_stays_within_its_budget() -> None:
    files = {file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")}
    lines = sum(len(file.read_text().splitlines()) for file in files)
    assert 50_000 < lines <= BUDGET


def vague_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Variables and arguments whose names do not say what they are, with their lines. Fields of classes are
    left out.
    """
    for node in ast.walk(tree):
        fields = node.body if isinstance(node, ast.ClassDef) else []
        for field in fields:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                field.target.ctx = ast.Load()
        if isinstance(node, ast.arg) and node.arg in VAGUE:
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
            yield node.id, node.lineno


def test_names_say_what_they_are() -> None:
    names = {name: [*vague_names(ast.parse(text))] for name, text in sources().items()}
    assert {name: vague for name, vague in names.items() if vague} == {}
    code = "class A:\n    kept: int\n    def f(self, own):\n        one = [most for most in own]"
    assert {*vague_names(ast.parse(code))} == {("own", 3), ("one", 4), ("most", 4)}


def length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def docstrings(tree: ast.AST) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            yield node.body[0]


def test_docstrings_say_what_a_thing_is() -> None:
    empty = [
        f"{name}:{node.lineno}"
        for name, text in sources().items()
        for node in docstrings(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and str(node.value.value).startswith(EMPTY_BEGINNINGS)
    ]
    assert empty == []


def test_objects_stay_short() -> None:
    """A class counts with its bases in this repository: splitting one object over a chain of classes does not
    make it shorter.
    """
    bases: dict[str, list[str]] = {}
    lines: dict[str, int] = {}
    for source in sources().values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                generic = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
                bases[node.name] = [base.id for base in generic if isinstance(base, ast.Name)]
                lines[node.name] = length(node) - sum(map(length, docstrings(node)))

    def chain(name: str) -> list[str]:
        return [
            name,
            *max(
                (chain(base) for base in bases[name] if base in bases and base != name), key=len, default=[]
            ),
        ]

    def whole(name: str) -> set[str]:
        return {name}.union(*[whole(base) for base in bases[name] if base in bases and base != name])

    assert len(bases) > 300
    assert {name: chain(name) for name in bases if len(chain(name)) > MAX_CHAIN} == {}
    assert {
        name: total for name in bases if (total := sum(lines[one] for one in whole(name))) > MAX_OBJECT_LINES
    } == {}


SIDE_EFFECTS = """
import logging, os, signal, sys

def state():
    handlers = [signal.getsignal(s) for s in signal.valid_signals()]
    loggers = logging.root, logging.getLogger("jengine")
    levels = [(list(logger.handlers), logger.level) for logger in loggers]
    return handlers, levels, os.environ.get("XLA_FLAGS")

before, environment = state(), dict(os.environ)
import jengine
assert not {"jax", "numpy", "transformers", "grpc"} & set(sys.modules), "import jengine must be instant"
assert dict(os.environ) == environment
from jengine import cli, spi
assert not {"jax", "numpy", "transformers", "grpc"} & set(sys.modules), "import jengine.spi must be instant"
for module in (jengine, spi):
    for name in module.__all__:
        assert getattr(module, name) is not None
assert "jax" in sys.modules, "LLM needs it, so this checks something"
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
assert state() == before
"""


def test_importing_has_no_side_effects() -> None:
    subprocess.run([sys.executable, "-c", SIDE_EFFECTS], check=True)


LATER = {
    "grpc",
    "huggingface_hub",
    "jax.experimental.mosaic",
    "llguidance",
    "llvmlite",
    "orbax",
    "transformers",
}


def test_a_start_imports_no_more_than_it_needs() -> None:
    code = "import sys; from jengine import LLM, spi; spi.start_engine; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert {"jax", "jengine.engine.start"} <= set(modules) and not LATER & set(modules)


def test_a_command_with_saved_programs_imports_no_more_than_it_needs() -> None:
    """llvmlite links the saved kernels of a CPU."""
    code = "import os, sys; from jengine import cli; cli.main(sys.argv[1:])"
    code += "; print(*sys.modules, flush=True); os._exit(0)"
    few = "--max-num-seqs=1", "--tile-size=16", "--max-num-batched-tokens=17", "--max-model-len=64"
    command = [sys.executable, "-c", code, "generate", "demo", "go", "--max-tokens=2", *few]
    for _ in range(2):  # the first may compile
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "programs: 0 compiled, " in done.stderr
    modules = {*done.stdout.splitlines()[-1].split()}
    others = {"pydantic", "starlette", "tqdm", "uvicorn", "jengine.serving.app"}
    others |= {f"jengine.commands.{name}" for name in cli.COMMANDS.values() if name != "generate"}
    assert "jengine.commands.generate" in modules
    assert not (LATER - {"llvmlite"} | others) & modules


def test_a_server_and_what_it_starts_for_requests_import_no_jax() -> None:
    names = (
        "ChatTemplate, ImageReader, judging_text, probe_structure, rendered_chat"  # of the sandbox's worker
    )
    code = (
        "import sys, jengine.serving.app, jengine.serving.guards.worker;"
        f" from jengine.spi import {names}; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    modules = {*done.stdout.split()}
    assert "starlette" in modules and not {"flax", "jax", "jaxlib", "transformers", "xgrammar"} & modules


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="jengine has no 'LLMS'"):
        _ = jengine.LLMS
    with pytest.raises(AttributeError, match=r"jengine\.spi has no 'Engine'"):
        _ = spi.Engine
    for module in (jengine, spi):
        assert dir(module) == sorted(module.__all__), "no module, no helper"
        stub = (ROOT / "jengine" / Path(str(module.__file__)).name).with_suffix(".pyi").read_text()
        names = {
            alias.asname
            for node in ast.parse(stub).body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        assert names == {*module.__all__}
    assert len(jengine.__all__) <= 45
    assert {*jengine.__all__}.isdisjoint(spi.__all__)


def test_the_picture_of_layers_is_that_of_the_code() -> None:
    assert f"```text\n{layers.picture()}\n```" in (ROOT / "ARCHITECTURE.md").read_text()
    assert layers.layers({"a": set(), "b": {"a"}, "c": set(), "d": {"b", "c"}}) == [["a", "c"], ["b"], ["d"]]
    with pytest.raises(AssertionError, match="a circle"):
        layers.layers({"a": {"b"}, "b": {"a"}})
