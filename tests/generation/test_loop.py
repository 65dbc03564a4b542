"""The loop: every processor, criterion, streamer and generator sees what it would see in plain decoding."""

import string
import threading
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from tests import reference, runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.tiny import VOCAB_SIZE, make_drafter, make_prompt, make_target
from transformers_falcon_spec import SpeculationConfig


class ListStreamer(BaseStreamer):
    """Keeps what it was given."""

    def __init__(self) -> None:
        self.chunks: list[list[int]] = []
        self.num_ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.chunks.append(value.flatten().tolist())

    def end(self) -> None:
        self.num_ends += 1


class SpyCriterion(StoppingCriteria):
    """Remembers the texts that it saw; may stop at a length."""

    def __init__(self, last_length: int | None = None) -> None:
        self.last_length = last_length
        self.texts: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.texts.append(input_ids[0].tolist())
        return torch.full((1,), input_ids.shape[1] == self.last_length)


class SpyProcessor(LogitsProcessor):
    """Remembers the texts that it saw and changes nothing."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.texts.append(input_ids[0].tolist())
        return scores


@pytest.fixture(scope="module")
def target() -> Any:
    """A Llama in double precision."""
    return make_target().double()


@pytest.fixture(scope="module")
def gold(target: Any) -> torch.Tensor:
    """What it writes greedily."""
    return runs.plain(target, max_new_tokens=40).sequences


@pytest.fixture
def informed(gold: torch.Tensor) -> InformedDrafter:
    """A drafter that is often right."""
    return InformedDrafter(RandomDrafter(), gold)


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable character."""
    vocabulary = {character: index for index, character in enumerate(string.printable[:VOCAB_SIZE])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_plain_greedy_text_is_what_rereading_everything_gives(target: Any, gold: torch.Tensor) -> None:
    assert gold.equal(reference.greedy(target, make_prompt(), 40))


def test_streamer_gets_the_chunks_of_plain_decoding(target: Any, informed: InformedDrafter) -> None:
    plain, drafted = ListStreamer(), ListStreamer()

    runs.plain(target, streamer=plain)
    runs.drafted(target, informed, streamer=drafted)

    assert drafted.chunks == plain.chunks
    assert drafted.num_ends == plain.num_ends == 1


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 7])
def test_text_ends_exactly_at_max_new_tokens(target: Any, informed: InformedDrafter, max_new_tokens: int) -> None:
    pair = runs.both(target, informed, max_new_tokens=max_new_tokens)

    pair.assert_equal(is_kept=False)  # some end before anything can be
    assert pair.drafted.sequences.shape[1] == 12 + max_new_tokens
    assert pair.drafted.past_key_values.get_seq_length() == 11 + max_new_tokens


@pytest.mark.parametrize("column", range(12, 24))
def test_text_ends_exactly_at_eos(target: Any, gold: torch.Tensor, informed: InformedDrafter, column: int) -> None:
    eos = [int(gold[0, column]), 96]

    pair = runs.both(target, informed, eos_token_id=eos)

    pair.assert_equal(is_kept=False)  # some end before anything can be
    assert pair.drafted.sequences[0, -1] == eos[0]
    assert pair.stats.num_tokens == 1 + pair.stats.num_accepted + pair.stats.num_steps


@pytest.mark.parametrize("column", [14, 17, 21])
def test_text_ends_exactly_at_a_stop_string(
    target: Any, gold: torch.Tensor, informed: InformedDrafter, column: int
) -> None:
    tokenizer = _tokenizer()
    stop = tokenizer.decode(gold[0, column : column + 2])

    pair = runs.both(target, informed, stop_strings=[stop], tokenizer=tokenizer)

    pair.assert_equal(is_kept=False)  # some end before anything can be
    assert pair.drafted.sequences.shape[1] <= column + 2
    assert tokenizer.decode(pair.drafted.sequences[0]).endswith(stop)


@pytest.mark.parametrize("last_length", [None, 15, 22])
def test_criteria_see_every_committed_token_once(
    target: Any, informed: InformedDrafter, last_length: int | None
) -> None:
    spies = [SpyCriterion(last_length), SpyCriterion(last_length)]

    runs.plain(target, stopping_criteria=StoppingCriteriaList([spies[0]]))
    runs.drafted(target, informed, stopping_criteria=StoppingCriteriaList([spies[1]]))

    assert spies[1].texts == spies[0].texts
    assert len(spies[1].texts[-1]) == (last_length or 36)


def test_processors_see_every_text_once(target: Any, informed: InformedDrafter) -> None:
    spies = [SpyProcessor(), SpyProcessor()]

    runs.plain(target, logits_processor=LogitsProcessorList([spies[0]]))
    runs.drafted(target, informed, logits_processor=LogitsProcessorList([spies[1]]))

    assert spies[1].texts == spies[0].texts


@pytest.mark.parametrize("prompt_len", [1, 2, 3])
@pytest.mark.parametrize("block_size", [2, 4])
def test_prompts_shorter_than_a_block_are_served(target: Any, prompt_len: int, block_size: int) -> None:
    prompt = make_prompt(prompt_len, seed=5)
    drafter = make_drafter(target, block_size=block_size)

    pair = runs.informed(target, drafter, prompt)

    pair.assert_equal()
    assert pair.stats.num_passes > 0


@pytest.mark.usefixtures("machine_clock")
def test_statistics_add_up(target: Any, informed: InformedDrafter) -> None:
    informed.generation_config = SpeculationConfig(tune=False)
    stats = runs.drafted(target, informed, max_new_tokens=30).speculation

    assert stats.num_tokens == 30 == 1 + stats.num_accepted + stats.num_steps
    assert stats.acceptance_length > 1.5
    assert sum(stats.acceptance_histogram.values()) == stats.num_steps
    assert sum(kept * steps for kept, steps in stats.acceptance_histogram.items()) == stats.num_accepted
    assert sum(stats.kept_by_depth) == stats.num_accepted
    assert stats.offered_by_depth[0] <= stats.num_passes <= stats.num_steps
    phases = stats.prefill_seconds, stats.draft_seconds, stats.verify_seconds, stats.other_seconds
    assert all(seconds > 0 for seconds in phases)
    assert sum(phases) == pytest.approx(stats.total_seconds)


def test_depths_below_the_last_token_are_not_counted_as_refused(target: Any, gold: torch.Tensor) -> None:
    omniscient = InformedDrafter(make_drafter(target, block_size=5), gold, hit_rate=1.0)
    omniscient.generation_config = SpeculationConfig(tune=False)

    stats = runs.drafted(target, omniscient, max_new_tokens=40, eos_token_id=int(gold[0, 20])).speculation

    assert stats.kept_by_depth == stats.offered_by_depth == [2, 1, 1, 1, 1]


def test_each_committed_token_comes_with_its_feature(target: Any, gold: torch.Tensor) -> None:
    drafter = RandomDrafter(feature_layers=(0, 2, -1))

    runs.drafted(target, InformedDrafter(drafter, gold), max_new_tokens=40)

    commits = drafter.generators[0].commits
    with torch.no_grad():
        states = target(gold, use_cache=False, output_hidden_states=True).hidden_states
    features = torch.cat([commit.features for commit in commits], dim=1)
    assert [commit.num_new for commit in commits] == [(commit.features.shape[1],) for commit in commits]
    assert commits[0].num_new == (12,)
    assert commits[-1].sequence_ids.equal(gold)
    expected = torch.cat([states[0], states[2], states[-1]], dim=-1)[:, :-1]
    torch.testing.assert_close(features, expected, rtol=0, atol=1e-9)


def test_a_generator_without_features_gets_none(target: Any) -> None:
    drafter = RandomDrafter()

    runs.drafted(target, drafter)

    assert all(commit.features is None for commit in drafter.generators[0].commits)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_steps_without_a_proposal_are_plain_steps(family: str) -> None:
    target, drafter = make_target(family).double(), RandomDrafter(feature_layers=(-1,), proposals=0.5)
    gold = runs.plain(target).sequences

    pair = runs.both(target, InformedDrafter(drafter, gold, hit_rate=1.0))

    pair.assert_equal()
    assert 0 < pair.stats.num_passes < pair.stats.num_steps
    assert pair.stats.offered_by_depth[0] == pair.stats.num_passes


def test_lookahead_nodes_are_read_but_never_committed(target: Any, gold: torch.Tensor) -> None:
    everyone = RandomDrafter(num_nodes=5, num_lookahead=4)

    pair = runs.both(target, InformedDrafter(everyone, gold, hit_rate=1.0))

    pair.assert_equal(is_kept=False)
    assert pair.stats.num_accepted == 0


def test_lookahead_nodes_count_as_nodes_but_not_as_guesses(target: Any) -> None:
    everyone = RandomDrafter(num_nodes=5, num_lookahead=4)

    stats = runs.drafted(target, everyone).speculation

    assert stats.num_drafted > 0
    assert stats.offered_by_depth == []


def test_a_generator_that_wants_them_gets_the_choices_after_every_node(target: Any) -> None:
    drafter = RandomDrafter(num_nodes=6, num_lookahead=2, wants_node_choices=True, tune=False)
    prompts = torch.cat([make_prompt(), make_prompt(seed=1)])

    gold = runs.drafted(target, drafter, prompts, max_new_tokens=12).sequences

    generator = drafter.generators[0]
    assert generator.commits[0].node_choices is None  # the prompt holds no draft
    steps = zip(
        generator.drafts, generator.commits, generator.commits[1:], strict=False
    )  # the last one drafts nothing
    for draft, before, after in steps:
        for row in range(2):
            prefix = gold[row : row + 1, : before.lengths[row] - 1]
            parents, token_ids = draft.parents[row].tolist(), draft.token_ids[row].tolist()
            is_node = [node == 0 or parent >= 0 for node, parent in enumerate(parents)]
            expected = reference.tree_logits(target, prefix, token_ids, parents).argmax(-1)
            assert after.node_choices[row][is_node].equal(expected[is_node])


def test_others_get_no_choices(target: Any) -> None:
    drafter = RandomDrafter()

    runs.drafted(target, drafter)

    assert all(commit.node_choices is None for commit in drafter.generators[0].commits)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_no_draft_stands_beyond_the_context(family: str) -> None:
    field = "n_positions" if family == "gpt2" else "max_position_embeddings"
    target = make_target(family, **{field: 40}).double()
    prompt = make_prompt(30)
    gold = runs.plain(target, prompt, max_new_tokens=10).sequences

    pair = runs.both(target, InformedDrafter(RandomDrafter(num_nodes=16), gold), prompt, max_new_tokens=10)

    pair.assert_equal()
    assert pair.stats.acceptance_length > 1


@pytest.mark.parametrize("prefill_chunk_size", [1, 5, 12, 50])
def test_prompts_read_in_chunks_yield_the_same_text(target: Any, gold: torch.Tensor, prefill_chunk_size: int) -> None:
    drafter = RandomDrafter(feature_layers=(-1,))

    pair = runs.both(target, InformedDrafter(drafter, gold), prefill_chunk_size=prefill_chunk_size)

    pair.assert_equal()
    assert pair.stats.num_accepted > 0
    assert drafter.generators[0].commits[0].features.shape[1] == 12


def test_chain_fallback_is_noted() -> None:
    target = make_target("bloom", attn_implementation="eager").double()
    gold = runs.plain(target).sequences

    pair = runs.both(target, InformedDrafter(RandomDrafter(), gold), output_attentions=True)

    pair.assert_equal()
    assert pair.stats.acceptance_length > 1.5
    assert [note.split(":")[0] for note in pair.stats.notes] == ["The target verifies chains only"]


def test_drafter_gets_a_generator_that_follows_from_the_seed_alone(target: Any) -> None:
    drafter = RandomDrafter()

    for seed in (1, 1, 2):
        runs.drafted(target, drafter, seed=seed)

    states = [generator.rng.initial_seed() for generator in drafter.generators]
    assert states[0] == states[1] != states[2]


def test_two_threads_share_target_and_drafter() -> None:
    target = make_target().double()
    drafter = make_drafter(target, block_size=2)
    prompts = [make_prompt(10, seed) for seed in range(2)]
    alone = [runs.plain(target, prompt).sequences for prompt in prompts]
    written: dict[int, torch.Tensor] = {}

    def write(index: int) -> None:
        written[index] = runs.drafted(target, drafter, prompts[index]).sequences

    threads = [threading.Thread(target=write, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [written[index].tolist() for index in range(2)] == [text.tolist() for text in alone]


def test_target_is_left_as_it_was(target: Any, informed: InformedDrafter) -> None:
    before = {name: value.clone() for name, value in target.state_dict().items()}
    num_hooks = sum(len(part._forward_hooks) for part in target.modules())

    runs.drafted(target, informed)

    assert all(value.equal(before[name]) for name, value in target.state_dict().items())
    assert sum(len(part._forward_hooks) for part in target.modules()) == num_hooks
