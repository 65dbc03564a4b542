"""Targets whose attention selects tokens by an index (such as DeepSeek V3.2), and the length up to which they can be drafted for.

The index gives exact zeros to several tokens at once. Which of them are kept then depends on how many slots of the cache are
compared, and a tree fills more slots than plain decoding does. While the index keeps every token, nothing depends on it.
"""

from transformers import PreTrainedConfig

from ..errors import GenerationError

_ENDLESS = 2**31


def longest_draftable(config: PreTrainedConfig) -> int:
    """The longest text, in tokens, of which the index keeps everything; endless for a target without an index."""
    return getattr(config, "index_topk", None) or _ENDLESS


def note_of(config: PreTrainedConfig) -> str:
    """The sentence in `out.speculation.notes` when a text may become longer than the index keeps."""
    limit = longest_draftable(config)
    return f"The target's attention keeps {limit} tokens of a text by an index, so drafting ends where a text is longer than that."


def check_rows(config: PreTrainedConfig, longest_end: int) -> None:
    """Refuse a batch whose rows may outgrow the index: drafting moves rows to other slots, and ties would be broken otherwise.

    Args:
        config ([`~transformers.PreTrainedConfig`]): The target's.
        longest_end (`int`): Tokens that the longest of several rows may have in the end.

    Raises:
        [`GenerationError`]: they may become more than the index keeps.
    """
    limit = longest_draftable(config)
    if longest_end > limit:
        raise GenerationError(
            f"The rows of a batch may hold at most the {limit} tokens that this target's index keeps (`index_topk`), but they may "
            f"grow to {longest_end}. Call `generate` once for each prompt, or end the texts before."
        )
