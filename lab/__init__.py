"""What measures this repository and shows its figures: not part of the package, run from the repository's root."""
