"""Render the cards of the drafters in `models/` into `hub_cards/`, from their files and the results files of `benchmarks/`.

Command: python tools/hub_cards.py
"""

import json
from pathlib import Path

from transformers import AutoModel

import transformers_falcon_spec  # noqa: F401  its import makes the kinds of drafters known
from transformers_falcon_spec.hub.card import TRAINING, About, Publication, read_figures, render_card

ROOT = Path(__file__).parents[1]
RESULTS = {
    "falcon-smollm2-135m": ["speed_smollm2.json"],
    "falcon-reference": ["speed.json"],
    "lookahead": [],
    "diffuspec-prefix": ["diffuspec_rivals.json"],
}


def render(name: str) -> str:
    """The card of the drafter `models/NAME`."""
    folder = ROOT / "models" / name
    drafter = AutoModel.from_pretrained(folder)
    return render_card(
        drafter,
        name,
        drafter.config.target_name_or_path,
        figures=read_figures([ROOT / "benchmarks/results" / file for file in RESULTS[name]], drafter),
        records={path.name: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob(TRAINING)},
        publication=Publication(about=About.read(ROOT / "hub_cards" / f"{name}.json")),
    )


def main() -> None:
    """Write the cards."""
    for name in RESULTS:
        path = ROOT / "hub_cards" / f"{name}.md"
        path.write_text(render(name), encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
