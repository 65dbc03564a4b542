"""Texts of a target with five tokens, drawn many times with a drafter: do they have the target's distribution?"""

from itertools import product
from typing import Any

import torch

VOCAB_SIZE = 5
PROMPT = torch.tensor([[3, 1, 2]])
NUM_TOKENS = 4  # of a text; the first comes of the prefill, so drafts may be two tokens deep


@torch.no_grad()
def assert_texts_have_the_distribution_of(target: Any, drafter: Any, num_texts: int = 3000) -> None:
    """Chi-square of the last three tokens of texts against their probabilities, each text of a seed of its own."""
    texts = torch.tensor([PROMPT[0].tolist() + list(text) for text in product(range(VOCAB_SIZE), repeat=NUM_TOKENS)])
    probs = torch.softmax(target(texts).logits, dim=-1)[:, PROMPT.shape[1] - 1 : -1]
    text_probs = probs.gather(-1, texts[:, PROMPT.shape[1] :, None])[..., 0].prod(-1)
    expected = num_texts * text_probs.view(VOCAB_SIZE, -1).sum(0)  # whatever the first token is
    found, num_accepted, num_drafted = torch.zeros_like(expected), 0, 0

    for seed in range(num_texts):
        torch.manual_seed(seed)
        out = target.generate(
            PROMPT,
            assistant_model=drafter,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=NUM_TOKENS,
            return_dict_in_generate=True,
        )
        number = 0
        for token in out.sequences[0, -NUM_TOKENS + 1 :].tolist():
            number = number * VOCAB_SIZE + token
        found[number] += 1
        num_drafted += out.speculation.num_drafted
        num_accepted += out.speculation.num_accepted

    assert num_accepted > num_texts / 10  # the rule kept what was drafted
    assert num_drafted > num_texts + num_accepted / 2  # and refused some of it
    is_common = expected >= 5
    statistic, degrees = float(((found - expected) ** 2 / expected)[is_common].sum()), int(is_common.sum())
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5
