"""Conversations as a command reads them: from every source, and free of the prompts that it is told to keep out."""

from ..evaluation.prompts import read_prompts
from ..training.conversations import ConversationSet, read_conversations
from ..training.overlap import Forbidden, OverlapIndex, refuse_overlaps

FORBID_HELP = (
    "Prompt files, as `bench` takes them, that the data must not hold: rows that share a run of words are refused."
)


def read_training_data(sources: list[str], limit: int | None, forbid: list[str]) -> ConversationSet:
    """The conversations of `sources`; system turns of the `forbid` files are free to be shared.

    Raises:
        [`ConversationError`]: a file cannot be used, or the data holds forbidden prompts.
    """
    index = OverlapIndex(  # first: a file that is missing is told before the data is read
        Forbidden(content, prompt.origin)
        for prompt in read_prompts(forbid)
        for role, content in prompt.messages
        if role != "system"
    )
    data = read_conversations(sources, limit)
    if forbid:
        refuse_overlaps(data, index)
    return data
