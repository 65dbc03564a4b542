"""Text that grows token by token is, in the end, what one call of the tokenizer decodes, cut before a stop string."""

import random
from typing import Any

import pytest

from transformers_falcon_spec.serve.growing_text import GrowingText, StopString

TEXTS = ["Schöne Grüße, 東京! 👩‍👩‍👧 ok", "a\n\n  b\tc", "x" * 40, "<|end|> is a token"]


def grown(text: GrowingText, token_ids: list[int]) -> list[str]:
    """All pieces; tokens after a stop string are not taken in."""
    pieces = []
    for token_id in token_ids:
        pieces.append(text.add(token_id))
        if text.is_stopped:
            break
    return [*pieces, text.end()]


def whole(tokenizer: Any, token_ids: list[int], stop: list[str]) -> str:
    """The naive twin: decode everything again after each token, and cut where a stop string stands."""
    for end in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:end], skip_special_tokens=True)
        found = [text.find(each) for each in stop if each in text]
        if found:
            return text[: min(found)]
    return tokenizer.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("stop", [[], ["ß"], ["b\tc", "\n\n "], ["xxxxy", "xxx"], ["never", "nope"]], ids=str)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_text_up_to_the_stop_string(pair: tuple[Any, Any, Any], text: str, stop: list[str]) -> None:
    tokenizer = pair[1]
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    growing = GrowingText(tokenizer, stop)

    pieces = grown(growing, token_ids)

    assert "".join(pieces) == growing.whole == whole(tokenizer, token_ids, stop)
    assert growing.is_stopped == any(each in text for each in stop)


def test_pieces_of_random_tokens_are_the_text(pair: tuple[Any, Any, Any]) -> None:
    tokenizer, rng = pair[1], random.Random(0)
    for _ in range(50):
        token_ids = [rng.randrange(len(tokenizer)) for _ in range(30)]
        growing = GrowingText(tokenizer)

        assert "".join(grown(growing, token_ids)) == growing.whole == whole(tokenizer, token_ids, [])


def test_a_piece_holds_whole_characters_and_no_beginning_of_a_stop_string(pair: tuple[Any, Any, Any]) -> None:
    tokenizer = pair[1]
    growing = GrowingText(tokenizer, ["END"])

    pieces = [growing.add(token_id) for token_id in tokenizer("東京 E EN", add_special_tokens=False)["input_ids"]]

    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == "東京 E "
    assert growing.end() == "EN"


def num_open_naively(text: str, string: str) -> int:
    """The naive twin: try every length."""
    return max((length for length in range(1, len(string)) if text.endswith(string[:length])), default=0)


def test_a_stop_string_is_followed_as_if_the_whole_text_were_searched_each_time() -> None:
    rng = random.Random(0)
    num_found = num_open = 0
    for _ in range(2_000):
        string = "".join(rng.choices("ab", k=rng.randint(1, 7)))
        text, stop = "", StopString(string)
        for _ in range(8):
            new = "".join(rng.choices("ab", k=rng.randint(0, 3)))
            end = stop.end_in(new)
            text += new

            found = text.find(string)
            assert end == (None if found < 0 else found + len(string) - len(text) + len(new))
            if end is not None:
                num_found += 1
                break
            assert stop.num_open == num_open_naively(text, string)
            num_open += stop.num_open > 1

    assert min(num_found, num_open) > 500


def test_the_work_for_a_stop_string_grows_with_its_length_and_not_with_its_square() -> None:
    class Counted(str):
        """Counts the characters that are looked at."""

        num_looks = 0

        def __getitem__(self, index: Any) -> str:
            Counted.num_looks += isinstance(index, int)
            return super().__getitem__(index)

    looks = []
    for length in (1_000, 2_000):
        Counted.num_looks = 0
        stop = StopString(Counted("a" * length + "b"))
        for _ in range(length):
            stop.end_in("a")
        assert stop.num_open == length
        looks.append(Counted.num_looks)

    assert looks[1] < 2.1 * looks[0]
