"""How much of the drafts is kept."""
