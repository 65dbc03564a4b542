"""Which of several drafters drafts: each has its trials, and between them the fastest works."""

from collections.abc import Sequence

from .knowledge import Knowledge

TRIAL = 32  # steps in which a drafter shows what it brings
REST = 512  # steps after which one that was not asked has another trial
LEAD = 1.03  # how many times faster another one must be to take over


def choose(drafters: Sequence[Knowledge], current: int | None) -> int:
    """The drafter of the next step, where `current` was that of the last one; None at the beginning of a text."""
    untried = (number for number, known in enumerate(drafters) if known.num_tried < TRIAL)
    chosen = next(untried, None)
    if chosen is None:
        chosen = max(range(len(drafters)), key=lambda number: drafters[number].rate)
        if current is not None and drafters[current].num_tried > TRIAL:  # else its trial has just ended
            has_lead = drafters[chosen].rate > LEAD * drafters[current].rate
            chosen = chosen if has_lead else current
    for number, known in enumerate(drafters):
        known.num_idle = 0 if number == chosen else known.num_idle + 1
        if known.num_idle == REST:
            known.num_idle = known.num_tried = known.num_left = 0
    drafters[chosen].num_tried += 1
    return chosen
