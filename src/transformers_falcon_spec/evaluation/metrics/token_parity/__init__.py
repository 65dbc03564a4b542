"""Whether texts are the same."""
