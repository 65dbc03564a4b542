"""What of this folder is no test."""

collect_ignore = ["browser.py"]  # run by another Python, which has Chromium
