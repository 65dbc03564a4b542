"""What touches Transformers' `generate`: the loop, the target as it sees it, and the seam. Knows no drafter by name."""
