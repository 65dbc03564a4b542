"""What is heard and asked while the text is written: streamers, criteria and clocks find what plain decoding shows them."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer, TextStreamer
from transformers.generation import stopping_criteria

from tests import runs
from tests.chat import make_tokenizer
from tests.doubles import InformedDrafter, RandomDrafter
from tests.tiny import make_target
from transformers_falcon_spec import collect_speculation

MODES: dict[str, dict[str, Any]] = {"greedy": {}, "sampling": runs.SAMPLING}


@pytest.fixture(scope="module")
def target() -> Any:
    return make_target().double()


def both(target: Any, mode: str, make: Callable[[], dict[str, Any]]) -> runs.Pair:
    """A call without and with a drafter that is often right, each with options of its own."""
    options = {"max_new_tokens": 40, **MODES[mode]}
    plain = runs.plain(target, **make(), **options)
    state = torch.get_rng_state()
    drafted = runs.drafted(target, InformedDrafter(RandomDrafter(), plain.sequences), **make(), **options)
    pair = runs.Pair(plain, drafted, state, torch.get_rng_state())
    pair.assert_equal()
    assert pair.stats.num_accepted > 0
    return pair


@pytest.mark.parametrize("mode", MODES)
def test_a_text_streamer_prints_what_it_prints_in_plain_decoding(
    target: Any, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []

    class Printer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            printed.append((text, stream_end))

    both(target, mode, lambda: {"streamer": Printer(make_tokenizer(), skip_prompt=True)})

    half = len(printed) // 2
    assert printed[:half] == printed[half:]
    assert half > 1


@pytest.mark.parametrize("mode", MODES)
def test_an_iterator_in_another_thread_yields_the_chunks_of_plain_decoding(target: Any, mode: str) -> None:
    tokenizer, options = make_tokenizer(), {"max_new_tokens": 40, **MODES[mode]}
    drafter = InformedDrafter(RandomDrafter(), runs.plain(target, **options).sequences)
    chunks, stats = [], []

    def write(streamer: TextIteratorStreamer, assistant: Any) -> None:
        with collect_speculation() as collected:
            runs.plain(target, assistant_model=assistant, streamer=streamer, **options)
        stats.extend(collected)

    for assistant in (None, drafter):
        streamer = TextIteratorStreamer(tokenizer, timeout=600)
        writer = threading.Thread(target=write, args=(streamer, assistant))
        writer.start()
        chunks.append(list(streamer))
        writer.join()

    assert chunks[1] == chunks[0]
    assert len(chunks[0]) > 1
    assert [each.num_accepted > 0 for each in stats] == [True]


@pytest.mark.parametrize("seconds", [6, 20])
@pytest.mark.parametrize("mode", MODES)
def test_max_time_is_looked_at_after_every_token(
    target: Any, mode: str, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)

    def tick() -> float:
        """A clock that goes on by one second each time it is read."""
        clock.now += 1
        return clock.now

    monkeypatch.setattr(stopping_criteria, "time", SimpleNamespace(time=tick))

    pair = both(target, mode, lambda: {"max_time": float(seconds)})

    assert pair.drafted.sequences.shape[1] == 12 + seconds + 1


class SpyCriterion(StoppingCriteria):
    """Remembers what it was shown; may stop at a length."""

    def __init__(self, last_length: int | None, seen: list[Any]) -> None:
        self.last_length, self.seen = last_length, seen

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.seen.append((input_ids[0].tolist(), None if scores is None else len(scores)))
        return torch.full((1,), input_ids.shape[1] == self.last_length)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("last_length", [None, 31, 40])
def test_criteria_are_asked_once_for_each_token_with_the_scores_so_far(
    target: Any, mode: str, last_length: int | None
) -> None:
    seen: list[Any] = []

    def spied() -> dict[str, Any]:
        return {"stopping_criteria": StoppingCriteriaList([SpyCriterion(last_length, seen)]), "output_scores": True}

    pair = both(target, mode, spied)

    num_new = pair.drafted.sequences.shape[1] - 12
    assert num_new == (last_length or 52) - 12
    assert seen[:num_new] == seen[num_new:]
    assert [num_scores for _, num_scores in seen[:num_new]] == list(range(1, num_new + 1))


@pytest.mark.parametrize("mode", MODES)
def test_criteria_are_asked_before_the_streamer_gets_a_token_as_in_plain_decoding(target: Any, mode: str) -> None:
    heard: list[str] = []

    class Listener(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            heard.append(f"asked at {input_ids.shape[1]}")
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def make() -> dict[str, Any]:
        streamer = SimpleNamespace(put=lambda ids: heard.append("put"), end=lambda: heard.append("end"))
        return {"streamer": streamer, "stopping_criteria": StoppingCriteriaList([Listener()])}

    both(target, mode, make)

    half = len(heard) // 2
    assert heard[:half] == heard[half:]
    assert heard[half - 1] == "end"
