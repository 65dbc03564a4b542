"""Whether a drafter fits a target, and whether its files are whole: what is remembered of the target, and what differs from it."""
