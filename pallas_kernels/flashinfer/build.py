"""Compiles FlashInfer's XQA decode kernel (Apache-2.0) for one shape, saves the shared library and registers
it with XLA.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import jax
from platformdirs import user_cache_path

HANDLER = Path(__file__).parent / "xqa.cu"
PACKAGE, VERSIONS = "flashinfer-python", "0.7"  # the handler calls this version's launch function
ARCHITECTURES = {"9.0": "90a"}  # nvcc's names, by compute capability
NAME = "flashinfer_xqa"  # prefix of the kernels' names in programs
SECONDS = 600  # timeout of a compilation, which takes about ten seconds
_registered: set[str] = set()
_lock = threading.RLock()  # programs are traced by several threads


@dataclass(frozen=True)
class Kernel:
    """The parameters of a compiled library.

    Attributes:
        dtype: dtype of queries and cache, bfloat16 or float16.
        group: query heads per kv head.
        windowed: the kernel has a window, whose size is an argument.
        capability: compute capability of the device, such as 9.0.
    """

    dtype: str
    page_size: int
    head_dim: int
    group: int
    windowed: bool
    capability: str

    def options(self) -> list[str]:
        """Options for nvcc, the same on every machine."""
        half = self.dtype == "float16"
        macros = {
            **{
                "NDEBUG": 1,
                "BEAM_WIDTH": 1,
                "USE_INPUT_KV": 0,
                "USE_CUSTOM_BARRIER": 1,
                "SPEC_DEC": 0,
                "LOW_PREC_OUTPUT": 0,
            },
            **{"CACHE_ELEM_ENUM": 0, "INPUT_FP16": int(half), "DTYPE": "__half" if half else "__nv_bfloat16"},
            **{"TOKENS_PER_PAGE": self.page_size, "HEAD_ELEMS": self.head_dim, "HEAD_GRP_SIZE": self.group},
            **{"SLIDING_WINDOW": int(self.windowed)},
        }
        target = ARCHITECTURES[self.capability]
        # as FlashInfer compiles it
        fast = ["-O3", "-std=c++17", "--expt-relaxed-constexpr", "-use_fast_math"]
        return [
            *fast,
            f"-gencode=arch=compute_{target},code=sm_{target}",
            *(f"-D{name}={value}" for name, value in macros.items()),
        ]

    @property
    def target(self) -> str:
        """The kernel's name in programs. It contains a hash of sources and options, so a saved program never
        calls another kernel.
        """
        return (
            f"{NAME}_{hashlib.sha256((source_digest() + ' '.join(self.options())).encode()).hexdigest()[:16]}"
        )


def why_missing() -> str | None:
    """Why the sources are missing or unsupported, or None."""
    version = installed_version()
    if version is None:
        return f"{PACKAGE} is not installed (the extra flashinfer has it)"
    if not version.startswith(VERSIONS + "."):
        return f"{PACKAGE}={version}: {VERSIONS} is supported"
    return (
        None if (_data() / "csrc/xqa/mha.cu").is_file() else f"{PACKAGE}={version}: it has no csrc/xqa/mha.cu"
    )


def installed_version() -> str | None:
    """The package's version, or None if it is not installed."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def why_not_built(kernel: Kernel) -> str | None:
    """Why the kernel's library is missing and cannot be compiled, or None."""
    missing = why_missing()
    if missing is not None or library(kernel).is_file():
        return missing
    return (
        None
        if compiler()
        else "nvcc is not installed: the package nvidia-cuda-nvcc has it; CUDA_HOME or PATH may name another"
    )


def register(kernel: Kernel) -> str:
    """Registers the kernel with XLA once per process. Call it before a program that calls the kernel is
    compiled or loaded.

    Returns:
        The kernel's name for `jax.ffi.ffi_call`.

    Raises:
        RuntimeError: the library is missing and cannot be compiled, or other users can write it. The message
            gives the reason.
    """
    with _lock:
        name = kernel.target
        if name not in _registered:
            handler = ctypes.CDLL(str(built(kernel))).decode
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="CUDA")
            _registered.add(name)
        return name


def built(kernel: Kernel) -> Path:
    """The kernel's library, compiled if it is missing; see `register`."""
    refused = why_not_built(kernel)
    if refused is not None:
        raise RuntimeError(refused)
    file = library(kernel)
    if not file.is_file():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            made = Path(folder) / file.name
            done = subprocess.run(command(kernel, made), capture_output=True, text=True, timeout=SECONDS)
            if done.returncode:
                raise RuntimeError(
                    f"nvcc cannot compile {PACKAGE}'s XQA:"
                    f" {' '.join((done.stderr or done.stdout).split())[-400:]}"
                )
            made.replace(file)  # atomic: several processes may compile the library
    for path in (file, file.parent):
        stat = path.stat()
        if stat.st_uid != os.getuid() or stat.st_mode & 0o022:
            raise RuntimeError(f"{path} must belong to you and be writable by no one else: it is code")
    return file


def library(kernel: Kernel) -> Path:
    """The path of the kernel's library: in JENGINE_CACHE_DIR or, if unset, in jengine's folder of the user's
    cache.
    """
    root = Path(os.environ.get("JENGINE_CACHE_DIR") or user_cache_path("jengine"))
    return root / "flashinfer" / f"{kernel.target}-jaxlib{importlib.metadata.version('jaxlib')}.so"


def command(kernel: Kernel, out: Path) -> list[str]:
    """The command line that compiles the kernel. XLA's headers come from jaxlib, `nv/target` from
    FlashInfer's copy of CCCL.
    """
    nvcc = compiler()
    assert nvcc is not None
    data = _data()
    include = [data / "csrc/xqa", data / "cccl/libcudacxx/include", Path(jax.ffi.include_dir())]
    host = ["-shared", "-Xcompiler", "-fPIC", "--cudart", "static", f"-L{nvcc.parent.parent / 'lib'}", "-w"]
    return [
        str(nvcc),
        *kernel.options(),
        *host,
        *(f"-I{folder}" for folder in include),
        "-o",
        str(out),
        str(HANDLER),
    ]


def compiler() -> Path | None:
    """The path of nvcc: from CUDA_HOME, CUDA_ROOT, NVIDIA's Python packages or PATH, in this order; None if
    there is none.
    """
    folders = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_ROOT") if os.environ.get(name)]
    found = importlib.util.find_spec("nvidia")
    packages = [Path(place) for place in found.submodule_search_locations or ()] if found else []
    folders += sorted((folder for place in packages for folder in place.glob("cu*/bin")), reverse=True)
    named = [folder / "nvcc" for folder in folders] + [Path(path) for path in [shutil.which("nvcc")] if path]
    return next((file for file in named if file.is_file()), None)


@functools.cache
def source_digest() -> str:
    """Hash of the handler and the kernel's sources."""
    digest = hashlib.sha256(HANDLER.read_bytes())
    for file in sorted((_data() / "csrc/xqa").iterdir()):
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _data() -> Path:
    """The folder of FlashInfer's sources. Finding a package does not import it."""
    found = importlib.util.find_spec("flashinfer")
    assert found is not None and found.submodule_search_locations
    return Path(found.submodule_search_locations[0]) / "data"
