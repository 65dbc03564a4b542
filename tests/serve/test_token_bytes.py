"""The bytes of tokens, joined, are the text: clients read characters from them that several tokens make."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from transformers_falcon_spec import GenerationStats
from transformers_falcon_spec.serve.choice import Choice
from transformers_falcon_spec.serve.engine import TextRequest, Ticket, Written
from transformers_falcon_spec.serve.token_bytes import bytes_of

TEXT = "日本 😀"


def with_byte_fallback() -> PreTrainedTokenizerFast:
    """A tokenizer in the form of Llama 2's: spaces are marked, and characters that it does not know are bytes."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "日"]
    vocab = {word: token_id for token_id, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def told(tokenizer: Any, token_ids: list[int]) -> list[dict[str, Any]]:
    """What a chat tells of the probabilities of these tokens."""
    ticket = Ticket(TextRequest((1,), 99, num_top=2), print, 0, tokenizer, frozenset())
    for token_id in token_ids:
        ticket.is_end(torch.tensor([token_id]))
    ticket.note_logprobs([torch.eye(len(tokenizer))[token_id] for token_id in token_ids])
    ended: list[Any] = []
    ticket.tell = ended.append
    ticket.end(GenerationStats())
    written: Written = ended[-1]
    assert written.text == tokenizer.decode(token_ids)
    return Choice(0, "call", is_chat=True).whole(written)["logprobs"]["content"]


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_bytes_of_all_tokens_are_the_text(kind: str, pair: tuple[Any, Any, Any]) -> None:
    tokenizer = pair[1] if kind == "byte level" else with_byte_fallback()
    token_ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]

    found = told(tokenizer, token_ids)

    assert len(found) > len(TEXT)  # some hold parts of characters
    assert bytes(byte for each in found for byte in each["bytes"]).decode() == TEXT
    for each in found:
        likeliest, _ = each["top_logprobs"]
        assert likeliest == {name: each[name] for name in ("token", "logprob", "bytes")}


def test_bytes_that_a_tokenizer_does_not_tell_are_left_open() -> None:
    assert bytes_of("##x", "\ufffd") is None  # spelled in letters of its own
    assert bytes_of("æĹ", "a\ufffd") is None  # spelled otherwise than it is decoded
