"""Whether a drafter fits its target: what its config keeps of that, and what differs from another."""
