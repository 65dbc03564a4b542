"""Pairs for training: inputs, labels, and which of them count."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.families import ONE_OF_EACH, RECURRENT
from tests.tiny import VOCAB_SIZE, in_double, make_prompt, make_target
from transformers_falcon_spec.training.dataset import ConversationCollator
from transformers_falcon_spec.training.features import PairBatch, TargetFeatures, shift_left

LENGTHS = (11, 7)
OTHERS = [family for family in RECURRENT if family not in ONE_OF_EACH]
LENGTH = max(LENGTHS)


def padded_batch() -> dict[str, Tensor]:
    """Two rows, the second padded; the assistant speaks twice in the first."""
    generator = torch.Generator().manual_seed(0)
    is_token = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(3, VOCAB_SIZE, (2, LENGTH), generator=generator)
    is_assistant = torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0]]).bool()
    return {"input_ids": ids * is_token, "attention_mask": is_token.long(), "assistant_mask": is_assistant}


def read(target: PreTrainedModel, block_size: int = 2, layers: tuple[int, ...] = (-1,)) -> PairBatch:
    return TargetFeatures(target, layers, block_size)(padded_batch())


@torch.no_grad()
def hidden_states(target: PreTrainedModel) -> list[Tensor]:
    batch = padded_batch()
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    return list(target(**inputs, output_hidden_states=True).hidden_states)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
def test_a_pair_is_a_feature_and_the_next_embedding_and_its_label_the_feature_a_block_ahead(
    family: str, block_size: int
) -> None:
    target = make_target(family)

    pairs = read(target, block_size)

    last, ids = hidden_states(target)[-1], padded_batch()["input_ids"]
    for row, length in enumerate(LENGTHS):
        for column in range(length - 1):
            torch.testing.assert_close(pairs.features[row, column], last[row, column])
            assert torch.equal(
                pairs.token_embeds[row, column], target.get_input_embeddings().weight[ids[row, column + 1]]
            )
            if column + block_size < length:
                torch.testing.assert_close(pairs.labels[row, column], last[row, column + block_size])


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 20])
def test_a_row_counts_where_its_label_token_is_the_assistants(block_size: int) -> None:
    pairs, is_assistant = read(make_target(), block_size), padded_batch()["assistant_mask"].tolist()

    expected = [
        [
            column + block_size + 1 < LENGTH and is_assistant[row][column + block_size + 1]
            for column in range(LENGTH - 1)
        ]
        for row in range(2)
    ]

    assert pairs.is_counted.tolist() == expected


def test_padding_is_no_token_and_never_counts() -> None:
    pairs = read(make_target())

    assert pairs.is_token.sum(-1).tolist() == [length - 1 for length in LENGTHS]
    assert not (pairs.is_counted & ~pairs.is_token).any()


@pytest.mark.parametrize(
    "family", [*ONE_OF_EACH, *(pytest.param(name, marks=pytest.mark.families) for name in OTHERS)]
)
def test_a_conversation_is_read_as_if_it_were_alone(family: str) -> None:
    target = in_double(make_target(family))
    reader = TargetFeatures(target, (1, -1), 1)
    conversations = [make_prompt(length, seed=length)[0].tolist() for length in (21, 7, 34)]
    batch = ConversationCollator(0)([{"input_ids": ids, "assistant_mask": [1] * len(ids)} for ids in conversations])

    together = reader.read(batch["input_ids"], batch["attention_mask"])["features"]

    for row, ids in enumerate(conversations):
        alone = _read_one(reader, ids)
        torch.testing.assert_close(together[row, : len(ids)], alone, rtol=1e-4, atol=1e-4)
        behind_another = _read_one(reader, conversations[row - 1] + ids)[-len(ids) :]
        assert not torch.allclose(behind_another, alone, rtol=1e-3)  # the test would see it


def _read_one(reader: TargetFeatures, ids: list[int]) -> Tensor:
    """Features of a text that is read alone."""
    tokens = torch.tensor([ids])
    return reader.read(tokens, torch.ones_like(tokens))["features"][0]


@pytest.mark.parametrize("layers", [(-1,), (0, 2, -1), (1,)])
def test_features_are_the_hidden_states_that_were_asked_for_side_by_side(layers: tuple[int, ...]) -> None:
    target = make_target()

    pairs = read(target, layers=layers)

    states = hidden_states(target)
    expected = torch.cat([states[layer][:, :-1] for layer in layers], dim=-1)
    torch.testing.assert_close(pairs.features[pairs.is_token], expected[pairs.is_token])
    assert pairs.labels.shape[-1] == 64


@pytest.mark.parametrize(
    ("family", "changes", "layers"),
    [
        ("llama", {}, (-1,)),
        ("granite", {}, (-1,)),
        ("gemma2", {}, (-1,)),
        ("opt", {"word_embed_proj_dim": 32}, (-1,)),
        ("llama4", {}, (1,)),
    ],
)
def test_the_logits_of_a_label_are_those_of_the_target(
    family: str, changes: dict[str, Any], layers: tuple[int, ...]
) -> None:
    target, batch = make_target(family, **changes), padded_batch()
    features = TargetFeatures(target, layers, 2)

    logits = features.head(features(batch).labels[:1, :8])

    with torch.no_grad():
        expected = target(input_ids=batch["input_ids"][:1]).logits[:, 2:10]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_the_target_is_frozen_and_left_without_hooks() -> None:
    target = make_target().train()
    before = torch.get_rng_state()

    pairs = read(target)

    assert not target.training
    assert not any(weight.requires_grad for weight in target.parameters())
    assert not pairs.features.requires_grad
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in target.modules())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("distance", [0, 1, 5, 20])
@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_shifted_values_are_those_of_later_tokens_or_zero(shape: tuple[int, ...], distance: int) -> None:
    values = torch.randn(3, 8, *shape)
    expected = torch.zeros_like(values)
    for column in range(8 - distance):
        expected[:, column] = values[:, column + distance]

    assert shift_left(values, distance).equal(expected)
    assert shift_left(values != 0, distance).equal(expected != 0)
