"""The memory floor counts every byte that a step must read, once."""

import pytest
import torch
from torch import nn

from benchmarks.on_gpu import floor
from tests.every_drafter import every_drafter
from tests.tiny import make_drafter, make_target


@pytest.mark.parametrize("ties", [False, True])
def test_the_floor_reads_every_weight_but_tables_that_are_looked_up(ties: bool) -> None:
    target = make_target(tie_word_embeddings=ties)
    drafter = make_drafter(target, block_size=2)
    table = target.get_input_embeddings().weight
    head = target.get_output_embeddings().weight.numel() * 4

    naive = sum(each.numel() * 4 for name, each in target.named_parameters() if ties or each is not table)
    looked_up = {id(part.weight) for part in drafter.modules() if isinstance(part, nn.Embedding)}
    own = sum(each.numel() * 4 for each in drafter.parameters() if id(each) not in looked_up)
    config = target.config
    one = (
        2
        * config.num_hidden_layers
        * config.num_key_value_heads
        * (config.hidden_size // config.num_attention_heads)
        * 4
    )

    assert floor.weight_bytes(target) == naive
    assert floor.step_bytes(target, None, rows=3, text_len=10, num_passes=0) == naive + 30 * one
    drafted = floor.step_bytes(target, drafter, rows=1, text_len=0, num_passes=1.5)
    assert drafted == naive + 1.5 * (own + head)


@pytest.mark.parametrize("kind", ["falcon", "medusa", "layers in parallel", "diffusion"])
def test_a_token_has_keys_and_values_in_every_layer_of_a_drafter(kind: str) -> None:
    drafter = every_drafter(kind, make_target())
    projections = [part for name, part in drafter.named_modules() if name.rpartition(".")[2] in ("k_proj", "v_proj")]

    assert floor.token_bytes(drafter) == sum(part.out_features * 4 for part in projections)


def test_a_tied_head_is_read_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
            self.head.weight = self.table.weight

    assert floor.weight_bytes(Tied()) == 4 * 2 * 4


def test_bandwidth_counts_bytes_read_and_written() -> None:
    moments = iter(range(1000))

    assert floor.copy_bandwidth(torch.device("cpu"), 512, clock=lambda: float(next(moments))) == 1024
