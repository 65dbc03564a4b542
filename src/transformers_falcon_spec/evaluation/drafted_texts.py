"""Texts that a target wrote greedily, and how many tokens of a drafter they would keep, found without the target.

Greedy text does not depend on the drafter, so it is written once; what a drafter would have been accepted of it is then found step by
step, as the decoding loop would ask for drafts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core.sampling import private_generator
from ..core.verification import TokenTree, match_tokens
from ..drafters.base import DrafterModel
from ..errors import OptionError
from ..generation.drafting import Committed, Draft, DraftBudget, TargetView
from ..generation.loop import MAX_NODES
from ..generation.modes import in_eval_mode
from ..generation.timed import timed_generate
from .decoding import decoding_options
from .prompts import Prompt, check_lengths
from .records import Records


@dataclass(frozen=True)
class Text:
    """A text that the target wrote greedily.

    Args:
        token_ids (`tuple[int, ...]`): Prompt and answer.
        prompt_len (`int`): Tokens of the prompt.
    """

    token_ids: tuple[int, ...]
    prompt_len: int


def written_texts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    records: Records,
) -> tuple[dict[str, Text], float]:
    """Let the target write a text for each prompt that `records` does not hold, and measure its tokens per second.

    Raises:
        [`OptionError`]: there is no prompt.
        [`ConversationError`]: a prompt does not fit into the target's context.
    """
    if not prompts:
        raise OptionError("There must be a prompt to answer, but `prompts` and `limit` leave none.")
    check_lengths(prompts, tokenizer, target.config, max_new_tokens)
    known = {entry["prompt"]: entry for entry in records.entries if "prompt" in entry}
    names = {f"{prompt.set_name} {prompt.prompt_id}": prompt for prompt in prompts}
    for name, prompt in tqdm(names.items(), desc="texts", unit="text"):
        if name not in known:
            ids = prompt.input_ids(tokenizer)
            timed = timed_generate(target, ids, max_new_tokens, decoding_options("greedy"), 0)
            found = {"prompt": name, "prompt_ids": ids[0].tolist(), "new_ids": timed.new_ids, "seconds": timed.seconds}
            records.append(found)
            known[name] = found
    asked = [known[name] for name in names]
    texts = {each["prompt"]: Text((*each["prompt_ids"], *each["new_ids"]), len(each["prompt_ids"])) for each in asked}
    return texts, sum(len(each["new_ids"]) for each in asked) / sum(each["seconds"] for each in asked)


@torch.no_grad()
def replayed(
    view: TargetView, drafter: DrafterModel, text: Text, max_new_tokens: int
) -> Iterator[tuple[Draft | None, int]]:
    """Replay a text with a drafter that reads no features: each step's draft, and how many of its tokens are accepted.

    A plain step has None for its draft.

    Args:
        view (`TargetView`): The target that wrote the text; not read.
        drafter ([`DrafterModel`]): The drafter.
        text ([`Text`]): What was written.
        max_new_tokens (`int`): What the text was limited to; the loop drafts no further.
    """
    longest = text.prompt_len + max_new_tokens
    generator = drafter.candidate_generator(view, longest, private_generator())
    ids = torch.tensor([text.token_ids], device=drafter.device)
    length = num_new = text.prompt_len + 1  # the prefill gives a token
    while length < len(text.token_ids):
        generator.commit(Committed(ids[:, :length], (length,), (num_new,), None))
        room = longest - length - 1
        with in_eval_mode(drafter):
            draft = generator.propose(DraftBudget((room,), MAX_NODES)) if room else None
        num_kept = 0 if draft is None else _num_kept(draft, text.token_ids[length:])
        yield draft, num_kept
        length, num_new = length + num_kept + 1, num_kept + 1


def _num_kept(draft: Draft, rest: Sequence[int]) -> int:
    """How many drafted tokens are accepted, if the text goes on with `rest`."""
    tree = TokenTree(draft.parents[0].tolist(), draft.token_ids[0].tolist())
    return match_tokens(tree, lambda node: rest[tree.depths[node]], max_tokens=len(rest)).num_accepted
