"""Killing real processes in the middle of a write.

A limit on the size of files cuts a write short, and the next one raises the signal SIGXFSZ. Its handler is `pause` of
the C library, so the writing thread stops there until the test sends SIGKILL. Files of torch then hold a part of their
bytes. safetensors first gives a file with a temporary name (`.tmp...`) its full size and stops there, with an empty
file.
"""

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STAND_STILL = """
import ctypes, resource, signal

def stand_still_at(num_bytes):
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(signal.SIGXFSZ, ctypes.cast(libc.pause, ctypes.c_void_p))
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
"""  # the child calls it right before the write


def kill_in_write(script: str, arguments: list[str], files: Path, limit: int, num_bytes: int) -> Path:
    """Run `script` until one of `files`, a path with `*`, has `num_bytes`; kill it and return the file."""
    command = [sys.executable, "-c", STAND_STILL + script, *arguments, str(limit)]
    with tempfile.TemporaryFile("w+") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream)
        try:
            path = _wait_for(process, files, num_bytes)
        except AssertionError as error:
            stream.seek(0)
            raise AssertionError(f"{error} {stream.read()[-2000:]}") from None
        finally:
            process.kill()
            status = process.wait()
    assert status == -signal.SIGKILL
    assert path.stat().st_size == num_bytes
    return path


def _wait_for(process: subprocess.Popen[bytes], files: Path, num_bytes: int) -> Path:
    deadline = time.monotonic() + 900
    while time.monotonic() < deadline and process.poll() is None:
        for path in files.parent.glob(files.name):
            if path.stat().st_size == num_bytes:
                return path
        time.sleep(0.02)
    raise AssertionError(f"No write of {num_bytes} bytes was seen.")
