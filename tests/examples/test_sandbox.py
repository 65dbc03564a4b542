"""Programs in the sandbox end in time, within their memory, and pass only if they run to their last line."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sandbox
from sandbox import INNER, Limits, Outcome, SandboxError, run_program

from transformers_falcon_spec.errors import OptionError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

NO_NAMESPACES = "echo 0 > /proc/sys/user/max_user_namespaces && exec "


def test_a_program_that_runs_to_its_end_passes() -> None:
    assert run_program("x = 'é' * 2\nassert len(x) == 2").passed


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("def f(:", "SyntaxError"),
        ("a\0", ("SyntaxError", "ValueError")),  # the second up to Python 3.10
        ("import torch", "ModuleNotFoundError"),
        ("input()", "EOFError"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("import os; os._exit(0)", "The process ended"),
        ("import os; os.abort()", "The process ended"),
        ("import ctypes; ctypes.string_at(0)", "The process ended"),
        ("open('big', 'wb').write(b'x' * 2**22)", "OSError: [Errno 27] File too large"),
        ("x = bytearray(2**31)", "MemoryError"),
        ("x = []\nwhile True: x.append('a' * 10**7)", "MemoryError"),
        ('import os\nos.write(3, b\'{"secret": "0", "error": null}\\n\')', "The program wrote to the sandbox's own"),
        ("import os\nos.write(3, b'1\\n')", "The program wrote to the sandbox's own"),
    ],
)
def test_a_program_that_does_not_reach_its_end_fails_with_the_reason(
    program: str, reason: str | tuple[str, ...]
) -> None:
    outcome = run_program(program, Limits(memory_bytes=2**27))

    assert not outcome.passed
    assert outcome.reason.startswith(reason)


@pytest.mark.parametrize(
    "program", ["while True: pass", "import time\ntime.sleep(60)", "while True:\n  try: input()\n  except: pass"]
)
def test_an_endless_program_is_stopped_in_time(program: str) -> None:
    started = time.monotonic()

    outcome = run_program(program, Limits(timeout_seconds=0.5))

    assert not outcome.passed
    assert outcome.reason == "Stopped after 0.5 seconds."
    assert time.monotonic() - started < 30


def test_a_program_finds_an_empty_folder_and_an_empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_USER", "1")

    outcome = run_program(
        "import os\nassert os.listdir() == [], os.listdir()\nassert not set(os.environ) - {'LC_CTYPE'}, os.environ\n"
        "open('a', 'w').write('b')\nassert open('a').read() == 'b'\nassert os.getcwd() != '/'"
    )

    assert outcome.reason == ""


def test_output_of_a_program_goes_nowhere(capfd: pytest.CaptureFixture[str]) -> None:
    outcome = run_program("import sys\nprint('x' * 10**6)\nsys.stderr.write('y' * 10**6)")

    assert outcome.passed
    assert capfd.readouterr() == ("", "")


def test_a_program_reaches_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), 5).close()  # from here the server can be reached

        outcome = run_program(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)")

    if not outcome.is_network_cut:
        pytest.skip("this system lets no ordinary user make a namespace")
    assert outcome.reason.startswith("OSError")


def test_what_a_program_starts_ends_with_it(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    program = (
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  while True:\n"
        f"    open({str(mark)!r}, 'a').write('x')\n    time.sleep(0.01)\ntime.sleep(0.5)"
    )

    outcome = run_program(program)

    if not outcome.is_network_cut:
        pytest.skip("this system lets no ordinary user make a namespace")
    time.sleep(0.3)  # the system may still be at it when the outcome is there
    size = mark.stat().st_size if mark.exists() else 0  # a user who is not root cannot even start it
    time.sleep(0.3)
    assert (mark.stat().st_size if mark.exists() else 0) == size


@pytest.mark.parametrize(("program", "error"), [("assert True", None), ("x = bytearray(2**31)", "MemoryError")])
def test_without_namespaces_the_limits_hold_and_the_report_says_so(program: str, error: str | None) -> None:
    unshare = shutil.which("unshare")
    if (
        unshare is None
        or subprocess.run([unshare, "-Ur", "sh", "-c", f"{NO_NAMESPACES} true"], check=False).returncode
    ):
        pytest.skip("this system cannot forbid namespaces to one process")
    job = {"program": program, "secret": "s", "timeout_seconds": 10, "memory_bytes": 2**29}
    command = [unshare, "-Ur", "sh", "-c", f'{NO_NAMESPACES} "$@"', "-", sys.executable, "-I", "-S", str(INNER)]

    result = subprocess.run(command, input=json.dumps(job).encode(), capture_output=True, timeout=60, check=True)

    ready, verdict = map(json.loads, result.stdout.splitlines())
    assert ready == {"is_network_cut": False}
    assert verdict == {"secret": "s", "error": error}


def test_a_sandbox_that_does_not_start_is_no_verdict_on_the_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise OSError('no limits here')")
    monkeypatch.setattr(sandbox, "INNER", broken)

    with pytest.raises(SandboxError, match=r"The sandbox must start before a program can run(.|\n)*no limits here"):
        run_program("pass" + " " * 10**6)


def test_another_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")

    with pytest.raises(SandboxError, match=r"The sandbox needs Linux, whose limits it relies on, but this is win32\."):
        run_program("pass")


@pytest.mark.parametrize("limits", [{"timeout_seconds": 0}, {"memory_bytes": -1}, {"timeout_seconds": float("nan")}])
def test_limits_must_be_positive(limits: dict[str, float]) -> None:
    with pytest.raises(OptionError, match=r"`timeout_seconds` and `memory_bytes` must be positive, but they are"):
        Limits(**limits)  # type: ignore[arg-type]


def test_nothing_is_left_in_the_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    outcome = run_program("import os\nos.mkdir('d')\nopen('d/f', 'w').write('x')\nos.chmod('d', 0)")

    assert outcome == Outcome(True, "", outcome.is_network_cut)
    assert os.listdir(tmp_path) == []  # noqa: PTH208  names alone
