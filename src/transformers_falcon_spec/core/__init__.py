"""Trees, masks, draws, the verdict and the counts: torch alone, no Transformers, no files, no device moves."""
