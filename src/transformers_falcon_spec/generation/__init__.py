"""What touches Transformers' `generate`: the loop, the target as it sees it, and the patch. Knows no drafter by name."""
