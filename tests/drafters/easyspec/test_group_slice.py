"""A cache in which one layer keeps the heads of a group of layers."""

import torch
from transformers import DynamicCache

from transformers_falcon_spec.drafters.easyspec import GroupSlice
from transformers_falcon_spec.generation.slot_cache import SlotCache


def test_layers_that_share_a_slice_see_what_they_would_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    apart, shared = DynamicCache(), SlotCache(1, 2, 10, torch.device("cpu"))
    num_held = 0

    for num_tokens, is_whole in ((5, False), (3, True), (2, False)):
        shared.view.write_from(num_held)
        num_held += num_tokens
        shared.see(num_held)
        group = GroupSlice(shared, 0, [4, 5, 6])
        states = torch.randn(2, 3, 2, 2, num_tokens, 8, generator=draw)  # keys and values, layers, rows, heads
        expected = [apart.update(states[0, layer], states[1, layer], layer) for layer in range(3)]
        if is_whole:
            group.extend(*states.transpose(1, 2).flatten(2, 3))
        else:
            for layer in range(3):
                found = group.update(states[0, layer], states[1, layer], 4 + layer)
                assert found[0].equal(expected[layer][0])
                assert found[1].equal(expected[layer][1])

    for name in ("keys", "values"):
        assert shared.layers[0].held[name].equal(torch.cat([getattr(layer, name) for layer in apart.layers], dim=1))
