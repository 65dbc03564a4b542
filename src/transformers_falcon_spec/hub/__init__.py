"""The Hub: publishing a drafter with its card, its recipe and its figures."""
