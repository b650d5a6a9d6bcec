"""Finds the lock that a thread waits for, and its probable holder, from frames. Python records neither."""

from __future__ import annotations

import ast
import dis
import linecache
import re
import threading
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from types import CodeType, FrameType

# of threading: wait for a notification, not for a held lock
NOTIFIED = ("wait", "wait_for", "join", "_wait_for_tstate_lock")
WRAPPERS = (threading.__file__,)  # the caller's line is more informative
DEPTH = 4  # innermost frames in which a lock taken by acquire() may be released
WITH = re.compile(r"with\s+([\w.\[\]'\"]+)\s*[:,]")
ACQUIRE = re.compile(r"(.+)\.(acquire|__enter__)\(", re.DOTALL)
FILE_CALL = re.compile(
    r"(?:[\w.\[\]]+\.)?(write|writelines|flush|print|pwrite|writev|fsync|fdatasync|open|rename|unlink)\("
)
WRITES = {"writelines": "write", "flush": "write", "print": "write", "pwrite": "pwrite64", "open": "openat"}


def frames(top: FrameType | None) -> Iterator[FrameType]:
    """From the innermost frame outward."""
    while top is not None:
        yield top
        top = top.f_back


def awaited_lock(top: FrameType) -> str:
    """The lock that a thread tries to acquire in this innermost frame, such as "self._lock"; empty if it does
    not.
    """
    code = top.f_code
    if code.co_filename in WRAPPERS and code.co_name in NOTIFIED:
        return ""
    lock = _lock_at(code, top.f_lasti)
    if code.co_filename in WRAPPERS and lock and top.f_back is not None:  # Condition.__enter__
        return _lock_at(top.f_back.f_code, top.f_back.f_lasti) or lock
    return lock


def waiting_frame(top: FrameType) -> FrameType:
    """The innermost frame outside threading, which is waiting for the lock."""
    return next((frame for frame in frames(top) if frame.f_code.co_filename not in WRAPPERS), top)


@lru_cache(4096)
def _lock_at(code: CodeType, offset: int) -> str:
    if offset < 0:
        return ""
    operation = dis.opname[code.co_code[offset]]
    if operation == "BEFORE_WITH":
        return _source(code, offset - 2)  # the expression loaded before it, or that instruction's cache
    text = _source(code, offset)
    if match := WITH.match(text):  # Python 3.14: the call of __enter__
        return match[1]
    match = ACQUIRE.match(text) if operation.startswith("CALL") else None
    return match[1] if match else ""


def file_call(top: FrameType) -> str:
    """The system call made by the current Python call, such as "fsync" for os.fsync(file); empty if there is
    none.
    """
    return _file_call_at(top.f_code, top.f_lasti)


@lru_cache(4096)
def _file_call_at(code: CodeType, offset: int) -> str:
    if offset < 0 or not dis.opname[code.co_code[offset]].startswith("CALL"):
        return ""
    match = FILE_CALL.match(_source(code, offset))
    return WRITES.get(match[1], match[1]) if match else ""


def _source(code: CodeType, offset: int) -> str:
    """The source text of the expression at an instruction."""
    start, end, left, right = list(code.co_positions())[offset // 2]
    if start is None or end is None or left is None or right is None:
        return ""
    lines = [linecache.getline(code.co_filename, number) for number in range(start, end + 1)]
    if not all(lines):
        return ""
    raw = [line.encode() for line in lines]  # columns count bytes
    raw[-1] = raw[-1][:right]
    raw[0] = raw[0][left:]
    return b"".join(raw).decode(errors="replace").strip()


def holder(waiting: FrameType, lock: str, others: Iterable[tuple[str, FrameType]]) -> str:
    """The probable holder of the lock, as "thread, in function (file:line)"; empty if none is found.

    Such a thread is inside a `with` block for a lock of the same name, or in the same function as the waiting
    thread and past the line at which that thread waits.

    Args:
        others: other threads by name, with their innermost frames.
    """
    name = lock.rpartition(".")[2]
    places = {frame.f_code: frame.f_lineno for frame, _ in zip(frames(waiting), range(DEPTH), strict=False)}
    suspects = []
    for thread, top in others:
        if awaited_lock(top).rpartition(".")[2] == name:
            continue  # it is waiting, too
        for frame in frames(top):
            code, line = frame.f_code, frame.f_lineno
            if name in _withs(code.co_filename, line or 0):
                return f"{thread}, in {frame_name(top.f_code, top.f_lineno)}"
            if line and line > places.get(code, line):
                suspects.append(f"{thread}, in {frame_name(top.f_code, top.f_lineno)}")
    return suspects[0] if len(suspects) == 1 else ""


@lru_cache(4096)
def _withs(file: str, line: int) -> frozenset[str]:
    """Last names of the expressions in `with` statements around this line."""
    return frozenset(name for first, last, name in _blocks(file) if first <= line <= last)


@cache
def _blocks(file: str) -> list[tuple[int, int, str]]:
    """(first line of the body, last line, last name) of each `with` statement of a file."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    blocks = []
    for node in ast.walk(tree):
        if isinstance(node, ast.With):
            for item in node.items:
                name = item.context_expr
                last = (
                    name.attr
                    if isinstance(name, ast.Attribute)
                    else name.id
                    if isinstance(name, ast.Name)
                    else ""
                )
                if last:
                    blocks.append((node.body[0].lineno, node.end_lineno or node.lineno, last))
    return blocks


def frame_name(code: CodeType, line: int | None) -> str:
    """A frame's name, such as "schedule (jengine/scheduling/scheduler.py:120)"."""
    return f"{code.co_qualname} ({_short(code.co_filename)}:{line or code.co_firstlineno})".replace(";", ",")


@cache
def _short(file: str) -> str:
    """The last three parts of a path."""
    return "/".join(file.replace("\\", "/").split("/")[-3:])
