"""Two real processes that run one script, as `torchrun` starts them on CPUs."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_two(script: str, folder: Path, *arguments: str) -> None:
    """Run `script` in two processes; its first argument is `folder`. Fails if one of them does."""
    path = folder / "script.py"
    path.write_text(script)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    subprocess.run([*launch, str(path), str(folder), *arguments], env=environment, check=True, timeout=600)
