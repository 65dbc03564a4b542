"""Batches whose processors or criteria may treat rows by their index: they see all rows at one length, call for call, as plain decoding shows them."""

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from tests import runs
from tests.batches import LENGTHS, Prompts
from tests.doubles import InformedDrafter, RandomDrafter
from tests.generation.test_loop import ListStreamer
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import SpeculationConfig
from transformers_falcon_spec.errors import GenerationError, OptionError


class Watching(StoppingCriteria):
    """Notes what it is shown; never says yes."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        """Nothing ends."""
        shown = None if scores is None else [step.argmax(-1).tolist() for step in scores]
        self.seen.append((input_ids.tolist(), shown))
        return torch.zeros(len(input_ids), dtype=torch.bool)


class AllDone(Watching):
    """As evaluation harnesses have it: a flag for each row by its index, and one answer once all of them are up."""

    def __init__(self, tokens: list[int], prompt_len: int) -> None:
        super().__init__()
        self.tokens, self.prompt_len, self.flags = tokens, prompt_len, [False] * len(tokens)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> Any:
        """Whether each row has had its token."""
        super().__call__(input_ids, scores, **options)
        for row, token in enumerate(self.tokens):
            self.flags[row] |= token in input_ids[row, self.prompt_len :].tolist()
        return False not in self.flags


class EachItsOwn(AllDone):
    """An answer for each row."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> Any:
        """Which rows have had their token."""
        super().__call__(input_ids, scores, **options)
        return torch.tensor(self.flags)


class ByIndex(LogitsProcessor):
    """Forbids other tokens in each row, and remembers its calls."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Every third token from another one on."""
        self.seen.append(input_ids.tolist())
        for row in range(len(input_ids)):
            scores[row, (row + len(self.seen)) % 3 + 3 :: 3] = -torch.inf
        return scores


def both(target: Any, shown: list[Any], lengths: tuple[int, ...] = LENGTHS, **options: Any) -> runs.Pair:
    """A batch without and with a drafter that knows most of the text, each with one of the two objects in `shown`."""
    prompts, is_processor = Prompts.of(lengths), isinstance(shown[0], LogitsProcessor)
    name, kind = "stopping_criteria", StoppingCriteriaList
    if is_processor:
        name, kind = "logits_processor", LogitsProcessorList
    options = {"attention_mask": prompts.mask, **options}
    plain = runs.plain(target, prompts.ids, **{name: kind([shown[0]])}, **options)
    state = torch.get_rng_state()
    drafter = InformedDrafter(
        RandomDrafter(tune=False), plain.sequences, hit_rate=0.95, mask=prompts.mask
    )  # texts are short
    drafted = runs.drafted(target, drafter, prompts.ids, **{name: kind([shown[1]])}, **options)
    return runs.Pair(plain, drafted, state, torch.get_rng_state())


def ends_of(target: Any, *columns: int) -> list[int]:
    """The tokens at these columns of the new text, one of each row."""
    prompts = Prompts.of()
    text = runs.plain(target, prompts.ids, attention_mask=prompts.mask).sequences[:, prompts.ids.shape[1] :]
    return [int(row[column]) for row, column in zip(text, columns, strict=True)]


@pytest.mark.parametrize("kind", [AllDone, EachItsOwn])
@pytest.mark.parametrize("has_eos", [False, True])
def test_criteria_with_a_flag_for_each_row_stop_as_in_plain_decoding(kind: Any, has_eos: bool) -> None:
    target = make_target().double()
    ends, prompt_len = ends_of(target, 4, 9, 14, 6), Prompts.of().ids.shape[1]
    shown = [kind(ends, prompt_len) for _ in range(2)]
    options = {"eos_token_id": ends_of(target, 0, 0, 18, 0)[2:3]} if has_eos else {}

    pair = both(target, shown, **options)

    pair.assert_equal()
    assert shown[1].seen == shown[0].seen
    assert len(shown[1].seen) < 24
    assert all(row.num_accepted > 0 for row in pair.stats.rows)


def test_criteria_see_the_scores_of_all_rows() -> None:
    shown = [Watching(), Watching()]

    pair = both(make_target().double(), shown, output_scores=True)

    pair.assert_equal()
    assert shown[1].seen == shown[0].seen
    assert [len(scores) for _, scores in shown[1].seen] == list(range(1, 25))
    assert pair.stats.acceptance_length > 1.1


@pytest.mark.parametrize("has_eos", [False, True])
def test_processors_that_see_all_rows_are_called_as_in_plain_decoding(has_eos: bool) -> None:
    target, shown = make_target().double(), [ByIndex(), ByIndex()]
    options = {"eos_token_id": list(range(3, 12))} if has_eos else {}

    pair = both(target, shown, **options)

    pair.assert_equal()
    assert shown[1].seen == shown[0].seen
    assert pair.stats.num_accepted > 0


def test_a_processor_of_the_callers_need_not_be_copied() -> None:
    class Stubborn(ByIndex):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("one of a kind")

    both(make_target().double(), [Stubborn(), Stubborn()]).assert_equal()


@pytest.mark.parametrize("verifier", ["token_matching", "gumbel"])
def test_sampled_rows_are_those_of_a_batch_without_such_a_criterion(verifier: str) -> None:
    target, prompts = make_target().double(), Prompts.of()
    drafter = make_drafter(target, block_size=2)
    drafter.generation_config = SpeculationConfig(verifier=verifier)
    options = {"attention_mask": prompts.mask, "do_sample": True, "temperature": 0.5}
    alone = runs.drafted(target, drafter, prompts.ids, **options)
    watching = Watching()
    informed = InformedDrafter(drafter, alone.sequences, hit_rate=0.95, mask=prompts.mask)

    out = runs.drafted(target, informed, prompts.ids, stopping_criteria=StoppingCriteriaList([watching]), **options)

    assert out.sequences.tolist() == alone.sequences.tolist()
    assert [len(text[0]) for text, _ in watching.seen] == list(range(13, 37))
    assert out.speculation.acceptance_length > 1.05


def test_criteria_are_asked_before_the_streamer_gets_the_tokens_as_in_plain_decoding() -> None:
    target, prompts = make_target().double(), Prompts.of()
    heard: tuple[list[int], list[int]] = ([], [])

    def listening(counts: list[int]) -> dict[str, Any]:
        streamer = ListStreamer()

        class Counting(Watching):
            def __call__(self, *args: Any, **options: Any) -> Any:
                counts.append(len(streamer.chunks))
                return super().__call__(*args, **options)

        criteria = StoppingCriteriaList([Counting()])
        return {"attention_mask": prompts.mask, "stopping_criteria": criteria, "streamer": streamer}

    text = runs.plain(target, prompts.ids, **listening(heard[0])).sequences
    drafter = InformedDrafter(RandomDrafter(), text, mask=prompts.mask)
    out = runs.drafted(target, drafter, prompts.ids, **listening(heard[1]))

    assert out.sequences.equal(text)
    assert out.speculation.acceptance_length > 1
    assert heard[0] == heard[1] == list(range(1, 25))  # the prompts, too


def test_one_row_is_shown_alone() -> None:
    target, watching = make_target().double(), Watching()

    runs.drafted(target, RandomDrafter(), stopping_criteria=StoppingCriteriaList([watching]))

    assert [len(text) for text, _ in watching.seen] == [1] * 24


def test_a_criterion_must_answer_for_the_rows_that_it_is_shown() -> None:
    class ForThree(Watching):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
            return torch.zeros(3, dtype=torch.bool)

    for lengths in ((5, 4), (5,)):
        message = (
            f"one answer for each of the {len(lengths)} rows that it is shown, but .*ForThree` gave answers of shape"
        )
        prompts, criteria = Prompts.of(lengths), StoppingCriteriaList([ForThree()])
        with pytest.raises(GenerationError, match=message):
            runs.drafted(make_target(), RandomDrafter(), prompts.ids, stopping_criteria=criteria)


@pytest.mark.parametrize("make", [Watching, ByIndex])
@pytest.mark.parametrize(
    "options",
    [{"verifier": "recursive_rejection"}, {"verifier": "traversal"}],
    ids=lambda options: options["verifier"],
)
def test_rules_that_verify_rows_by_themselves_are_refused_before_anything_is_written(
    make: Any, options: dict[str, str]
) -> None:
    target, prompts, shown, streamer = make_target(), Prompts.of(), make(), ListStreamer()
    drafter = make_drafter(target, block_size=2)
    drafter.generation_config = SpeculationConfig(**options)
    name, kind = (
        ("stopping_criteria", StoppingCriteriaList) if make is Watching else ("logits_processor", LogitsProcessorList)
    )

    with pytest.raises(OptionError, match=rf"`{make.__name__}` must be shown all rows at one length|may remember"):
        runs.drafted(target, drafter, prompts.ids, do_sample=True, streamer=streamer, **{name: kind([shown])})

    assert shown.seen == []
    assert len(streamer.chunks) <= 1  # the prompts


def test_scores_of_rows_that_may_have_ended_are_refused_before_anything_is_written() -> None:
    prompts, watching = Prompts.of(), Watching()
    criteria = StoppingCriteriaList([watching])

    with pytest.raises(GenerationError, match="`Watching` would be shown the scores of rows that have ended"):
        runs.drafted(
            make_target(), RandomDrafter(), prompts.ids, stopping_criteria=criteria, output_scores=True, eos_token_id=5
        )

    assert watching.seen == []
