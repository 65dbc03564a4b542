"""The inner side of the sandbox, run as a script: gives up what it can, runs one program, reports how it ended.

It stands alone: the interpreter that runs it sees the standard library and nothing else.
"""

import ctypes
import json
import math
import os
import resource
import signal
import sys
import types
from typing import Any

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38  # linux/prctl.h
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000  # linux/sched.h
MOST_FILE_BYTES = 2**20
MOST_OPEN_FILES = 64
MOST_REASON_CHARACTERS = 300


def main() -> None:
    """Read a job from standard input; write a line when ready and a line with the verdict to standard output."""
    job = json.loads(sys.stdin.buffer.read())
    report = os.dup(1)
    is_network_cut = _enter_namespaces()
    _limit(job["timeout_seconds"], job["memory_bytes"])
    nothing = os.open(os.devnull, os.O_RDWR)
    _send(report, {"is_network_cut": is_network_cut})
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    _send(report, {"secret": job["secret"], "error": _run(job["program"])})
    os._exit(0)  # what the program left behind, such as exit handlers and threads, has no say


def _enter_namespaces() -> bool:
    """Without a network, and with processes that end with this one, where the system lets ordinary users have that."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET) != 0:
        return False
    child = os.fork()  # the first process of its namespace: the others end with it
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # not inherited
    return True


def _limit(timeout_seconds: float, memory_bytes: int) -> None:
    """Limits of this process; the one on processes does not bind root."""
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: math.ceil(timeout_seconds) + 1,  # should the outer side be gone
        resource.RLIMIT_FSIZE: MOST_FILE_BYTES,
        resource.RLIMIT_NOFILE: MOST_OPEN_FILES,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (allowed, allowed))


def _run(program: str) -> str | None:
    """None if the program runs to its end, else what was raised."""
    module = types.ModuleType("program")  # not `__main__`: code that a model put under that test stays out
    sys.modules["program"] = module
    try:
        exec(compile(program, "<program>", "exec"), module.__dict__)  # noqa: S102  this is the purpose
    except BaseException as error:  # noqa: BLE001  `SystemExit` is no success either
        error.__traceback__ = None  # frees what the program holds: memory may be short
        return f"{type(error).__name__}: {error}".rstrip(": ")[:MOST_REASON_CHARACTERS]
    return None


def _send(report: int, message: dict[str, Any]) -> None:
    os.write(report, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
