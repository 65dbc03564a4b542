"""Write `examples/qwen3_8b.ipynb` from `examples/qwen3_8b.md`: the text of the page, and its commands and code in cells.

Command: python tools/notebook.py (`make fix` runs it, and a test compares)
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, NOTEBOOK = ROOT / "examples" / "qwen3_8b.md", ROOT / "examples" / "qwen3_8b.ipynb"
BLOCK = re.compile(r"^```(bash|python)\n(.*?)\n```$", re.DOTALL | re.MULTILINE)
RESULTS = re.compile(r"<!-- results:begin -->.*?<!-- results:end -->", re.DOTALL)
HERE = """import os
from pathlib import Path

if Path.cwd().name == "examples":
    os.chdir("..")  # commands are given in the folder of the repository"""


def render(page: str) -> str:
    """The notebook of a page; tables of results stay on the page, which is linked."""
    page = RESULTS.sub("[The page](qwen3_8b.md#what-it-takes) has the tables.", page)
    texts = BLOCK.split(page)  # text, language, code, text ...
    cells = [_text(texts[0]), _code(HERE)]

    for language, code, text in zip(texts[1::3], texts[2::3], texts[3::3], strict=True):
        cells.append(_code(f"%%bash\n{code}" if language == "bash" else code))
        cells += [_text(text)] if text.strip() else []

    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return (
        json.dumps(
            {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1, ensure_ascii=False
        )
        + "\n"
    )


def _text(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text.strip().splitlines(keepends=True)}


def _code(code: str) -> dict[str, Any]:
    source = code.splitlines(keepends=True)
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": source}


def main() -> None:
    """Write the notebook."""
    NOTEBOOK.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
