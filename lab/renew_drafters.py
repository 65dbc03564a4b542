"""Rewrite the options of drafters that were saved before the first version, so that it reads them.

Weights stay as they are. Command: python -m lab.renew_drafters ../shared/models/trained trained
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

RENAMED = {"target_contract": "target_fingerprint"}
GONE = ("strict",)  # False in all files, which asked for nothing
RULES = {"lazy_walk": "token_matching"}


def renewed(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a config or of a generation config by their present names."""
    new = {}
    for name, value in options.items():
        if name not in GONE:
            new[RENAMED.get(name, name)] = value

    if new.get("verifier") in RULES:
        new["verifier"] = RULES[new["verifier"]]
    return new


def renew(folder: Path) -> None:
    """Rewrite the files of all drafters in a folder and below it; those that say nothing old stay as they are."""
    for path in [*folder.rglob("config.json"), *folder.rglob("generation_config.json")]:
        options = json.loads(path.read_text(encoding="utf-8"))
        new = renewed(options)
        if new != options:
            path.write_text(json.dumps(new, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main(source: str, dest: str) -> None:
    """Copy the folder `source` to `dest`, and rewrite it there; the same name twice rewrites it where it is."""
    if source != dest:
        shutil.copytree(source, dest, copy_function=shutil.copyfile)
        Path(dest).chmod(0o755)

    for folder in Path(dest).iterdir():
        if folder.is_dir():
            folder.chmod(0o755)

    renew(Path(dest))


if __name__ == "__main__":
    main(*sys.argv[1:])
