"""What a step costs on a machine that is not at hand: seconds of a text from its counts, by the measured costs in `prices.json`.

A text of which `num_steps` steps read `n` nodes on average and took `num_passes` passes of a drafter would take

    num_steps x read(n) + num_passes x pass        seconds after its first token,

where `read` is the measured time of one forward of the target, on straight lines between the sizes that were measured, and a pass
takes the time in which the machine moves the bytes that it reads: the drafter's weights at the target's shape and type, and the
target's head where it drafts through that, over the bandwidth. Drafters on the host (prompt lookup, Lookahead) have no weights, and
their passes cost nothing. At the bandwidth of a copy this is the least a pass can take, which favours drafters of many passes; at
that of the target's own forward it is about the most.
"""

import json
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from benchmarks.inflation import SHAPES, inflate, inflate_drafter
from benchmarks.on_gpu.floor import head_bytes, uses_target_head, weight_bytes
from benchmarks.report import total
from benchmarks.running import Runs
from transformers_falcon_spec.commands.loading import DTYPES
from transformers_falcon_spec.drafters.base import DrafterModel
from transformers_falcon_spec.drafters.easyspec import LayerParallelDrafter
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.methods import Method

BEYOND = 1.1  # the largest size that a price is used at, over the largest that was measured
FILE = Path(__file__).parent / "prices.json"


@dataclass(frozen=True)
class Price:
    """The costs of one machine at one shape.

    Args:
        name (`str`): Its name in `prices.json`.
        title (`str`): The machine, for readers.
        shape (`str`): Name of the target's shape.
        dtype (`str`): Of all weights.
        seconds (`dict[int, float]`): Of one forward of the target, by nodes; 1 is plain decoding.
        bytes_per_second (`float`): What a drafter's pass reads in a second.
    """

    name: str
    title: str
    shape: str
    dtype: str
    seconds: dict[int, float]
    bytes_per_second: float

    @classmethod
    def named(cls, name: str) -> "Price":
        """The price of that name in `prices.json`."""
        stored = json.loads(FILE.read_text(encoding="utf-8"))
        if name not in stored:
            raise OptionError(f"A price must be one of {sorted(stored)} in `{FILE.name}`, but it is {name!r}.")
        row = stored[name]
        seconds = {int(nodes): each / 1000 for nodes, each in row["milliseconds"].items()}
        return cls(name, row["title"], row["shape"], row["dtype"], seconds, row["bytes_per_second"])

    def can_read(self, num_nodes: float) -> bool:
        """Whether so many nodes were measured; a tenth more is read off the last line, for a branch of repeated text."""
        return 1 <= num_nodes <= BEYOND * max(self.seconds)

    def can_price(self, runs: Runs) -> bool:
        """Whether the nodes of each run were measured; a mean over runs may be in range where one of them is not."""
        return all(self.can_read(nodes_read([run])) for run in runs)

    def read_seconds(self, num_nodes: float) -> float:
        """Seconds of a forward of so many nodes, which may be a mean."""
        if not self.can_read(num_nodes):
            raise OptionError(
                f"The price `{self.name}` was measured at 1 to {max(self.seconds)} nodes, but {num_nodes:.1f} are asked "
                "for. Draft smaller trees, or take another price."
            )

        sizes = sorted(self.seconds)
        above = min(max(bisect_left(sizes, num_nodes), 1), len(sizes) - 1)
        low, high = sizes[above - 1], sizes[above]
        share = (num_nodes - low) / (high - low)
        return (1 - share) * self.seconds[low] + share * self.seconds[high]

    def pass_seconds(self, num_bytes: float) -> float:
        """Seconds of a pass that reads so many bytes."""
        return num_bytes / self.bytes_per_second

    def of_run(self, run: dict[str, Any], num_bytes: float) -> dict[str, Any]:
        """A run of a benchmark with the tokens of its steps, and the seconds that they would take here; the prefill is left out.

        Args:
            run (`dict`): A run of `Benchmark`, whose counts are in `speculation`.
            num_bytes (`float`): What a pass of its drafter reads.
        """
        counts = run["speculation"]
        seconds = counts["num_steps"] * self.read_seconds(nodes_read([run]))
        seconds += counts["num_passes"] * self.pass_seconds(num_bytes)
        return {**run, "num_tokens": counts["num_steps"] + counts["num_accepted"], "seconds": seconds}


def nodes_read(runs: Runs) -> float:
    """Nodes that a step reads, root included, on average over runs; 1 where there was no step."""
    counts = [run["speculation"] for run in runs]
    return float(1 + total(counts, "num_drafted") / max(total(counts, "num_steps"), 1))


def has_weights(method: Method) -> bool:
    """Whether a method drafts with a model, and not on the host."""
    drafter: Any = method.assistant
    return drafter is not None and any(True for _ in drafter.parameters())


def pass_bytes(method: Method, small: PreTrainedModel, shape: str, dtype: str) -> int:
    """Bytes that one pass of a method's drafter reads at a large shape; nothing is built but the sizes.

    Args:
        method (`Method`): With a drafter for the small target.
        small ([`~transformers.PreTrainedModel`]): The small target.
        shape (`str`): Name of the large shape.
        dtype (`str`): Of the large weights.
    """
    if not has_weights(method):
        return 0
    drafter: Any = method.assistant
    sizes: dict[str, Any] = {"dtype": DTYPES[dtype], "device": "meta"}
    whole = drafter.model if isinstance(drafter, LayerParallelDrafter) else drafter
    large: Any = inflate_drafter(whole, small, SHAPES[shape], **sizes)
    reads_head = uses_target_head(large) if isinstance(large, DrafterModel) else not large.can_generate()
    return weight_bytes(large) + (head_bytes(inflate(small, SHAPES[shape], **sizes)) if reads_head else 0)
