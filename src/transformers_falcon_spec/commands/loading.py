"""Loading a target, its tokenizer, drafters and trees for a command, and saving trees, in one place."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..core.tree import DraftTree
from ..drafters.base import DrafterModel, check_is_drafter, readable
from ..drafters.contract import check_contract
from ..drafters.eagle import EagleConfig, EagleDrafter
from ..drafters.falcon import FalconSpecConfig, FalconSpecDrafter
from ..drafters.lookahead import LookaheadConfig, LookaheadDrafter
from ..drafters.medusa import MedusaConfig, MedusaDrafter
from ..drafters.pool import DrafterPool
from ..errors import DraftTreeError, OptionError

DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DRAFTERS: dict[str, type[DrafterModel]] = {
    EagleConfig.model_type: EagleDrafter,
    FalconSpecConfig.model_type: FalconSpecDrafter,
    LookaheadConfig.model_type: LookaheadDrafter,
    MedusaConfig.model_type: MedusaDrafter,
}


def load_target(name: str, dtype: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target in evaluation mode, and its tokenizer.

    Raises:
        [`OptionError`]: `dtype` is none of the known ones.
        [`CheckpointError`]: files of the folder cannot be read.
    """
    if dtype not in DTYPES:
        raise OptionError(f"`dtype` must be one of {sorted(DTYPES)}, but it is {dtype!r}.")
    placed: dict[str, Any] = {"device_map": device} if device != "cpu" else {}
    with readable(name):
        target = AutoModelForCausalLM.from_pretrained(name, dtype=DTYPES[dtype], **placed).eval()
        return target, AutoTokenizer.from_pretrained(name)


def read_config(name: str) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """The config of a target, and its tokenizer.

    Raises:
        [`CheckpointError`]: files of the folder cannot be read.
    """
    with readable(name):
        return AutoConfig.from_pretrained(name), AutoTokenizer.from_pretrained(name)


def load_drafter(name: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> DrafterModel:
    """A drafter of the kind that its config names, in the target's type and on its device.

    What differs from the target it was made for is told in the log when it is used; with `tokenizer` the chat template, too.

    Raises:
        [`CheckpointError`]: the config names no drafter of this package.
    """
    with readable(name):
        kind = check_is_drafter(name, DRAFTERS)
    drafter = DRAFTERS[kind].from_pretrained(name, dtype=target.dtype).eval().to(target.device)
    if tokenizer is not None:
        drafter.check_target(target)  # sizes first
        check_contract(drafter, target, tokenizer)
    return drafter


def load_assistant(
    names: list[str], target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> DrafterModel | DrafterPool:
    """A drafter, or several of which the tuner asks one in each step.

    Raises:
        [`CheckpointError`]: a config names no drafter of this package.
    """
    drafters = [load_drafter(name, target, tokenizer) for name in names]
    return drafters[0] if len(drafters) == 1 else DrafterPool(drafters)


def load_drafters(names: list[str], target: PreTrainedModel) -> dict[str, DrafterModel]:
    """Drafters by arm name: `NAME=FOLDER`, or a folder whose last part is the name.

    Raises:
        [`OptionError`]: two arms have the same name.
    """
    drafters: dict[str, DrafterModel] = {}
    for entry in names:
        arm, _, folder = entry.rpartition("=")
        arm = arm or folder.rstrip("/").rpartition("/")[2]
        if arm in drafters:
            raise OptionError(f"Two drafters are called `{arm}`. Name them: `--drafters one=FOLDER other=FOLDER`.")
        drafters[arm] = load_drafter(folder, target)
    return drafters


def load_tree(name: str) -> DraftTree:
    """A static tree from a JSON file that is one or holds one as `draft_tree`, or from a drafter's folder: the one it drafts.

    Raises:
        [`DraftTreeError`]: there is no such file, it is no JSON, it holds no tree, or the tree is not well formed.
    """
    path = Path(name)
    files = [path / "generation_config.json", path / "config.json"] if path.is_dir() else [path]
    for file in files:
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise DraftTreeError(
                f"`{file}` must be JSON, but {error}. Write `trees fit`'s output there anew."
            ) from None
        if isinstance(value, dict) and "parents" not in value:
            value = value.get("draft_tree")
        if value is not None:
            return DraftTree.from_json(value)
    raise DraftTreeError(
        f"`{name}` must be a JSON file with `parents` and `ranks`, or with a `draft_tree` that has them, or the folder of a drafter "
        "that stores such a tree, but none was found. `falcon-spec trees fit` writes one."
    )


def save_tree(folder: Path, tree: dict[str, list[int]]) -> None:
    """Make a static tree the drafter's own: it goes into its `config.json`."""
    save_fields(folder, {"draft_tree": tree})


def save_fields(folder: Path, fields: dict[str, Any]) -> None:
    """Write fields into the `config.json` of a drafter's folder; weights stay as they are."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), **fields}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
