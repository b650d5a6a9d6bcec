"""The packages that users install. The sdist has only its sources, and its wheel works without the checkout,
on the newest Python and with the newest dependencies.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.compiling import FEW_OPTIMIZATIONS

ROOT = Path(__file__).parent.parent
PYTHONS = "3.14", "3.13", "3.12"  # in order of preference
PACKAGES = "jengine", "pallas_kernels"
# few programs to compile
TABLE = "--max-num-seqs=1", "--tile-size=16", "--max-num-batched-tokens=17", "--max-model-len=64"

pytestmark = pytest.mark.timeout(1200)  # a first installation downloads some hundred megabytes


def run(*command: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command without access to this environment, its constraints or the checkout."""
    hidden = ("PYTHON", "VIRTUAL_ENV", "JENGINE", "JAX", "XLA", "PIP_CONSTRAINT", "COVERAGE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(hidden)} | variables
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with a virtual environment of the newest Python at hand in `venv`."""
    folder: Path = tmp_path_factory.mktemp("package")
    found = subprocess.run([ROOT / "tools" / "find_python", *PYTHONS], capture_output=True, text=True)
    run(found.stdout.strip() or sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    return folder


def pip(home: Path, *arguments: str | Path) -> None:
    run(
        home / "venv" / "bin" / "python",
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        *arguments,
        cwd=home,
    )


@pytest.fixture(scope="module")
def sdist(home: Path) -> Path:
    return built(home, ROOT)


def built(home: Path, project: Path) -> Path:
    """The sdist of a folder with a pyproject.toml."""
    pip(home, "install", *tomllib.loads((project / "pyproject.toml").read_text())["build-system"]["requires"])
    out = home / "sdists" / project.name
    command = ("-m", "hatchling", "build", "--target=sdist", f"--directory={out}")
    run(home / "venv" / "bin" / "python", *command, cwd=project)
    [path] = out.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def wheel(home: Path, sdist: Path) -> Path:
    """Made from the sdist, as installers do."""
    pip(home, "wheel", "--no-deps", f"--wheel-dir={home}", sdist)
    [path] = home.glob("jengine-*.whl")
    return path


def described(wheel: Path) -> tuple[set[str], Message]:
    """Names of files, and metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [info] = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        return names, Parser().parsestr(archive.read(f"{info}/METADATA").decode())


@pytest.fixture(scope="module")
def bin(home: Path, wheel: Path) -> Path:
    """The folder of the installed commands."""
    pip(home, "install", "--no-compile", wheel)
    return home / "venv" / "bin"


def test_the_sdist_holds_sources_alone(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tops = {name.partition("/")[0] for name in names}
    assert tops == {
        *PACKAGES,
        *("serving", "benchmarks", "tests", "tools"),
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "pyproject.toml",
        "PKG-INFO",
        ".gitignore",
    }
    data = {
        "jengine/demo/model.safetensors",
        "serving/protos/jengine/v1/generate.proto",
        "pallas_kernels/compilation/targets/h200.txtpb",
    }
    data |= {"jengine/serving/playground/static/index.html", "jengine/insight/profiling/report.html"}
    assert data <= names


def test_the_wheel_is_typed_and_described(wheel: Path) -> None:
    names, metadata = described(wheel)
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {*PACKAGES}
    assert not names & {f"pallas_kernels/{name}" for name in ("LICENSE", "README.md", "pyproject.toml")}
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    classifiers = metadata.get_all("Classifier") or []
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.13"} <= set(classifiers)
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Keywords"]
    assert "all" in (metadata.get_all("Provides-Extra") or [])
    page = metadata.get_payload()
    assert metadata["Description-Content-Type"].startswith("text/markdown") and isinstance(page, str)
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert page.startswith("# jengine\n") and links and all(link.startswith("https://") for link in links)


def test_the_kernels_are_a_distribution_of_their_own(bin: Path, home: Path, tmp_path: Path) -> None:
    """Beside jax, llvmlite and numpy it needs nothing; the example of its page runs."""
    pip(home, "wheel", "--no-deps", f"--wheel-dir={home}", built(home, ROOT / "pallas_kernels"))
    [wheel] = home.glob("paged_pallas-*.whl")
    names, metadata = described(wheel)
    tracked = {str(file.relative_to(ROOT)) for file in (ROOT / "pallas_kernels").rglob("*") if file.is_file()}
    shipped = {
        name for name in tracked if not name.endswith((".pyc", "LICENSE", "README.md", "pyproject.toml"))
    }
    assert {name for name in names if ".dist-info/" not in name} == shipped
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    required = {re.split(r"[^\w-]", line)[0] for line in metadata.get_all("Requires-Dist") or []}
    assert required == {"jax", "llvmlite", "numpy"}
    page = str(metadata.get_payload())
    assert not re.search(r"\]\((?!https:)", page)
    zipfile.ZipFile(wheel).extractall(tmp_path)
    [example] = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    check = "import pallas_kernels, sys; print(pallas_kernels.__file__, 'jengine' in sys.modules)"
    done = run(
        bin / "python", "-c", example + check, cwd=tmp_path, PYTHONPATH=str(tmp_path), JAX_PLATFORMS="cpu"
    )
    assert done.stdout.split() == [str(tmp_path / "pallas_kernels" / "__init__.py"), "False"]


def test_the_client_has_a_public_name(bin: Path, home: Path) -> None:
    names = run(
        bin / "python", "-c", "from jengine import client; print(*client.__all__)", cwd=home
    ).stdout.split()
    assert {"AsyncClient", "Client"} <= set(names)
    assert not [*(home / "venv" / "lib").glob("python*/site-packages/serving")]


def test_the_wheel_has_the_gpu_suite(bin: Path, home: Path) -> None:
    """Its parts for `jengine bench gpu`, whose imports are in the wheel."""
    find = "from jengine.capacity.bench import gpu; print(gpu.suite_folder())"
    folder = Path(run(bin / "python", "-c", find, cwd=home).stdout.strip())
    assert folder.name == "suite"
    parts = "from benchmarks.gpu import correctness, decode, products, engine; print(engine.__file__)"
    assert run(bin / "python", "-c", parts, cwd=folder, JAX_PLATFORMS="cpu").stdout.startswith(str(folder))


def test_the_command_generates(bin: Path, home: Path) -> None:
    variables = {"JENGINE_CACHE_DIR": str(home / "cache"), FEW_OPTIMIZATIONS: "1"}
    done = run(bin / "jengine", "generate", "demo", "def f(", "--max-tokens=8", *TABLE, cwd=home, **variables)
    assert done.stdout.strip()
    line, *more = done.stderr.splitlines()  # the statistics; no warning, no bar
    assert line.startswith("8 tokens, ")
    assert more in ([], ["The compiled programs are saved: the next start loads them."])
