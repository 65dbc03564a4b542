"""What of an answer that was cut is kept."""

import pytest

from transformers_falcon_spec.training.answers import Reply
from transformers_falcon_spec.training.regenerate import Answered

OPENING = [{"role": "user", "content": "one"}]


@pytest.mark.parametrize(
    ("prompt", "reply", "is_kept"),
    [
        ("", Reply("Two", False), True),
        ("", Reply("<think>one mo", False), False),
        ("<think>", Reply("one mo", False), False),
        ("<think>", Reply("one more</think>Tw", False), True),
        ("<think>", Reply("", False, "one mo"), False),
        ("<think>", Reply("Tw", False, "one more"), True),  # the server took the thought out
        ("<think>", Reply("one more", True), True),
    ],
)
def test_an_answer_is_left_out_only_where_its_thought_was_cut(prompt: str, reply: Reply, is_kept: bool) -> None:
    answered = Answered()

    answered.add(OPENING, reply, prompt)

    assert bool(answered.messages) == is_kept
    assert (answered.ending == "") == reply.is_complete
