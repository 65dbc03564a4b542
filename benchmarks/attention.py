"""Which attention reads trees over long buffers of fixed size fastest: the stock one, folded heads, parts merged by their log-sum-exp.

Command: python -m benchmarks.attention
Hardware and time: one GPU, two minutes; without one the CPU, where the sizes should be fewer (`--slots 1024 4096`). Keys of `--layers` layers are
read one after the other, so that a GPU's cache does not hold them; on CUDA the work is captured and replayed, as in a step. The text fills three
quarters of the slots. The floor is the time in which memory gives the keys and values of the text once, at the speed of a copy measured in the
same run. Variants that lose live here alone. Prints medians, and writes all that was measured to `--output`.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.tree_cost import binary_tree
from transformers_falcon_spec.commands.loading import DTYPES
from transformers_falcon_spec.core.masks import additive, slot_mask
from transformers_falcon_spec.generation.capture.graph import RepeatedWork
from transformers_falcon_spec.generation.tree_attention import folded_sdpa
from transformers_falcon_spec.provenance import provenance

BLOCK = 256  # slots by which a text that needs them gets more
NUM_WARM_UP = 3


@dataclass(frozen=True)
class Read:
    """One layer's read of a tree behind a text: `query` `[rows, heads, nodes, size]`, keys and values `[rows, groups, slots, size]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor  # [rows, 1, nodes, slots], as attention adds it
    num_needed: int  # slots of text and tree

    @property
    def folded(self) -> Tensor:
        """The query with the heads that share keys as queries of one head."""
        return self.query.reshape(*self.key.shape[:2], -1, self.query.shape[-1])


def stock(read: Read) -> Tensor:
    """Transformers' own, which repeats keys and values for the heads that share them."""
    layer = nn.Module()
    layer.num_key_value_groups = read.query.shape[1] // read.key.shape[1]
    return sdpa_attention_forward(layer, read.query, read.key, read.value, read.mask)[0].transpose(1, 2)


def grouped(read: Read) -> Tensor:
    """PyTorch's own for heads that share keys."""
    return functional.scaled_dot_product_attention(
        read.query, read.key, read.value, attn_mask=read.mask, enable_gqa=True
    )


def folded(read: Read) -> Tensor:
    """Heads that share keys as queries of one head, over all slots."""
    return folded_sdpa(read.query, read.key, read.value, read.mask)


def folded_needed(read: Read) -> Tensor:
    """The same over the blocks that text and tree fill: the host must know how many, and capture for each number."""
    num = min(-(-read.num_needed // BLOCK) * BLOCK, read.key.shape[2])
    return folded_sdpa(read.query, read.key[:, :, :num], read.value[:, :, :num], read.mask[..., :num])


def split(read: Read, size: int) -> Tensor:
    """Parts of `size` slots as heads of their own, so that all of a GPU reads, merged by their log-sum-exp."""
    num_rows, num_groups = read.key.shape[:2]
    size = min(size, read.key.shape[2])
    query = read.folded.flatten(0, 1)[:, None]
    keys, values = (states.flatten(0, 1).unflatten(1, (-1, size)) for states in (read.key, read.value))
    num_folded = read.folded.shape[2] // read.mask.shape[2]
    mask = read.mask.expand(-1, num_folded, -1, -1).flatten(1, 2).unflatten(-1, (-1, size)).transpose(1, 2)
    mask = mask[:, None].expand(-1, num_groups, -1, -1, -1).flatten(0, 1)
    states, scores = _with_log_sum_exp(query.expand(-1, keys.shape[1], -1, -1), keys, values, mask)
    return _merged(states, scores, dim=1).view(num_rows, num_groups, -1, states.shape[-1]).reshape(read.query.shape)


def prefix_and_tree(read: Read) -> Tensor:
    """The text's blocks without a mask, the rest with one, merged; the host must know how many are whole text."""
    num = (read.num_needed - read.query.shape[2]) // BLOCK * BLOCK
    rest = slice(num, min(num + 2 * BLOCK, read.key.shape[2]))  # the text's last slots and the tree
    num_folded = read.folded.shape[2] // read.mask.shape[2]
    mask = read.mask[..., rest].expand(-1, num_folded, -1, -1).flatten(1, 2)[:, None]
    before = _with_log_sum_exp(read.folded, read.key[:, :, :num], read.value[:, :, :num], None)
    after = _with_log_sum_exp(read.folded, read.key[:, :, rest], read.value[:, :, rest], mask)
    states, scores = (torch.stack(parts) for parts in zip(before, after, strict=True))
    return _merged(states, scores, dim=0).reshape(read.query.shape)


VARIANTS: dict[str, Callable[[Read], Tensor]] = {
    "stock": stock,
    "grouped": grouped,
    "folded": folded,
    "folded, needed slots": folded_needed,
    "split in 256": lambda read: split(read, 256),
    "split in 1024": lambda read: split(read, 1024),
    "prefix and tree": prefix_and_tree,
}


def _with_log_sum_exp(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """States `[rows, heads, queries, size]`, and the log-sum-exp `[rows, heads, queries]` of the scores behind them."""
    operations = torch.ops.aten
    if query.device.type == "cpu":
        cpu = operations._scaled_dot_product_flash_attention_for_cpu
        states, scores = cpu(query, key, value, 0.0, False, attn_mask=mask)
    elif mask is None and query.dtype != torch.float32:
        states, scores, *_ = operations._scaled_dot_product_flash_attention(query, key, value)
    else:
        mask = None if mask is None else mask.expand(*query.shape[:3], -1)
        states, scores, *_ = operations._scaled_dot_product_efficient_attention(query, key, value, mask, True)
    return states, scores[..., : query.shape[2]]


def _merged(states: Tensor, scores: Tensor, dim: int) -> Tensor:
    """What attention over all parts gives; a part that a query sees nothing of has the least score, or none."""
    scores = torch.where(scores > torch.finfo(states.dtype).min / 2, scores.float(), -torch.inf)
    weights = torch.softmax(scores, dim=dim)[..., None]
    return torch.where(weights > 0, weights * states, 0).sum(dim).to(states.dtype)


def reads_of(
    sizes: Sequence[int], num_nodes: int, num_slots: int, num_layers: int, dtype: torch.dtype, device: torch.device
) -> list[Read]:
    """Reads of one tree in several layers; `sizes` are rows, heads, groups and the size of a head."""
    num_rows, num_heads, num_groups, size = sizes
    tree = binary_tree(num_nodes, device)
    lengths = torch.full((num_rows, 1), num_slots * 3 // 4, device=device)
    depths = tree.depths.expand(num_rows, -1)
    ancestors = tree.ancestor_mask.expand(num_rows, -1, -1)
    mask = additive(slot_mask(ancestors, depths, lengths, num_slots), dtype)
    query = torch.randn(num_rows, num_heads, num_nodes, size, dtype=dtype, device=device)
    shape = (2, num_rows, num_groups, num_slots, size)
    states = [torch.randn(shape, dtype=dtype, device=device) for _ in range(num_layers)]
    return [Read(query, key, value, mask, num_slots * 3 // 4 + num_nodes) for key, value in states]


def seconds_of(reads: Sequence[Read], names: Sequence[str], repeats: int) -> dict[str, list[float]]:
    """Seconds of one layer's read by each variant, `repeats` times, each time in another order."""
    device = reads[0].query.device
    works = {name: RepeatedWork(device) for name in names}

    def run(name: str) -> None:
        works[name].run(lambda: [VARIANTS[name](read) for read in reads])  # type: ignore[arg-type, func-returns-value]

    found: dict[str, list[float]] = {name: [] for name in names}
    order, draws = list(names), random.Random(0)
    for _ in range(NUM_WARM_UP + repeats):
        draws.shuffle(order)
        for name in order:
            found[name].append(_seconds(lambda: run(name), device) / len(reads))  # noqa: B023  called at once
    return {name: values[NUM_WARM_UP:] for name, values in found.items()}


def copy_speed(device: torch.device, num_bytes: int, repeats: int) -> float:
    """Bytes that memory reads and writes in a second."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = [_seconds(lambda: target.copy_(source), device) for _ in range(NUM_WARM_UP + repeats)]
    return 2 * num_bytes / statistics.median(seconds[NUM_WARM_UP:])


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    for synchronize in [torch.cuda.synchronize] if device.type == "cuda" else []:
        synchronize()
    start = time.perf_counter()
    work()
    for synchronize in [torch.cuda.synchronize] if device.type == "cuda" else []:
        synchronize()
    return time.perf_counter() - start


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    """Time all variants at all sizes, and print each in floors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", type=int, nargs=4, default=[1, 32, 8, 128], help="rows, heads, groups, size of a head"
    )
    parser.add_argument("--slots", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    origin = provenance(seed=0, **{key: str(value) for key, value in vars(args).items()})
    speed = copy_speed(device, 2**28, args.repeats)
    rows: list[dict[str, Any]] = []
    for num_slots in args.slots:
        for num_nodes in args.nodes:
            reads = reads_of(args.sizes, num_nodes, num_slots, args.layers, getattr(torch, args.dtype), device)
            floor = sum(states.nbytes for states in (reads[0].key, reads[0].value)) * 3 / 4 / speed
            for name, seconds in seconds_of(reads, list(VARIANTS), args.repeats).items():
                row = {
                    "slots": num_slots,
                    "nodes": num_nodes,
                    "variant": name,
                    "floor_seconds": floor,
                    "seconds": seconds,
                }
                rows.append(row)
                middle = statistics.median(seconds)
                print(
                    f"{num_slots:6} slots {num_nodes:3} nodes  {name:22} {middle * 1e3:8.3f} ms {middle / floor:6.2f} floors"
                )
    result = {"provenance": origin, "copy_bytes_per_second": speed, "rows": rows}
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
