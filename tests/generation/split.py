"""Run as a program on two processes: each writes texts with a target that is split over them, or texts of its own, and notes them.

`python split.py FOLDER`; FOLDER holds `target` and gets `rank0.json` and `rank1.json`. The processes find each other through the
environment, as `torchrun` sets it.
"""

import json
import os
import random
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from tests.doubles import InformedDrafter
from tests.drafters.eagle.kinds import make_eagle
from tests.drafters.medusa.makers import make_medusa
from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec import LookaheadDrafter, SpeculationConfig
from transformers_falcon_spec.errors import FalconSpecError
from transformers_falcon_spec.generation import call
from transformers_falcon_spec.generation.distributed import processes_of
from transformers_falcon_spec.generation.loop import SpeculativeDecoding

RANK = int(os.environ.get("RANK", "0"))
NUM_TOKENS = 60  # long enough for the tuner to go beyond its first steps
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
MODES: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "sampled": SAMPLING}
KINDS = {
    "falcon": lambda target: make_drafter(target, block_size=2),
    "eagle": lambda target: make_eagle(target, "eagle-1"),
    "medusa": lambda target: make_medusa(target, num_heads=2),
    "lookahead": LookaheadDrafter.from_target,
}


def make_divisible() -> Any:
    """A target whose heads and vocabulary can be split in two, in double precision."""
    return make_target(num_key_value_heads=4, vocab_size=96).double()


def write(target: Any, drafter: Any = None, prompt: Any = None, **options: Any) -> Any:
    """A text, from the same seed on all ranks, as decoding a split target needs it."""
    torch.manual_seed(7)
    options = {"max_new_tokens": NUM_TOKENS, "return_dict_in_generate": True, **options}
    return target.generate(make_prompt(8) if prompt is None else prompt, assistant_model=drafter, **options)


def noted(target: Any, kind: str, options: dict[str, Any], **trees: Any) -> dict[str, Any]:
    """A text without and with a drafter, and what was drafted for it."""
    plain = write(target, **options)
    state = torch.get_rng_state()
    inner = KINDS[kind](target)
    inner.generation_config = SpeculationConfig(**trees)
    drafter = inner if kind == "lookahead" else InformedDrafter(inner, plain.sequences)
    out = write(target, drafter, **options)
    return {
        "plain": plain.sequences.tolist(),
        "text": out.sequences.tolist(),
        "is_state_equal": state.equal(torch.get_rng_state()),
        "accepted": out.speculation.num_accepted,
        "num_steps": out.speculation.num_steps,
        "passes": out.speculation.num_passes,
        "notes": out.speculation.notes,
        "num_ranks": processes_of(drafter, target).num,
        "tuning": out.speculation.tuning,
    }


class WildClock(threading.local):
    """Seconds that say something else on every rank; each thread has its own."""

    def __init__(self) -> None:
        self.now, self.random = 0.0, random.Random(RANK)

    def __call__(self) -> float:
        """A time after the last one."""
        self.now += self.random.random() ** 4
        return self.now


def by_hand(target: Any) -> Any:
    """The MLPs split with torch's own functions, so that Transformers knows nothing of it."""
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for layer in target.model.layers:
        plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
        parallelize_module(layer.mlp, mesh, plan)
    return target


def refused(target: Any) -> str:
    """What is said where the ranks have other drafters."""
    try:
        write(target, make_drafter(target, seed=RANK + 1), do_sample=False)
    except FalconSpecError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main(folder: Path) -> None:
    """Everything that must work."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group("gloo")
    call.SpeculativeDecoding = partial(SpeculativeDecoding, clock=WildClock())  # type: ignore[assignment,misc]
    config = DistributedConfig(tp_plan="auto")
    split = AutoModelForCausalLM.from_pretrained(folder / "target", distributed_config=config)
    found = {f"{kind}, {mode}": noted(split, kind, options) for kind in KINDS for mode, options in MODES.items()}
    found["falcon, grown"] = noted(split, "falcon", SAMPLING, dynamic_tree=True)
    found["eagle, rows"] = noted(
        split, "eagle", {"prompt": make_prompt(8).repeat(2, 1) + torch.tensor([[0], [1]]), "do_sample": False}
    )
    found["falcon, by hand"] = noted(by_hand(make_divisible()), "falcon", SAMPLING)
    own = {"prompt": make_prompt(6 + RANK, seed=RANK), "max_new_tokens": 20 + 10 * RANK, **SAMPLING}
    found["alone"] = noted(make_divisible(), "falcon", own)
    found["refused"] = refused(split)  # type: ignore[assignment]
    (folder / f"rank{RANK}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
