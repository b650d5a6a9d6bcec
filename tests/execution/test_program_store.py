"""Saved programs are private, and count as absent if there is any doubt about them."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jengine.base.compiles import retrieval_count
from jengine.core.lora import LoraLimits
from jengine.execution import program_folder
from jengine.execution import programs as programs_module
from jengine.execution.device_state import ALLOCATE
from jengine.execution.kinds import Key
from jengine.execution.kinds.sampler import to_sample
from jengine.execution.program_folder import LOCK
from jengine.execution.programs import Programs, open_cache
from jengine.table.program_table import SamplerKey
from tests.execution.specs import make_spec

LIMIT = 1 << 30  # bytes
KEYS: list[Key] = [ALLOCATE, SamplerKey(16, "greedy"), SamplerKey(24, "greedy")]  # quick to compile


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also makes the user's group one with other members."""
    monkeypatch.setattr(programs_module, "program_keys", lambda spec: KEYS)
    monkeypatch.setattr(program_folder, "_others_in", lambda group: True)


def start(root: Path) -> Programs:
    """An engine's use of its store, without warm-up."""
    spec = make_spec()
    return Programs(spec, open_cache(spec, root, LIMIT), threads=1, progress=False)


def answers(programs: Programs) -> list[list[int]]:
    """The saved samplers' output for random weights: the programs work, and are the same."""
    spec, rng = make_spec(), np.random.default_rng(0)

    def filled(x: Any) -> Any:
        return np.zeros(x.shape, x.dtype) if x.dtype == np.int32 else rng.normal(size=x.shape).astype(x.dtype)

    tokens = []
    for key in KEYS[1:]:
        assert isinstance(key, SamplerKey)
        inputs = (spec.leaves, (), spec.slots.last, spec.slots.sampling, to_sample(spec, key))
        inputs = jax.tree.map(lambda x: jax.device_put(filled(x), x.sharding), inputs)
        tokens.append(np.asarray(programs[key](*inputs)[1].tokens).tolist())
    return tokens


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """saved(root): a copy, under root, of a store that was written once; returns the programs' folder."""
    original = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs_module, "program_keys", lambda spec: KEYS)
        assert start(original).compiled == len(KEYS)

    def copy(root: Path) -> Path:
        folder = open_cache(make_spec(), root, LIMIT).folder
        folder.mkdir(parents=True, mode=0o700)
        for file in (original / "programs" / folder.name).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
            (folder / file.name).chmod(0o600)
        return folder

    return copy


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    first = start(tmp_path)
    second = start(tmp_path)
    assert (first.compiled, first.loaded) == (len(KEYS), 0)
    assert (second.compiled, second.loaded) == (0, len(KEYS))
    assert second.memory == first.memory
    assert answers(second) == answers(first)


def test_only_its_user_may_read_or_write_it(tmp_path: Path) -> None:
    start(tmp_path)
    (folder,) = (tmp_path / "programs").iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = list(folder.iterdir())
    assert len(files) == len(KEYS) + 2 and {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def one_program(folder: Path) -> Path:
    return next(file for file in folder.iterdir() if file.name.startswith("sampler-16-greedy"))


def flip_a_bit(folder: Path) -> None:
    data = bytearray(one_program(folder).read_bytes())
    data[len(data) // 2] ^= 1
    one_program(folder).write_bytes(data)


def truncate(folder: Path) -> None:
    one_program(folder).write_bytes(one_program(folder).read_bytes()[:-100])


def swap(folder: Path) -> None:
    """Each file is a valid program, but under the other's name."""
    other = next(file for file in folder.iterdir() if file.name.startswith("sampler-24-greedy"))
    one_program(folder).write_bytes(other.read_bytes())


def change_manifest(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / "manifest.json"
        file.write_text(json.dumps(change(json.loads(file.read_text()))))

    return damage


def wrong_hash(manifest: Any) -> Any:
    manifest["programs"]["sampler-16-greedy"] = "0" * 64
    return manifest


ONE_LOST = {
    "tampered": flip_a_bit,
    "truncated": truncate,
    "swapped": swap,
    "empty": lambda folder: one_program(folder).write_bytes(b""),
    "deleted": lambda folder: one_program(folder).unlink(),
    "wrong hash": change_manifest(wrong_hash),
    "writable by its group": lambda folder: one_program(folder).chmod(0o620),
    "writable by all": lambda folder: one_program(folder).chmod(0o602),
}
ALL_LOST = {
    "folder writable by its group": lambda folder: folder.chmod(0o770),
    "folder writable by all": lambda folder: folder.chmod(0o707),
    "manifest writable by its group": lambda folder: (folder / "manifest.json").chmod(0o660),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "manifest truncated": (
        lambda folder: (folder / "manifest.json").write_bytes((folder / "manifest.json").read_bytes()[:-9])
    ),
    "manifest of no text": lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe\x00"),
    "manifest a list": change_manifest(lambda m: [m]),
    "manifest null": change_manifest(lambda m: None),
    "manifest without programs": change_manifest(lambda m: {"notes": m["notes"]}),
    "manifest without notes": change_manifest(lambda m: {"programs": m["programs"]}),
    "programs a list": change_manifest(lambda m: {**m, "programs": list(m["programs"])}),
    "notes a number": change_manifest(lambda m: {**m, "notes": 3}),
}


@pytest.mark.parametrize(("damage", "lost"),
    [*((d, 1) for d in ONE_LOST.values()), *((d, len(KEYS)) for d in ALL_LOST.values())],
                         ids=[*ONE_LOST, *ALL_LOST])  # fmt: skip
def test_what_is_in_doubt_is_compiled_again(
    damage: Callable[[Path], object],
    lost: int,
    saved: Callable[[Path], Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = saved(tmp_path)
    damage(folder)
    again = start(tmp_path)
    rejected = [record for record in caplog.records if "rejected and compiled again" in record.getMessage()]
    assert len(rejected) == (0 if damage is ALL_LOST["no manifest"] else 1), (
        "a first start has nothing to reject"
    )
    assert (again.compiled, again.loaded) == (lost, len(KEYS) - lost)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    repaired = start(tmp_path)
    assert (repaired.compiled, repaired.loaded) == (0, len(KEYS))
    assert answers(repaired) == answers(again)


def test_what_kubernetes_grants_at_a_mount_is_taken_back(
    saved: Callable[[Path], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """kubelet's fsGroup: chmod g+rw on every file, and g+rwxs on every folder, at each mount."""
    caplog.set_level("INFO", "jengine")
    monkeypatch.setattr(program_folder, "_others_in", lambda group: False)
    monkeypatch.setenv(program_folder.IN_POD, "10.0.0.1")
    folder = saved(tmp_path)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o2770 if path.is_dir() else 0o660)
    again = start(tmp_path)
    assert (again.compiled, again.loaded) == (0, len(KEYS))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir() if file.name != LOCK} == {0o600}
    assert "fsGroupChangePolicy: OnRootMismatch" in caplog.text


@pytest.mark.parametrize(
    ("mode", "uid", "gid", "pod", "others", "believed"),
    [
        (0o660, 7, 7, False, False, True),  # the user's private group
        (0o660, 7, 30, True, False, True),  # fsGroup: 30
        (0o660, 7, 30, False, False, False),  # a group of people who share files
        (0o660, 7, 31, True, False, False),  # not a group of this process
        (0o660, 7, 7, True, True, False),  # someone else was added to it
        (0o660, 8, 7, True, False, False),  # another user's
        (0o662, 7, 7, True, False, False),  # all may write
        (0o664, 7, 7, True, False, False),  # jengine's files were never readable by all: not a mount's doing
        (0o600, 7, 7, True, False, False),  # nothing to repair
    ],
)
def test_a_groups_write_permission_is_a_mounts_only_if_it_let_in_no_one(
    mode: int, uid: int, gid: int, pod: bool, others: bool, believed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 7)
    monkeypatch.setattr(os, "getgid", lambda: 7)
    monkeypatch.setattr(os, "getgroups", lambda: [7, 30])
    monkeypatch.setattr(program_folder, "_others_in", lambda group: others)
    monkeypatch.setenv(program_folder.IN_POD, "10.0.0.1")
    if not pod:
        monkeypatch.delenv(program_folder.IN_POD)
    found = os.stat_result((stat.S_IFREG | mode, 1, 1, 1, uid, gid, 10, 0, 0, 0))
    assert program_folder._granted_by_mount(found) is believed


def test_bytes_that_are_no_program_are_compiled_again(saved: Callable[[Path], Path], tmp_path: Path) -> None:
    """Written rightly, but by a runtime whose programs this one cannot read."""
    folder, junk = saved(tmp_path), b"not a program"
    digest = hashlib.sha256(junk).hexdigest()
    change_manifest(lambda m: {**m, "programs": {**m["programs"], "sampler-16-greedy": digest}})(folder)
    (folder / f"sampler-16-greedy-{digest[:16]}.bin").write_bytes(junk)
    (folder / f"sampler-16-greedy-{digest[:16]}.bin").chmod(0o600)
    assert start(tmp_path).compiled == 1


def test_another_fingerprints_folder_is_left_alone(saved: Callable[[Path], Path], tmp_path: Path) -> None:
    mine = saved(tmp_path)
    other = mine.with_name(f"{'0' * 24}-64")
    mine.rename(other)
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in other.iterdir()}
    assert start(tmp_path).compiled == len(KEYS)
    assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in other.iterdir()} == before
    assert start(tmp_path).loaded == len(KEYS)


def test_the_folder_names_all_that_a_program_depends_on(tmp_path: Path) -> None:
    specs = [
        make_spec(),
        make_spec("llama_mha"),
        make_spec(dtype="bfloat16"),
        make_spec(page_buckets=(12,)),
        *(
            replace(make_spec(), lora=LoraLimits(max_loras=2, max_lora_rank=8, target_modules=targets))
            for targets in (None, ("q_proj",), ("o_proj", "q_proj"))
        ),
    ]
    assert len({spec.fingerprint() for spec in specs}) == len(specs)
    assert make_spec().fingerprint() == specs[0].fingerprint()
    folders = {open_cache(make_spec(num_pages=pages), tmp_path, LIMIT).folder for pages in (64, 65)}
    assert len(folders) == 2, "programs for another number of pages are other programs"


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "programs").write_text("a file where the folder should be")
    with pytest.warns(RuntimeWarning, match="could not be saved"):
        assert start(tmp_path).compiled == len(KEYS)


def _start_with_jax_cache(root: Path) -> None:
    programs_module.program_keys = lambda spec: KEYS
    jax.config.update("jax_compilation_cache_dir", str(root / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    before = retrieval_count()
    expected = answers(start(root / "first"))
    jax.clear_caches()
    assert answers(start(root / "second")) == expected
    assert retrieval_count() > before, "JAX's cache was not used"
    assert answers(start(root / "second")) == expected
    assert answers(start(root / "first")) == expected


def test_what_came_from_jaxs_own_cache_is_not_saved(tmp_path: Path) -> None:
    """Such a program runs, but if serialized again, it would lack its functions."""
    process = multiprocessing.get_context("spawn").Process(target=_start_with_jax_cache, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
