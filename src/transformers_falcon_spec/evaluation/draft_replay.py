"""How many tokens of a drafter are accepted in texts that a target wrote greedily, found without the target.

Greedy text does not depend on the drafter, so it is written once. The drafter is then asked for drafts step by step,
as the decoding loop would ask, and the text shows which of their nodes are accepted.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core.sampling import private_generator
from ..core.verification import TokenTree, match_tokens
from ..drafters.easyspec import LayerParallelDrafter
from ..errors import OptionError
from ..generation.drafting import Committed, Draft, DraftBudget
from ..generation.loop import MAX_NODES
from ..generation.modes import in_eval_mode
from ..generation.options import SpeculationConfig
from ..generation.target import Target
from ..generation.timed import timed_generate
from .decoding import decoding_options
from .prompts import Prompt, check_lengths
from .records import Records


@dataclass(frozen=True)
class WrittenText:
    """A text that the target wrote greedily: prompt and answer, and how many of the tokens are the prompt's."""

    token_ids: tuple[int, ...]
    prompt_len: int


def written_texts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    records: Records,
) -> tuple[dict[str, WrittenText], float]:
    """The target's texts by prompt, and its tokens per second; what `records` holds already is not written again.

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
            entry = {"prompt": name, "prompt_ids": ids[0].tolist(), "new_ids": timed.new_ids, "seconds": timed.seconds}
            records.append(entry)
            known[name] = entry
    entries = {name: known[name] for name in names}
    texts = {
        name: WrittenText((*entry["prompt_ids"], *entry["new_ids"]), len(entry["prompt_ids"]))
        for name, entry in entries.items()
    }
    num_tokens = sum(len(entry["new_ids"]) for entry in entries.values())
    return texts, num_tokens / sum(entry["seconds"] for entry in entries.values())


@dataclass(frozen=True)
class StepCounts:
    """The counts of steps and drafter passes of writing texts."""

    num_steps: int = 0
    num_accepted: int = 0  # drafted tokens that became text
    num_passes: int = 0  # of the drafter, the exact ones included
    num_drafts: int = 0  # steps that drafted

    def __add__(self, other: "StepCounts") -> "StepCounts":
        """The counts of both together."""
        return StepCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a step, bonus token included."""
        return 1 + self.num_accepted / max(self.num_steps, 1)


class DraftReplay:
    """Counts the accepted tokens of an EasySpec drafter with any groups of layers.

    The target wrote the texts with at most `max_new_tokens` tokens and is not read; the drafter stays as it is.
    """

    def __init__(
        self, target: PreTrainedModel, drafter: LayerParallelDrafter, options: SpeculationConfig, max_new_tokens: int
    ) -> None:
        self.target, self.max_new_tokens = Target(target, ()), max_new_tokens
        self.drafter = copy.copy(drafter)  # the same weights
        self.drafter.config = copy.copy(drafter.config)
        self.drafter.config.backend = "sequential"  # needs no new weights for other groups
        self.drafter.generation_config = options

    def count(self, text: WrittenText, groups: list[list[int]]) -> StepCounts:
        """The counts of writing a text with these groups."""
        self.drafter.config.layer_groups = groups
        counts = StepCounts()
        for draft, num_accepted in self._steps(text):
            num_passes = 0 if draft is None else draft.num_passes
            counts += StepCounts(1, num_accepted, num_passes, int(num_passes > 0))
        return counts

    @torch.no_grad()
    def _steps(self, text: WrittenText) -> Iterator[tuple[Draft | None, int]]:
        """The draft of each step and the number of its accepted tokens; a plain step has None for its draft."""
        max_length = text.prompt_len + self.max_new_tokens
        generator = self.drafter.candidate_generator(self.target, max_length, private_generator())
        ids = torch.tensor([text.token_ids], device=self.drafter.device)
        length = num_new = text.prompt_len + 1  # the prefill gives a token
        while length < len(text.token_ids):
            generator.commit(Committed(ids[:, :length], (length,), (num_new,), None))
            max_depth = max_length - length - 1
            with in_eval_mode(self.drafter):
                draft = generator.propose(DraftBudget((max_depth,), MAX_NODES)) if max_depth else None
            num_accepted = 0 if draft is None else _num_accepted(draft, text.token_ids[length:])
            yield draft, num_accepted
            length, num_new = length + num_accepted + 1, num_accepted + 1


def _num_accepted(draft: Draft, rest: Sequence[int]) -> int:
    """The number of drafted tokens that are accepted if the text goes on with `rest`."""
    tree = TokenTree(draft.parents[0].tolist(), draft.token_ids[0].tolist())
    return match_tokens(tree, lambda node: rest[tree.depths[node]], max_tokens=len(rest)).num_accepted
