"""A near tie of 16 bits is told from a fault."""

import torch

from benchmarks.on_gpu import texts
from tests.tiny import make_prompt, make_target
from transformers_falcon_spec.evaluation.parity import GenerateCall


def test_a_near_tie_is_told_from_a_fault() -> None:
    target, prompt = make_target().bfloat16(), make_prompt()
    call = GenerateCall(target, prompt, 4, {"do_sample": False}, 0)
    plain = call.run(None).new_ids
    scores = texts.replay_plain(call, 1).scores
    order = scores.argsort(descending=True).tolist()

    far = [plain[0], order[-1], 3, 3]
    with torch.no_grad():  # the best two rows of the head become one: their logits are the same
        target.lm_head.weight[order[1]] = target.lm_head.weight[order[0]]
    tied = sorted(order[:2])
    near = [plain[0], tied[1], 3, 3]
    again = call.run(None).new_ids

    assert texts.verdict(call, plain, plain) == "identical"
    assert texts.verdict(call, plain, far) == "different"
    assert (again[1], texts.verdict(call, again, near)) == (tied[0], "near tie")
    assert texts.verdict(call, plain[:3], plain) == "different"
    assert texts.verdict(None, plain, far) == "not examined"
    assert (
        texts.verdict(call, [plain[0] + 1, 5], [plain[0] + 1, 6]) == "not examined"
    )  # alone the row goes another way
