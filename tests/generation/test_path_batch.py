"""Trees read path by path: for targets that take a token's position from its slot."""

import pytest
import torch

from tests import reference, runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.tiny import CHAIN_FAMILIES, make_drafter, make_prompt, make_target
from transformers_falcon_spec import DraftTree
from transformers_falcon_spec.generation.probe import probe
from transformers_falcon_spec.generation.stock_cache import PathBatch

PATH = (0, 1, 4, 7, 10)  # of `runs.BUSHY`


@pytest.mark.parametrize("family", CHAIN_FAMILIES)
def test_each_node_is_read_as_if_its_path_were_the_text(family: str) -> None:
    model, prompt = make_target(family).double(), make_prompt(23)
    first, second = (make_prompt(len(runs.BUSHY), seed)[0].tolist() for seed in (1, 2))
    tree, target = DraftTree.from_lists(runs.BUSHY), runs.prefilled(model, prompt)

    with torch.no_grad():
        logits = target.read(torch.tensor([first]), tree, "paths").logits[0]
        target.keep(len(first), [PATH])
        after = target.read(torch.tensor([second]), tree, "paths").logits[0]

    kept = torch.cat([prompt, torch.tensor([[first[node] for node in PATH]])], dim=-1)
    for found, text, nodes in ((logits, prompt, first), (after, kept, second)):
        expected = reference.tree_logits(model, text, nodes, runs.BUSHY)
        assert (found - expected).abs().max() < 1e-5 * expected.std()


def test_fillers_are_in_no_path() -> None:
    paths = PathBatch.of((-1, 0, 1, 0, -1, -1), torch.device("cpu"))

    assert paths.paths == [(0, 1, 2), (0, 3)]
    assert paths.nodes.tolist() == [[0, 1, 2], [0, 3, 3]]
    assert paths.by_node(torch.arange(6).reshape(2, 3))[0, :4].tolist() == [3, 1, 2, 4]
    assert [paths.row_of(path) for path in [(0,), (0, 3), (0, 1)]] == [0, 1, 0]


@pytest.mark.parametrize("family", CHAIN_FAMILIES)
def test_siblings_are_accepted_and_features_and_states_are_those_of_plain_decoding(family: str) -> None:
    target = make_target(family).double()
    options = {"output_hidden_states": True, "max_new_tokens": 30}
    gold = runs.plain(target, **options)
    drafter = RandomDrafter(num_nodes=16, feature_layers=(1, -1))

    pair = runs.both(target, InformedDrafter(drafter, gold.sequences), **options)

    pair.assert_equal()
    assert probe(target).form == "paths"
    assert pair.stats.acceptance_length > 1.5
    assert [note.split(":")[0] for note in pair.stats.notes] == [
        "The target verifies one row for each path of a draft"
    ]
    commits = drafter.generators[-1].commits
    assert max(len(set(commit.num_new)) for commit in commits) == 1
    with torch.no_grad():
        states = target(gold.sequences, use_cache=False, output_hidden_states=True).hidden_states
    features = torch.cat([commit.features for commit in commits], dim=1)
    torch.testing.assert_close(features, torch.cat([states[1], states[-1]], dim=-1)[:, :-1], rtol=1e-3, atol=1e-4)
    for ours, plain in zip(pair.drafted.hidden_states, pair.plain.hidden_states, strict=True):
        for mine, theirs in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_padding_and_a_falcon_drafter() -> None:
    target, mask = make_target("bloom").double(), torch.ones(1, 12, dtype=torch.long)
    mask[0, :4] = 0
    tree = {"parents": [-1, 0, 0, 1, 1, 2, 3], "ranks": [-1, 0, 1, 0, 1, 0, 0]}
    gold = runs.plain(target, attention_mask=mask).sequences
    drafter = InformedDrafter(make_drafter(target, block_size=2, draft_tree=tree), gold, mask=mask)

    pair = runs.both(target, drafter, attention_mask=mask)

    pair.assert_equal()
    assert pair.stats.acceptance_length > 1.3


def test_a_call_that_asks_for_attentions_reads_chains() -> None:
    target = make_target("gpt_neo", attn_implementation="eager").double()
    gold = runs.plain(target).sequences

    pair = runs.both(target, InformedDrafter(RandomDrafter(), gold), output_attentions=True)

    pair.assert_equal()
    assert "chains only" in pair.stats.notes[0]
