"""What a target writes greedily, kept so that drafters can be judged by it again and again without the target."""

from collections.abc import Sequence

from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import OptionError
from ..generation.timed import timed_generate
from .decoding import decoding_options
from .drafted_texts import Text
from .prompts import Prompt, check_lengths
from .records import Records


def written_texts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    records: Records,
) -> tuple[dict[str, Text], float]:
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
            found = {"prompt": name, "prompt_ids": ids[0].tolist(), "new_ids": timed.new_ids, "seconds": timed.seconds}
            records.append(found)
            known[name] = found
    asked = [known[name] for name in names]
    texts = {each["prompt"]: Text((*each["prompt_ids"], *each["new_ids"]), len(each["prompt_ids"])) for each in asked}
    return texts, sum(len(each["new_ids"]) for each in asked) / sum(each["seconds"] for each in asked)
