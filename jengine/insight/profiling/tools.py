"""Programs that observe this process from outside, if they are installed and allowed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from jengine.insight.profiling.proc import allow_tracing

END_SECONDS = 20.0
# A shell starts the tool and waits for a line first: only then is the tool's process id known, and can be
# given permission.
STARTER = 'read -r _ && exec "$@"'


class Tool:
    """A program that runs during the profile, and writes a file when it is interrupted.

    Args:
        command: may contain {pid}, of the observed process, and {file}.

    Attributes:
        why: the reason why it wrote nothing; empty if it did.
    """

    def __init__(self, command: list[str], file: Path) -> None:
        self.file, self.why = file, ""
        arguments = [part.replace("{pid}", str(os.getpid())).replace("{file}", str(file)) for part in command]
        environment = {**os.environ, "LC_ALL": "C"}
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", STARTER, "sh", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        allow_tracing(self._process.pid)
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.close()
        self._process.stdin = None

    def stop(self) -> str:
        """Its output; empty if there is none (see `why`)."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            _, errors = self._process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            _, errors = self._process.communicate()
        allow_tracing(0)
        text = self.file.read_text(errors="replace") if self.file.is_file() else ""
        self.file.unlink(missing_ok=True)
        if not text.strip():
            lines = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
            self.why = (
                lines[0][:200]
                if lines
                else f"it ended with code {self._process.returncode} and wrote nothing"
            )
        return text


def installed(name: str) -> str:
    """The path of a program, next to this Python or on the PATH; empty if it is missing."""
    beside = Path(sys.executable).parent / name
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(name) or ""


def works(command: list[str]) -> str:
    """Tries a short command. Returns the reason if it is not allowed here, or an empty string."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=END_SECONDS,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    return "" if not done.returncode else lines[0][:200] if lines else f"it ended with code {done.returncode}"
