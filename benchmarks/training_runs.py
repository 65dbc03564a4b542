"""What benchmarks have in common that train drafters: one command in a process of its own, on one thread, its output kept."""

import os
import subprocess
import sys
from pathlib import Path

KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}  # a tenth less time a step


def folder_of(runs: Path, name: str) -> Path:
    """Where a run of this name is kept."""
    return runs / "".join(letter if letter.isalnum() else "_" for letter in name)


def run_command(folder: Path, *command: str, module: str = "transformers_falcon_spec", **variables: str) -> None:
    """`python -m module command` on one thread, with these environment variables; what it says goes to `log.txt` of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **KEEP_MEMORY, **variables}
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        subprocess.run(
            [sys.executable, "-m", module, *command], stdout=log, stderr=subprocess.STDOUT, env=environment, check=True
        )
