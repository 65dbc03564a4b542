"""Run as a program on several processes: each writes texts with a drafter that is spread over all of them, and notes what it saw.

`python spread.py FOLDER SCENARIO`; FOLDER holds `target` and gets `process0.json` and so on. The processes find each other through the
environment, as `torchrun` sets it.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList
from transformers.distributed import DistributedConfig

from tests.drafters.easyspec.kinds import GROUPS, make_model
from tests.drafters.easyspec.twin import with_backend
from tests.tiny import make_prompt
from transformers_falcon_spec import DraftTree, LayerParallelDrafter, SpeculationConfig
from transformers_falcon_spec.errors import FalconSpecError

RANK = int(os.environ.get("RANK", "0"))
SHORT = 3  # seconds to wait for a process that stands still
LONG = 60  # and for one that is gone, which nobody should wait out; a busy machine drafts in less
CHAIN = DraftTree.chain(3).to_json()
TREE = DraftTree.from_lists([-1, 0, 0, 1, 1, 2, 3]).to_json()
SPLIT = ("greedy", "sampled")
SAMPLING = {"do_sample": True, "temperature": 0.8}


class Stop(StoppingCriteria):
    """Ends the text at a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Whether it has come."""
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def make_divisible() -> Any:
    """A model whose heads can be split over four processes."""
    return make_model("llama", num_key_value_heads=4)


def write(target: Any, drafter: Any = None, prompt: torch.Tensor | None = None, **options: Any) -> Any:
    """A text; each process draws from a seed of its own, of which the first one's counts."""
    torch.manual_seed(100 + RANK)
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, **options}
    return target.generate(make_prompt() if prompt is None else prompt, assistant_model=drafter, **options)


def noted(target: Any, drafter: Any, **options: Any) -> dict[str, Any]:
    """A text with the drafter, and what was exchanged for it."""
    processes = drafter.join()
    all_gather = processes.all_gather
    exchanged = []

    def noting(part: torch.Tensor) -> torch.Tensor:
        exchanged.append((processes.num - 1) * part.nbytes)
        return all_gather(part)

    with patch.object(processes, "all_gather", noting):
        out = write(target, drafter, **options)
    stats = out.speculation
    return {
        "text": out.sequences.tolist(),
        "num_gathers": len(exchanged),
        "num_bytes": sum(exchanged),
        "num_passes": stats.num_passes,
        "accepted": sorted(stats.acceptance_histogram.items()),
        "notes": stats.notes,
    }


def refusal(act: Callable[[], Any]) -> str:
    """What is said against it."""
    try:
        act()
    except FalconSpecError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def make(target: Any, backend: str = "distributed", wait: float = 60.0, **options: Any) -> Any:
    """A drafter that is as deep as `target` and often right; by default over all processes."""
    drafter = LayerParallelDrafter.wrap(make_divisible(), target, layer_groups=GROUPS, timeout_seconds=wait)
    drafter.generation_config = SpeculationConfig(tune=False, **options)
    return with_backend(drafter, backend)


def cases() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By name the options of a drafter and those of a call."""
    grown, rows = {"num_tree_nodes": 7, "tree_top_k": 2, "tree_depth": 4}, make_prompt(8).repeat(2, 1)
    rows[1] += 1
    return {
        "greedy": (grown, {}),
        "chain": ({"draft_tree": CHAIN}, {}),
        "rows": (grown, {"prompt": rows}),
        "sampled": (grown, SAMPLING),
        "sampled rows": (grown, {"prompt": rows, **SAMPLING}),
        "coupled": ({"verifier": "gumbel", **grown}, SAMPLING),
        "drawn": ({"verifier": "recursive_rejection", "draft_tree": TREE}, SAMPLING),
        "stopped": (grown, {"stopping_criteria": StoppingCriteriaList([Stop(20 + RANK)])}),  # later on other processes
    }


def texts(target: Any, split_target: Any) -> dict[str, Any]:
    """Everything that must work, with a target on each process and one that is split over them."""
    found = {name: noted(target, make(target, **trees), **options) for name, (trees, options) in cases().items()}
    split = {
        f"{name}, split": noted(split_target, make(split_target, **trees), **options)
        for name, (trees, options) in cases().items()
        if name in SPLIT
    }
    return {**found, **split}


def refusals(target: Any) -> dict[str, str]:
    """Everything that must be refused."""
    other = make(target, tree_depth=3 + RANK)
    odd = make(target)
    odd.model.model.layers[2].mlp.up_proj.weight.mul_(1 + 0.01 * RANK)
    shallow = LayerParallelDrafter.wrap(make_model("llama", num_hidden_layers=1), target, backend="distributed")
    return {
        "other weights": refusal(lambda: write(target, odd)),
        "other options": refusal(lambda: write(target, other)),
        "other prompts": refusal(lambda: write(target, make(target), make_prompt(seed=RANK))),
        "more processes than layers": refusal(lambda: write(target, shallow)),
    }


def lost(target: Any, act: Callable[[], Any], wait: float) -> dict[str, Any]:
    """What the first process says when the other one is lost in the middle of a draft, and how long that took."""
    drafter = make(target, wait=wait)
    processes = drafter.join()
    all_gather = processes.all_gather
    num_gathers = 0

    def lose(part: torch.Tensor) -> torch.Tensor:
        nonlocal num_gathers
        if RANK == 1 and num_gathers == 5:
            act()
        num_gathers += 1
        return all_gather(part)

    processes.all_gather = lose  # type: ignore[method-assign]
    start = time.perf_counter()
    return {"said": refusal(lambda: write(target, drafter)), "seconds": time.perf_counter() - start}


def main(folder: Path, scenario: str) -> None:
    """One scenario."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group("gloo")
    target = make_divisible()
    if scenario == "texts":
        config = DistributedConfig(tp_plan="auto")
        split = AutoModelForCausalLM.from_pretrained(folder / "target", distributed_config=config)
        found = {**texts(target, split), **refusals(target), "again": noted(target, make(target))}
    elif scenario == "killed":
        found = lost(target, lambda: os.kill(os.getpid(), signal.SIGKILL), LONG)
    else:
        found = lost(target, lambda: time.sleep(3 * SHORT), SHORT)
    (folder / f"process{RANK}.json").write_text(json.dumps(found), encoding="utf-8")
    if scenario == "texts":
        dist.destroy_process_group()
    else:
        os._exit(0)  # gloo's threads still wait for the lost process, and would abort the interpreter's own end


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
