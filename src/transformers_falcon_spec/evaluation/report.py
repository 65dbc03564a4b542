"""Results files into documents. Every number in README and docs stands between markers and comes from here."""

import json
from pathlib import Path

from ..errors import OptionError
from . import diffusion_tables, group_tables, rival_tables, speed_tables, tables, training_tables, tuning_tables
from .adaptation_table import adaptation
from .matrix import matrix, matrix_in_short
from .overview import overview

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
BOOKKEEPING = ("bookkeeping.json", "bookkeeping_0.3b.json")
CIRCUMSTANCES = ("circumstances.json", "circumstances_0.3b.json")
_BUDGETS_OF = ("", "_finalists", "_held_out", "_0.3b", "_0.3b_large", "_0.3b_finalists")
BUDGETS = tuple(f"budgets{of}.json" for of in _BUDGETS_OF)
GROUP_SPEED = ("easyspec_speed.json", "easyspec_speed_0.3b.json")
DIFFUSION_SPEED = ("diffuspec_speed.json", "diffuspec_speed_sampling.json", "diffuspec_speed_0.3b.json")
_RENDERERS = {
    "speed.json": speed_tables.speed,
    "batches.json": tables.batches,
    **dict.fromkeys(tables.PARITY_TITLES, tables.parity),
    "bounds.json": tables.bounds,
    **dict.fromkeys(tables.ABLATION_TITLES, tables.ablation),
    "memory.json": tables.memory,
    "architectures.json": matrix,
    "architectures_oldest.json": matrix_in_short,
    "verifiers.json": tables.verifiers,
    "soak.json": tables.soak,
    "tree_cost.json": tables.tree_cost,
    **dict.fromkeys(BUDGETS, tuning_tables.budgets),
    **dict.fromkeys(CIRCUMSTANCES, tuning_tables.circumstances),
    "no_loss.json": speed_tables.speed,
    **dict.fromkeys(BOOKKEEPING, tuning_tables.bookkeeping),
    "rivals.json": speed_tables.speed,
    "depths.json": rival_tables.depths,
    **dict.fromkeys(("training.json", "diffuspec_training.json"), training_tables.training),
    **dict.fromkeys(training_tables.ABLATIONS, training_tables.recipe_ablation),
    "recipes.json": training_tables.recipes,
    "calibration.json": tables.calibration,
    "easyspec_acceptance.json": group_tables.group_acceptance,
    **dict.fromkeys(GROUP_SPEED, group_tables.group_speed),
    "diffuspec_ablation.json": diffusion_tables.diffusion_ablation,
    **dict.fromkeys(DIFFUSION_SPEED, diffusion_tables.diffusion_speed),
    "diffuspec_rivals.json": speed_tables.speed,
    "diffuspec_cache.json": diffusion_tables.diffusion_cache,
    "training_speed.json": training_tables.training_speed,
    "lora.json": adaptation,
}
README = "README.md"  # has the few numbers of `overview`; all tables stand on pages
PAGES = {
    "benchmarks.md": ["speed.json", "bounds.json", "memory.json"],
    "batches.md": ["batches.json"],
    "architectures.md": ["architectures.json", "architectures_oldest.json"],
    "parity.md": [*tables.PARITY_TITLES, "soak.json"],
    "verifiers.md": ["verifiers.json"],
    "scale.md": ["tree_cost.json"],
    "tuning.md": [*BUDGETS, *CIRCUMSTANCES, "no_loss.json", *BOOKKEEPING],
    "rivals.md": ["training.json", "depths.json", "rivals.json"],
    "calibration.md": ["calibration.json"],
    "easyspec.md": ["easyspec_acceptance.json", *GROUP_SPEED],
    "diffuspec.md": [
        "diffuspec_training.json",
        "diffuspec_ablation.json",
        *DIFFUSION_SPEED,
        "diffuspec_rivals.json",
        "diffuspec_cache.json",
    ],
    "train_your_own.md": [
        "recipes.json",
        *training_tables.ABLATIONS,
        *tables.ABLATION_TITLES,
        "training_speed.json",
        "lora.json",
    ],
}


def render_into(document: Path, results: Path) -> None:
    """Replace what stands between the markers of `document` by the tables that belong there, as far as a folder has them.

    Raises:
        [`OptionError`]: the document lacks the markers.
    """
    text = document.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise OptionError(f"`{document}` must hold the lines `{BEGIN}` and `{END}`; the tables go between them.")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    joined = "\n\n".join(overview(results) if document.name == README else _tables(document.name, results))
    document.write_text(f"{before}{BEGIN}\n{joined}\n{END}{after}", encoding="utf-8")


def _tables(page: str, results: Path) -> list[str]:
    """The tables of a page; one that is not listed gets all tables."""
    return [
        _RENDERERS[name](json.loads(path.read_text(encoding="utf-8")), name)
        for name in PAGES.get(page, list(_RENDERERS))
        if (path := results / name).is_file()
    ]
