"""Modules beside the examples can be imported as the examples do it; and what is no test of the examples."""

import sys
from pathlib import Path

collect_ignore = ["live_page.py"]  # run by another Python, which has Chromium
sys.path.append(str(Path(__file__).parents[2] / "examples"))
