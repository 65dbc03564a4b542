"""Text that grows token by token is, in the end, what one call of the tokenizer decodes, cut before a stop string."""

import random
from typing import Any

import pytest

from transformers_falcon_spec.serve.growing_text import GrowingText

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


class Letters:
    """Each token is a letter."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


def test_of_letters_that_repeat_all_are_shown_but_those_that_may_begin_a_stop_string() -> None:
    rng = random.Random(0)
    num_found = num_held = 0
    for _ in range(2_000):
        stop = ["".join(rng.choices("ab", k=rng.randint(1, 7))) for _ in range(rng.randint(1, 2))]
        letters = rng.choices("ab", k=12)
        growing, shown = GrowingText(Letters(), stop), ""  # type: ignore[arg-type]

        for end, letter in enumerate(letters, start=1):
            shown += growing.add(ord(letter))
            text = "".join(letters[:end])
            if growing.is_stopped:
                break
            held = [text[start:] for start in range(end) if any(each.startswith(text[start:]) for each in stop)]
            assert shown + max(held, key=len, default="") == text
            num_held += len(held) > 1

        num_found += growing.is_stopped
        assert growing.is_stopped == any(each in text for each in stop)
        assert shown + growing.end() == whole(Letters(), [*map(ord, letters)], stop)

    assert min(num_found, num_held) > 500
