"""Inflated drafters draft what the small ones do, for the inflated target, and never an id that the small target lacks."""

from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from benchmarks.inflation import Shape, inflate, inflate_drafter
from tests import runs
from tests.benchmarks.inflation.test_models import NEW_IDS, TREE, WIDER
from tests.drafters.diffuspec.stand_ins import make_diffusion
from tests.drafters.eagle.kinds import KINDS as EAGLES
from tests.drafters.eagle.kinds import make_eagle
from tests.drafters.medusa.makers import make_medusa
from tests.tiny import VOCAB_SIZE, make_drafter, make_prompt, make_target
from transformers_falcon_spec import DiffusionDrafter, EagleDrafter, MedusaDrafter, SpeculationConfig
from transformers_falcon_spec.drafters.diffuspec import NgramProxy
from transformers_falcon_spec.errors import OptionError

NUM_STEPS = 5  # of chains
FALCONS = {
    "falcon with a shortcut": {"shortcut": True, "recurrence": "token"},
    "falcon with maps of the newest row": {
        "newest_row": True,
        "block_size": 3,
        "shortcut": True,
        "num_hidden_layers": 2,
    },
    "falcon with a transition": {"transition_rank": 8, "block_size": 3, "recurrence": "token"},
    "falcon whose transition sees two tokens": {"transition_rank": 8, "transition_size": 6, "transition_tokens": 2},
}
MEDUSAS = {
    "medusa": {"num_heads": 7, "draft_tree": TREE},
    "medusa without heads of its own": {"num_heads": 7, "num_layers": 2, "has_lm_heads": False, "draft_tree": TREE},
}
MORE_EAGLES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle-3 of the whole vocabulary": ("eagle-3", {"draft_vocab_size": None, "rms_norm_eps": 1e-4}),
    "eagle-3 of as many ids": ("eagle-3.1", {"draft_vocab_size": VOCAB_SIZE}),
    "eagle-3 with every norm": ("speculators", {"fc_norm": True, "norm_output": True, "feature_layers": (-1, 2)}),
}
DIFFUSIONS: dict[str, dict[str, Any]] = {
    "diffusion": {"search": "tree", "num_tree_nodes": 12},
    "diffusion with full attention and a mask of its own row": {"attention": "full", "logits_shift": 0},
}
KINDS = [*EAGLES, *MORE_EAGLES, *MEDUSAS, *FALCONS]
KINDS.remove("eagle-1 of fewer tokens")  # whose head is the target's, as that of Eagle-1


def _make(target: Any, kind: str) -> Any:
    """A drafter whose weights all matter."""
    if kind in DIFFUSIONS:
        return make_diffusion(target, **DIFFUSIONS[kind])
    if kind in MEDUSAS:
        return make_medusa(target, **MEDUSAS[kind])
    if kind in FALCONS:
        drafter = make_drafter(target, draft_tree=TREE, **FALCONS[kind])
        with torch.no_grad():
            for weight in drafter.parameters():
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(4)) * 0.05)
        return drafter
    base, options = MORE_EAGLES.get(kind, (kind, {}))
    return make_eagle(target, base, **options, num_tree_nodes=12, tree_depth=NUM_STEPS, tree_top_k=4)


def _norms_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock RMSNorm computes in float32, whatever it is given."""

    def forward(norm: Any, states: torch.Tensor) -> torch.Tensor:
        return norm.weight * states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


@torch.no_grad()
def _logits(target: Any, drafter: Any) -> torch.Tensor:
    """What the drafter says of whole sequences, chains of it where it feeds itself."""
    ids = make_prompt(20)
    states = target(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[layer] for layer in drafter.feature_layers], dim=-1)
    embeds = target.get_input_embeddings()(ids)
    if isinstance(drafter, MedusaDrafter):
        outputs = drafter(features[:, :, None].expand(-1, -1, drafter.config.num_heads, -1))
        return outputs if drafter.config.has_lm_heads else target.lm_head(outputs)
    if not isinstance(drafter, EagleDrafter):
        outputs = drafter(embeds, features, phases=torch.tensor([1]))
        logits = target.lm_head(outputs)
        if drafter.config.transition_rank is None:
            return logits
        seen = None if drafter.config.transition_size is None else torch.stack([embeds.roll(1, 1), embeds], dim=-2)
        return logits + drafter.transition(ids, outputs, seen)
    is_counted = (torch.arange(20) < 20 - torch.arange(NUM_STEPS)[:, None])[None]  # chains end where the text does
    found = drafter(embeds, features, NUM_STEPS, is_counted)
    return target.lm_head(found.states[is_counted]) if drafter.config.version == 1 else found.logits


@pytest.mark.parametrize("shape", [WIDER, NEW_IDS], ids=["wider", "new ids"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_inflated_drafter_has_the_logits_of_the_small_one(
    kind: str, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target()
    drafter = _make(target, kind)
    large_target, large = inflate(target, shape), inflate_drafter(drafter, target, shape)

    large.check_target(large_target)

    rounded = [_logits(target, drafter), _logits(large_target, large)]
    _norms_in_double(monkeypatch)
    expected, found = _logits(target.double(), drafter.double()), _logits(large_target.double(), large.double())
    num_ids = expected.shape[-1]
    tolerance = 1e-6 if found.dtype == torch.float32 else 1e-10  # heads of version 3 end in float32
    torch.testing.assert_close(found[..., :num_ids], expected, rtol=tolerance, atol=tolerance)
    small_error, large_error = ((logits[..., :num_ids] - expected).abs().max() for logits in rounded)
    assert large_error < 3 * small_error
    assert found.shape[-1] == -(-num_ids * shape.vocab_size // VOCAB_SIZE)
    assert shape is WIDER or max(logits[..., num_ids:].max() for logits in (rounded[1], found)) < -1e4


def _recorded(monkeypatch: pytest.MonkeyPatch, target: Any, drafter: Any, **options: Any) -> tuple[Any, list[Any]]:
    """A run, and the tokens and parents of every draft in it."""
    drafts: list[Any] = []
    make = type(drafter).candidate_generator

    def recorded(self: Any, *args: Any) -> Any:
        generator = make(self, *args)
        propose = generator.propose

        def proposed(budget: Any) -> Any:
            draft = propose(budget)
            drafts.append(None if draft is None else (draft.token_ids.tolist(), draft.parents.tolist()))
            return draft

        generator.propose = proposed
        return generator

    with monkeypatch.context() as patches:
        patches.setattr(type(drafter), "candidate_generator", recorded)
        return runs.drafted(target, drafter, **options), drafts


# One kind of each class, for the logits of all kinds are those of the small ones.
@pytest.mark.parametrize(
    "kind",
    ["eagle-1", "eagle-3", "medusa", "falcon with maps of the newest row", "falcon with a transition", *DIFFUSIONS],
)
def test_an_inflated_pair_writes_drafts_and_keeps_what_the_small_one_does(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(seed=2).double()
    drafter = _make(target, kind)
    large_target, large = inflate(target, NEW_IDS), inflate_drafter(drafter, target, NEW_IDS)

    small_run, expected = _recorded(monkeypatch, target, drafter, max_new_tokens=20)
    large_run, found = _recorded(monkeypatch, large_target, large, max_new_tokens=20)

    assert found == expected
    assert sum(len(draft[0][0]) for draft in found if draft) > 60
    assert large_run.sequences.equal(runs.plain(target, max_new_tokens=20).sequences)
    assert large_run.speculation.acceptance_histogram == small_run.speculation.acceptance_histogram
    _run, drafts = _recorded(monkeypatch, large_target, large, max_new_tokens=6, do_sample=True, temperature=1.5)
    assert max(max(draft[0][0]) for draft in drafts if draft) < VOCAB_SIZE


def test_a_draft_vocabulary_grows_with_the_target_s_and_keeps_its_ids(tmp_path: Any) -> None:
    target = make_target()
    drafter = make_eagle(target, "eagle-3")
    small_ids = drafter.draft_token_ids.flip(0)  # published vocabularies need not ascend
    drafter.d2t.copy_(small_ids - torch.arange(40))

    large = inflate_drafter(drafter, target, NEW_IDS)
    large.save_pretrained(tmp_path)
    loaded = EagleDrafter.from_pretrained(tmp_path)

    num_ids = -(-40 * 400 // VOCAB_SIZE)
    assert loaded.config.draft_vocab_size == num_ids == 165
    assert loaded.draft_token_ids.tolist() == [*small_ids.tolist(), *range(VOCAB_SIZE, VOCAB_SIZE + num_ids - 40)]
    assert loaded.t2d.nonzero().flatten().tolist() == sorted(loaded.draft_token_ids.tolist())
    assert inflate_drafter(drafter, target, WIDER).draft_token_ids.equal(small_ids)


def test_options_and_trees_go_with_the_drafter() -> None:
    target = make_target()
    drafter = make_eagle(target, "eagle-1", dynamic_tree=True, num_tree_nodes=9)

    large = inflate_drafter(drafter, target, NEW_IDS, dtype=torch.bfloat16)

    assert isinstance(large.generation_config, SpeculationConfig)
    assert large.generation_config.num_tree_nodes == 9
    assert (large.dtype, large.config.hidden_size, large.config.num_key_value_heads) == (torch.bfloat16, 256, 2)


@pytest.mark.parametrize("version", [1, 3])
def test_an_eagle_of_another_width_than_its_target_is_refused(version: int) -> None:
    target = make_target()
    drafter = EagleDrafter.from_target(target, version=version, embedding_size=32)

    with pytest.raises(OptionError, match="`embedding_size` and the width of each feature must be `hidden_size`, 64"):
        inflate_drafter(drafter, target, WIDER)


def test_a_mask_stands_behind_the_large_vocabulary_and_a_proxy_counts_the_same_text(tmp_path: Any) -> None:
    target, texts = make_target(), [[5, 6, 7, 5, 6, 96]]
    drafter = DiffusionDrafter.from_target(target, num_hidden_layers=2, block_size=4)
    drafter.proxy = NgramProxy.fit(texts, 3, VOCAB_SIZE)

    inflate_drafter(drafter, target, NEW_IDS).save_pretrained(tmp_path)
    large = DiffusionDrafter.from_pretrained(tmp_path)

    assert (large.config.mask_token_id, large.config.draft_vocab_size, large.config.vocab_size) == (400, 400, 400)
    old, new = (each.model.get_input_embeddings().weight for each in (drafter, large))
    assert new[400, :64].equal(old[VOCAB_SIZE])
    assert new[VOCAB_SIZE, :64].equal(old[0])  # the padding token's, as all new ids have it
    assert large.proxy is not None
    assert large.proxy.fingerprint == NgramProxy.fit(texts, 3, 400).fingerprint
    large.check_target(inflate(target, NEW_IDS))


def test_a_diffusion_drafter_with_a_mask_elsewhere_is_refused() -> None:
    target = make_target()
    drafter = make_diffusion(target)
    drafter.config.mask_token_id = 3  # a word, as some models have it

    with pytest.raises(OptionError, match=r"and the mask behind them, as .* has 98 tokens and the mask 3"):
        inflate_drafter(drafter, target, WIDER)
