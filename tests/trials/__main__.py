"""`python -m tests.trials --seeds 0:2000`: many trials, with a progress bar, a log from which the next run goes on, and a summary."""

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when Transformers is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small gain nothing by a second thread

from tqdm import tqdm

from tests.trials.draw import draw
from tests.trials.script import script, smallest
from tests.trials.trial import trial


def main() -> int:
    """Run what the command line asks for; 1 if a trial showed a difference."""
    parser = argparse.ArgumentParser(prog="python -m tests.trials", description=__doc__)
    parser.add_argument("--seeds", default="0:2000", help="first and last of them, the last not included")
    parser.add_argument("--seed", type=int, help="print the script of one seed, and nothing else")
    parser.add_argument("--smallest", action="store_true", help="with --seed: the simplest call of the same outcome")
    parser.add_argument("--log", type=Path, default=Path("runs/trials.jsonl"), help="seeds in it are not tried again")
    options = parser.parse_args()
    if options.seed is not None:
        call = draw(options.seed)
        print(script(smallest(call) if options.smallest else call))  # noqa: T201  this is a command
        return 0
    return _run(range(*map(int, options.seeds.split(":"))), options.log)


def _run(seeds: range, log: Path) -> int:
    log.parent.mkdir(parents=True, exist_ok=True)
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    found = {line["seed"]: line for line in map(json.loads, lines) if line["seed"] in seeds}
    with log.open("a", encoding="utf-8") as file:
        for seed in tqdm([seed for seed in seeds if seed not in found], desc="trials"):
            found[seed] = _tried(seed)
            file.write(json.dumps(found[seed]) + "\n")
            file.flush()
    print(summary(list(found.values())))  # noqa: T201
    return int(any(line["kind"] == "different" for line in found.values()))


def _tried(seed: int) -> dict[str, Any]:
    outcome = trial(draw(seed))
    if outcome.kind == "different":
        tqdm.write(f"seed {seed}: {outcome}\n\n{script(draw(seed))}")
    stats = outcome.stats
    counts = {"steps": stats.num_steps, "drafted": stats.num_drafted, "kept": stats.num_accepted}
    return {"seed": seed, "kind": outcome.kind, "found": outcome.found, **counts}


def summary(lines: list[dict[str, Any]]) -> str:
    """What came of the trials, and how much was drafted and kept."""
    kinds = Counter(line["kind"] for line in lines)
    reasons = Counter(line["found"][0] for line in lines if line["kind"] == "refused")
    num_steps, num_kept = (sum(line[name] for line in lines) for name in ("steps", "kept"))
    keeping = sum(line["kept"] > 0 for line in lines)
    return "\n".join(
        [
            f"{len(lines)} trials: " + ", ".join(f"{kind} {num}" for kind, num in kinds.most_common()),
            *(f"  refused, for {reason}: {num}" for reason, num in reasons.most_common()),
            f"{keeping} of them kept drafted tokens; acceptance length {1 + num_kept / max(num_steps, 1):.2f}",
            *(f"different: seed {line['seed']}" for line in lines if line["kind"] == "different"),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
