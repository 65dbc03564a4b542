"""Staging the files of a publication in one folder: weights, config, options, provenance, code, card and figures.

Only files with known names are published, and neither pickles nor files that hold an access token.
"""

import json
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import eval_result_entries_to_yaml, get_token
from peft import PeftModel

from ..convert.conversion import RECORD as CONVERSION
from ..drafters.base import DrafterModel
from ..drafters.checkpoint import check_is_drafter, read_options, readable
from ..drafters.config_fields import name_portably
from ..drafters.diffuspec.search import DESCRIPTION_FILE
from ..drafters.fingerprint import FIELD
from ..drafters.registry import drafter_classes
from ..drafters.saved_adapters import base_of_adapter
from ..errors import CheckpointError, PublishError
from ..provenance import portable
from .bundle import add_code
from .card import TRAINING, Publication, check_target_name, render_card
from .figures import eval_entries, read_figures, slower_than_alone

logger = logging.getLogger(__name__)

FIGURES = ".eval_results/speculative_decoding.yaml"
_COPIED = ("*.safetensors", "*.safetensors.index.json", "generation_config.json", DESCRIPTION_FILE)
_PICKLES = ("*.bin", "*.ckpt", "*.pickle", "*.pkl", "*.pt", "*.pth")
_TOKENS = (
    re.compile(r"\bhf_[A-Za-z0-9]{30,}"),
    re.compile(r"\bapi_org_[A-Za-z0-9]{30,}"),
    re.compile(r"://[^/\s:@]+:[^/\s@]+@"),
)


def stage(folder: Path, repo_id: str, into: Path, publication: Publication) -> None:
    """Write the publication of the drafter in `folder` into the empty folder `into`.

    Raises:
        [`CheckpointError`]: `folder` holds no complete drafter, or its weights are pickles.
        [`PublishError`]: the target has no name on the Hub, or results belong to another drafter.
    """
    drafter = load_drafter(folder)
    target = check_target_name(publication.target or drafter.config.target_name_or_path)
    figures = read_figures(publication.results, drafter)
    if not figures:
        logger.warning(
            "Nobody will know what `%s` is worth: its card has no figures. Measure it with `falcon-spec bench`, and "
            "give the file as `results`.",
            repo_id,
        )
    for slow in slower_than_alone(figures):
        logger.warning("`%s` does not pay everywhere: with it the target is %s. Its card says so.", repo_id, slow)
    records = {  # records of earlier versions hold absolute paths
        name: portable(json.loads((folder / name).read_text(encoding="utf-8")))
        for name in (TRAINING, CONVERSION)
        if (folder / name).is_file()
    }
    for path in (path for pattern in _COPIED for path in folder.glob(pattern)):
        shutil.copyfile(path, into / path.name)
    for name, record in records.items():
        (into / name).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (into / "config.json").write_text(json.dumps({**config, "target_name_or_path": target}), encoding="utf-8")
    name_portably(into)
    add_code(type(drafter), into, publication.with_code)
    card = render_card(drafter, repo_id, target, figures, records, publication)
    (into / "README.md").write_text(card, encoding="utf-8")
    if entries := eval_entries(figures):
        (into / FIGURES).parent.mkdir()
        rows = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False)
        (into / FIGURES).write_text(rows, encoding="utf-8")


@contextmanager
def merged(folder: Path) -> Iterator[Path]:
    """The folder of a drafter; of an adapter a temporary one, of its drafter with the adapter merged into it."""
    base = base_of_adapter(folder)
    if base is None:
        yield folder
        return
    drafter = drafter_classes()[check_is_drafter(base, drafter_classes())].from_pretrained(base)
    whole: Any = PeftModel.from_pretrained(drafter, str(folder)).merge_and_unload()
    whole.generation_config = read_options(folder) or whole.generation_config
    setattr(whole.config, FIELD, None)  # it was made for the target of the drafter beneath
    with tempfile.TemporaryDirectory() as into:
        whole.save_pretrained(into)
        copy_records(folder, Path(into), (TRAINING,))
        copy_records(Path(base), Path(into), (CONVERSION,))
        yield Path(into)


def copy_records(folder: Path, into: Path, names: Sequence[str] = (TRAINING, CONVERSION)) -> None:
    """Copy the records of where a drafter came from that lie in its folder."""
    for name in names:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, into / name)


def load_drafter(folder: Path) -> DrafterModel:
    """Load the drafter in a folder as its users will load it."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"`{folder}` must be the folder of a drafter, but it has no `config.json`.")
    pickles = sorted(
        path.name for pattern in _PICKLES for path in folder.glob(pattern) if path.name != "training_args.bin"
    )
    if pickles and not list(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"The weights in `{folder}` must be safetensors, but they are pickles: {', '.join(pickles)}. Those can "
            "run code where they are read. Convert them: `falcon-spec convert`."
        )
    with readable(folder):
        kind = check_is_drafter(folder, drafter_classes())
    return drafter_classes()[kind].from_pretrained(folder)


def check_no_tokens(folder: Path, token: str | None = None) -> None:
    """Refuse files that hold `token`, the token of `hf auth login`, or anything that looks like an access token.

    Raises:
        [`PublishError`]: a file holds a token; the message names the file, but not the token.
    """
    in_use = {each for each in (token, get_token()) if each}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors"):
        text = path.read_text(encoding="utf-8")
        if any(each in text for each in in_use) or any(pattern.search(text) for pattern in _TOKENS):
            raise PublishError(
                f"What is published must hold no access token, but `{path.relative_to(folder)}` would hold one. Take "
                "it out of the file that it came from, and revoke it: whoever could read that file has it."
            )
