"""A packed batch gives every kind of drafter the loss and gradients that its conversations give one by one.

In double precision, with everything random off or drawn for each conversation in turn (phases, reveals). The second
half breaks each boundary and sees the comparison fail.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tiny import make_target
from tests.training.objectives.test_eagle import KINDS as EAGLES
from transformers_falcon_spec import EagleDrafter, FalconSpecDrafter, MedusaDrafter
from transformers_falcon_spec.core.packing import one_text
from transformers_falcon_spec.drafters import eagle as eagle_file
from transformers_falcon_spec.drafters import falcon as falcon_file
from transformers_falcon_spec.drafters.autoregressive import make_draft_model
from transformers_falcon_spec.drafters.dflash import make_dflash
from transformers_falcon_spec.training import features as features_file
from transformers_falcon_spec.training.arguments import DrafterTrainingArguments
from transformers_falcon_spec.training.dataset import ConversationCollator
from transformers_falcon_spec.training.objectives import Outcome, autoregressive, dflash, eagle, falcon, objective_of

pytestmark = pytest.mark.training

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5}
LENGTHS = (9, 14, 6, 2, 1, 11, 17, 8)
ROWS = [[0, 1], [2, 3, 4, 5], [6], [7]]  # the last one padded by more than half
TOLERANCE = 1e-6  # of the largest value: logits and losses are float32

FALCON: dict[str, Any] = {"recurrent_dropout": 0.0}
KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "falcon-1": (FalconSpecDrafter.from_target, {**FALCON, "block_size": 1}),
    "falcon-2": (FalconSpecDrafter.from_target, {**FALCON, "block_size": 2}),
    "falcon-3": (FalconSpecDrafter.from_target, {**FALCON, "block_size": 3, "num_hidden_layers": 2}),
    "falcon-token": (FalconSpecDrafter.from_target, {**FALCON, "block_size": 3, "recurrence": "token"}),
    "falcon-options": (
        FalconSpecDrafter.from_target,
        {
            **FALCON,
            "block_size": 2,
            "num_hidden_layers": 2,
            "num_recurrent_layers": 2,
            "feature_layers": (1, 3, -1),
            "newest_row": True,
            "block_position_embedding": True,
            "shortcut": True,
            "transition_rank": 4,
        },
    ),
    **{name: (EagleDrafter.from_target, options) for name, options in EAGLES.items()},
    "medusa": (MedusaDrafter.from_target, {"num_heads": 3}),
    "medusa-lm": (MedusaDrafter.from_target, {"num_heads": 3, "has_lm_heads": True}),
    "dflash": (make_dflash, {"block_size": 4, "num_hidden_layers": 2}),
    "ar": (make_draft_model, {"num_hidden_layers": 2, "intermediate_size": 40}),
}


def conversations() -> list[dict[str, Any]]:
    """The assistant speaks here and there, also in the first and the last tokens."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "input_ids": torch.randint(3, 90, (length,), generator=generator).tolist(),
            "assistant_mask": (torch.rand(length, generator=generator) < 0.7).tolist(),
        }
        for length in LENGTHS
    ]


def packed_batch() -> dict[str, Tensor]:
    every, rows = conversations(), []
    for members in ROWS:
        parts = [every[member] for member in members]
        row = {name: [value for part in parts for value in part[name]] for name in parts[0]}
        rows.append(
            {**row, "position_ids": [position for part in parts for position in range(len(part["input_ids"]))]}
        )
    return ConversationCollator(0)(rows)


def with_large_weights(drafter: nn.Module) -> nn.Module:
    """So large that whatever a token sees shows in what it says."""
    with torch.no_grad():
        for weight in drafter.parameters():
            if weight.dim() > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5)
    return drafter.double().train()


def in_order(outcome: Outcome) -> Tensor:
    """The order of guesses by block offset and target logits, the same for packed and unpacked batches."""
    by_wish = outcome.target_logits[:, 0].argsort()
    return by_wish[outcome.block_offsets[by_wish].argsort(stable=True)]


class Learner:
    """A drafter of one kind with its objective, and what a batch teaches it."""

    def __init__(self, folder: Path, kind: str) -> None:
        make, options = KINDS[kind]
        self.target = make_target(**SIZES).double()
        torch.manual_seed(1)
        self.drafter: Any = with_large_weights(make(self.target, **options))
        args = DrafterTrainingArguments(
            str(folder), report_to="none", use_cpu=True, feature_noise=0.0, ttt_steps=3, num_anchors=50
        )
        objective = objective_of(self.drafter)
        self.features = objective.read_target(self.drafter, self.target)
        self.objective = objective(self.drafter, self.features, args)

    def learn(self, batch: dict[str, Tensor]) -> tuple[Outcome, dict[str, Tensor]]:
        self.drafter.zero_grad()
        outcome = self.objective(self.drafter, self.features(batch), torch.Generator().manual_seed(3), 0.0)
        outcome.loss.backward()
        return outcome, {
            name: weight.grad.clone() for name, weight in self.drafter.named_parameters() if weight.grad is not None
        }

    def difference(self) -> float:
        """The largest difference between a packed batch and the same conversations in rows of their own, relative."""
        (one, gradients), (other, expected) = (
            self.learn(packed_batch()),
            self.learn(ConversationCollator(0)(conversations())),
        )
        if not one.block_offsets.bincount().equal(other.block_offsets.bincount()):
            return float("inf")
        order, its_order = in_order(one), in_order(other)
        assert gradients.keys() == expected.keys()
        assert one.terms.keys() == other.terms.keys()
        assert len(other.block_offsets) > 20
        found = {
            "loss": (one.loss, other.loss),
            "target_logits": (one.target_logits[order], other.target_logits[its_order]),
        }
        found |= {"logits": (one.draft_logits[order], other.draft_logits[its_order])}
        found |= {name: (value, other.terms[name]) for name, value in one.terms.items()}
        largest = max(gradient.abs().max() for gradient in expected.values())
        differences = [
            (a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1e-3) for a, b in found.values()
        ]
        differences += [(gradients[name] - expected[name]).abs().max() / largest for name in expected]
        assert largest > 0
        return float(torch.stack([each.double() for each in differences]).max())


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_batch_teaches_what_its_conversations_teach_one_by_one(tmp_path: Path, kind: str) -> None:
    assert Learner(tmp_path, kind).difference() < TOLERANCE


@pytest.mark.parametrize("kind", ["falcon-3", "eagle-3", "dflash", "ar"])
def test_features_from_a_cache_teach_the_same(tmp_path: Path, kind: str) -> None:
    learner = Learner(tmp_path, kind)
    alone, batch = ConversationCollator(0)(conversations()), packed_batch()
    read = learner.features.read(alone["input_ids"], alone["attention_mask"])
    for name, values in read.items():
        batch[name] = torch.zeros(*batch["input_ids"].shape, values.shape[-1], dtype=values.dtype)
        for row, members in enumerate(ROWS):
            parts = [values[member, : LENGTHS[member]] for member in members]
            batch[name][row, : sum(map(len, parts))] = torch.cat(parts)

    online, cached = learner.learn(packed_batch()), learner.learn(batch)

    torch.testing.assert_close(cached[0].loss, online[0].loss, rtol=TOLERANCE, atol=0)
    torch.testing.assert_close(cached[1], online[1], rtol=1e-4, atol=TOLERANCE)


def leak_of_the_target(monkeypatch: pytest.MonkeyPatch, _learner: Learner) -> None:
    def through(_model: Any, _part: Any, position_ids: Tensor) -> dict[str, Any]:
        return {"position_ids": one_text(position_ids.shape[1], position_ids.device), "use_cache": False}

    monkeypatch.setattr(features_file, "packed_inputs", through)


def leak_of_attention(monkeypatch: pytest.MonkeyPatch, _learner: Learner) -> None:
    for module in (falcon_file, eagle_file):
        monkeypatch.setattr(module, "same_text", lambda positions: positions[:, :, None] >= 0)
    monkeypatch.setattr(autoregressive, "is_packed", lambda _positions: False)
    mask = dflash.block_mask
    monkeypatch.setattr(
        dflash,
        "block_mask",
        lambda anchors, positions, size: mask(
            anchors, one_text(positions.shape[1], positions.device).expand_as(positions), size
        ),
    )


def leak_of_state(monkeypatch: pytest.MonkeyPatch, _learner: Learner) -> None:
    monkeypatch.setattr(falcon_file, "is_packed", lambda _positions: False)


def leak_of_phase(_monkeypatch: pytest.MonkeyPatch, learner: Learner) -> None:
    """The blocks of a row's first conversation go on through all of them."""

    def through(_module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        embeds, features, phases, is_token, positions = inputs
        if len(phases) == len(embeds):
            return inputs
        numbers = falcon_file.text_numbers(positions, len(embeds))
        shifted = phases.clone()
        for row in numbers:
            for number in row.unique().tolist():
                shifted[number] = phases[row[0]] - int((row == number).nonzero()[0])
        return embeds, features, shifted, is_token, positions

    learner.drafter.register_forward_pre_hook(through)


def leak_of_labels(monkeypatch: pytest.MonkeyPatch, _learner: Learner) -> None:
    def through(values: Tensor, positions: Tensor, distance: int) -> Tensor:
        return shift_features(values, one_text(positions.shape[1], positions.device), distance)

    shift_features = features_file.shift_left
    for module in (features_file, falcon, eagle):
        monkeypatch.setattr(module, "shift_left", through)


def leak_of_positions(monkeypatch: pytest.MonkeyPatch, learner: Learner) -> None:
    """The objective ignores where texts begin in its pairs."""
    read = type(learner.features).__call__

    def through(features: Any, batch: dict[str, Tensor]) -> Any:
        pairs = read(features, batch)
        object.__setattr__(pairs, "positions", one_text(pairs.positions.shape[1], pairs.positions.device))
        return pairs

    monkeypatch.setattr(type(learner.features), "__call__", through)


LEAKS: list[tuple[Callable[[pytest.MonkeyPatch, Learner], None], tuple[str, ...]]] = [
    (leak_of_the_target, tuple(KINDS)),
    (
        leak_of_attention,
        ("falcon-1", "falcon-2", "falcon-3", "falcon-token", "falcon-options", *EAGLES, "dflash", "ar"),
    ),
    (leak_of_state, ("falcon-1", "falcon-2", "falcon-3", "falcon-options")),
    (leak_of_phase, ("falcon-2", "falcon-3", "falcon-token", "falcon-options")),
    (
        leak_of_labels,
        tuple(kind for kind in KINDS if kind not in ("ar", "dflash")),
    ),  # these look no further than one token
    (leak_of_positions, ("eagle-3", "medusa", "medusa-lm", "dflash")),
]


@pytest.mark.parametrize(("leak", "kind"), [(leak, kind) for leak, kinds in LEAKS for kind in kinds])
def test_the_comparison_finds_a_leak(
    tmp_path: Path, leak: Callable[[pytest.MonkeyPatch, Learner], None], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner(tmp_path, kind)

    leak(monkeypatch, learner)

    assert learner.difference() > 100 * TOLERANCE
