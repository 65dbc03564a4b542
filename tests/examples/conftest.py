"""What is no test of the examples."""

collect_ignore = ["live_page.py"]  # run by another Python, which has Chromium
