"""The objective of Falcon inside the real Trainer: two passes, reveals that do not count, noise on features alone."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import make_target
from tests.training.runs import example_batch, make_dataset, make_trainer
from transformers_falcon_spec import DrafterTrainer, DrafterTrainingArguments, FalconSpecDrafter
from transformers_falcon_spec.training.objectives import falcon as falcon_file


def recording(function: Any, note: Any) -> Any:
    """`function`, whose arguments and result `note` gets."""

    def recorded(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        note(args, result)
        return result

    return recorded


@pytest.mark.parametrize(
    ("block_size", "use_glancing", "num_passes"), [(2, True, 2), (2, False, 1), (1, True, 1), (4, True, 2)]
)
def test_glancing_takes_a_second_pass_with_a_gradient_only_there(
    tmp_path: Path, block_size: int, use_glancing: bool, num_passes: int
) -> None:
    trainer = make_trainer(tmp_path, {"block_size": block_size}, use_glancing=use_glancing)
    outputs: list[Tensor] = []
    trainer.model.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))

    trainer.compute_loss(trainer.model, example_batch())

    assert [output.requires_grad for output in outputs] == [False] * (num_passes - 1) + [True]


@pytest.mark.parametrize(("progress", "is_revealing"), [(0.0, True), (1.0, False)])
def test_revealed_rows_do_not_count_and_become_fewer_with_progress(
    tmp_path: Path, progress: float, is_revealing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, {"block_size": 2}, glancing_ratio=0.5)
    trainer.state.max_steps, trainer.state.global_step = 100, int(100 * progress)
    counted, masks = [], []
    monkeypatch.setattr(
        falcon_file,
        "token_outcome",
        recording(falcon_file.token_outcome, lambda args, _: counted.append(len(args[0]))),
    )
    monkeypatch.setattr(
        falcon_file, "reveal_mask", recording(falcon_file.reveal_mask, lambda _, out: masks.append(out))
    )

    trainer.compute_loss(trainer.model, example_batch())

    num_counted = 3 * (13 - 3)  # labels are tokens 4 to 13 of each row; k = 2 leaves all of them
    assert counted == [num_counted - int(masks[0].sum())]
    assert bool(masks[0].any()) == is_revealing


def test_noise_lies_on_the_features_alone_and_the_revealed_truth_is_free_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, feature_noise=0.25)
    calls: list[Any] = []
    monkeypatch.setattr(falcon_file, "reveal", recording(falcon_file.reveal, lambda args, _: calls.append(args)))

    trainer.compute_loss(trainer.model, example_batch())

    ((noisy, truth, _, _),) = calls
    clean = trainer.features(example_batch())
    noise = noisy.features - clean.features
    assert truth.equal(clean.features)
    assert noisy.token_embeds.equal(clean.token_embeds)
    assert noise.abs().max() <= 0.25 + 1e-6
    assert noise.std().item() == pytest.approx(0.25 / 3**0.5, rel=0.05)  # uniform


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_every_guess_has_its_block_offset(tmp_path: Path, block_size: int) -> None:
    trainer = make_trainer(tmp_path, {"block_size": block_size})
    phases: list[list[int]] = []
    trainer.model.register_forward_hook(lambda _module, inputs, _output: phases.append(inputs[2].tolist()))
    trainer.model.eval()

    _loss, outcome = trainer.compute_loss(trainer.model, example_batch(), return_outputs=True)

    counted = trainer.features(example_batch()).is_counted
    assert outcome.block_offsets.tolist() == [
        (position - phases[0][row]) % block_size for row, position in counted.nonzero().tolist()
    ]


@torch.no_grad()
@pytest.mark.parametrize("num_seen", [0, 1, 2, 3])
def test_guesses_are_conditioned_on_the_tokens_before_them_in_their_block(tmp_path: Path, num_seen: int) -> None:
    network = {"transition_size": 5, "transition_tokens": num_seen} if num_seen else {}
    options = {"block_size": 2, "transition_rank": 3, **network}
    trainer = make_trainer(tmp_path, options, use_glancing=False)
    drafter = trainer.model.eval()
    drafter.transition.after.weight.normal_()
    pairs = trainer.features(example_batch())

    logits = trainer.objective(drafter, pairs, torch.Generator().manual_seed(0), 0.0).draft_logits

    phases = torch.randint(2, (len(pairs.is_token),), generator=torch.Generator().manual_seed(0))
    predicted = drafter(pairs.token_embeds, pairs.features, phases, pairs.is_token)
    expected = []
    for row, column in pairs.is_counted.nonzero().tolist():
        offset = int((column - phases[row]) % 2)  # so many tokens of the block stand before the guessed one
        seen = pairs.input_ids[row, column + 2 - offset : column + 3]
        embeds = pairs.token_embeds[row, column + 1 - offset : column + 2][-num_seen:] if num_seen else None
        scores = drafter.transition(seen[-1], predicted[row, column], embeds)
        expected.append(trainer.features.head(predicted[row, column]) + scores)
    torch.testing.assert_close(logits, torch.stack(expected))


@torch.no_grad()
@pytest.mark.parametrize("make", ["recipe", "from_target"])
def test_training_starts_with_guesses_that_are_close_to_uniform_where_features_are_large(
    tmp_path: Path, make: str
) -> None:
    """Of the scales of SmolLM2-135M, where features have an rms of 2 and embeddings, its head, one of 0.12."""
    target = make_target(tie_word_embeddings=True)
    target.model.norm.weight.fill_(2.0)
    embeddings = target.get_input_embeddings().weight
    embeddings.mul_(0.12 / embeddings.pow(2).mean().sqrt())
    fields = {"shortcut": True, "newest_row": True, "num_hidden_layers": 2, "transition_rank": 8}
    trainer = DrafterTrainer(
        target=target,
        model="falcon" if make == "recipe" else FalconSpecDrafter.from_target(target, **fields),
        args=DrafterTrainingArguments(output_dir=str(tmp_path), report_to="none"),
        train_dataset=make_dataset(20),
    )

    _loss, outcome = trainer.compute_loss(trainer.model, example_batch(), return_outputs=True)

    features = trainer.features(example_batch()).features
    assert features.pow(2).mean().sqrt().item() == pytest.approx(2.0, rel=0.01)
    assert outcome.terms["cross_entropy"].item() == pytest.approx(math.log(target.config.vocab_size), abs=0.3)
