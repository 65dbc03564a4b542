"""Runs a program that a model wrote, in a process of its own with limits on time, memory and network. Linux alone.

It protects from accidents: endless loops, floods of memory or output, programs that stop before their tests. It is no wall
against an attacker: the program has the user's rights to files, and code of the same process can forge the verdict.
"""

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers_falcon_spec.errors import FalconSpecError, OptionError

INNER = Path(__file__).with_name("sandboxed.py")
START_SECONDS = 60.0  # for the interpreter, which does not count as the program's time
MOST_REPORT_BYTES = 65536


class SandboxError(FalconSpecError, RuntimeError):
    """The sandbox does not work on this machine; no program was judged."""


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Args:
        timeout_seconds (`float`): By the clock on the wall, from the program's first line.
        memory_bytes (`int`): Address space of its process, the interpreter's own 20 MB or so included.
    """

    timeout_seconds: float = 10.0
    memory_bytes: int = 512 * 2**20

    def __post_init__(self) -> None:
        if not (self.timeout_seconds > 0 and self.memory_bytes > 0):
            raise OptionError(
                "`timeout_seconds` and `memory_bytes` must be positive, but they are "
                f"{self.timeout_seconds} and {self.memory_bytes}."
            )


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Args:
        passed (`bool`): It ran to its last line.
        reason (`str`): Why not; empty if it passed.
        is_network_cut (`bool`): False where the system refuses namespaces to ordinary users.
    """

    passed: bool
    reason: str
    is_network_cut: bool


def run_program(program: str, limits: Limits | None = None) -> Outcome:
    """Run Python source in an empty folder, with an empty environment and the standard library alone.

    Raises:
        [`SandboxError`]: the sandbox itself does not work here; that says nothing about the program.

    Example:

    ```python
    >>> run_program("assert 1 + 1 == 2").passed
    True
    >>> run_program("assert 1 + 1 == 3, 'no'").reason
    'AssertionError: no'

    ```
    """
    if sys.platform != "linux":
        raise SandboxError(f"The sandbox needs Linux, whose limits it relies on, but this is {sys.platform}.")
    limits = limits or Limits()
    job = {"program": program, "secret": secrets.token_hex(16), **asdict(limits)}
    command = [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(INNER)]
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as complaints,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            cwd=folder,
            env={},
            start_new_session=True,
        ) as process,
    ):
        try:
            outcome = _talk(process, job, limits)
        finally:
            _kill(process)
        if outcome is None:
            complaints.seek(0)
            said = complaints.read(2000).decode(errors="replace").strip() or "nothing"
            raise SandboxError(f"The sandbox must start before a program can run, but it did not. It said: {said}")
        return outcome


def _talk(process: subprocess.Popen[bytes], job: dict[str, Any], limits: Limits) -> Outcome | None:
    """Hand over the job and wait for the verdict; None if the inner side never became ready."""
    assert process.stdin is not None  # both are pipes
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:  # if it died, no line comes
        process.stdin.write(json.dumps(job).encode())
    report = _Report(process.stdout.fileno())
    ready = report.line(START_SECONDS)
    if ready is None:
        return None
    line = report.line(limits.timeout_seconds)
    if line is not None:
        reason = _error(line, job["secret"])
    elif report.has_ended:
        reason = "The process ended before the program's last line."
    else:
        reason = f"Stopped after {limits.timeout_seconds:g} seconds."
    return Outcome(reason is None, reason or "", json.loads(ready)["is_network_cut"])


def _error(line: bytes, secret: str) -> str | None:
    """What the verdict says was raised; a line that the program itself wrote there is no verdict."""
    try:
        verdict = json.loads(line)
    except ValueError:
        verdict = None
    if not isinstance(verdict, dict) or verdict.get("secret") != secret:
        return "The program wrote to the sandbox's own channel."
    return verdict["error"]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process and all of its group; the group's number is not free before the process was waited for."""
    with contextlib.suppress(ProcessLookupError):  # all ended by themselves
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class _Report:
    """Lines from a pipe, each within a time."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.has_ended = False
        self._pending = b""

    def line(self, seconds: float) -> bytes | None:
        """The next line; None when the time is over or nothing can come any more."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.descriptor], [], [], left)[0]:
                return None
            chunk = os.read(self.descriptor, MOST_REPORT_BYTES)
            self.has_ended = not chunk or len(self._pending) > MOST_REPORT_BYTES
            if self.has_ended:
                return None
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line
