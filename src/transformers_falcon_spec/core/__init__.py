"""Trees, masks, sampling, verification and statistics, written with torch alone."""
