"""Loading a target, its tokenizer, drafters and trees for a command, and saving trees, in one place."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    MuseGlimmerAssistantConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file

from ..core.tree import DraftTree
from ..drafters.base import DrafterModel
from ..drafters.checkpoint import check_is_drafter, readable
from ..drafters.compatibility.contract import FIELD
from ..drafters.compatibility.mismatches import check_contract
from ..drafters.drafter_pool import DrafterPool
from ..drafters.easyspec import LayerParallelDrafter
from ..drafters.registry import drafter_classes
from ..drafters.saved_adapters import base_of_adapter
from ..errors import DraftTreeError, OptionError

DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYER_PARALLEL = "layer-parallel"  # what wraps a language model


def load_target(
    name: str, dtype: str, device: str | dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target, maybe an adapter and the model that it names, in evaluation mode, and its tokenizer."""
    if dtype not in DTYPES:
        raise OptionError(f"`dtype` must be one of {sorted(DTYPES)}, but it is {dtype!r}.")
    placed: dict[str, Any] = {"device_map": device} if device != "cpu" else {}
    with readable(name):
        target = AutoModelForCausalLM.from_pretrained(name, dtype=DTYPES[dtype], **placed).eval()
        return target, _tokenizer(name)


def read_config(name: str) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """The config of a target, and its tokenizer."""
    with readable(name):
        return config_of(name), _tokenizer(name)


def config_of(name: str) -> PreTrainedConfig:
    """The config of a model, or of the one that an adapter was made for."""
    return AutoConfig.from_pretrained(base_of_adapter(name) or name)


def _tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; that of an adapter lies beside it, or beside the model it was made for."""
    base = base_of_adapter(name)
    has_own = base is None or cached_file(name, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False)
    return AutoTokenizer.from_pretrained(name if has_own else base)


def load_drafter(
    name: str,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tree: str | None = None,
) -> DrafterModel:
    """A drafter of the kind that its config names, maybe by its adapter, in the target's type and on its device.

    `layer-parallel:N:FOLDER` is a language model that drafts with groups of N layers. With `draft_tree` it drafts the
    tree of that file.

    What differs from the target it was made for is told in the log when it is used; with `tokenizer` the chat
    template, too.
    """
    is_wrapped = name.partition(":")[0] == LAYER_PARALLEL
    drafter = _layer_parallel(name, target) if is_wrapped else _stored_drafter(name, target)
    if draft_tree is not None:
        _take_tree(drafter, name, draft_tree)
    if draft_tree is not None or (tokenizer is not None and not is_wrapped):
        drafter.check_target(target)  # sizes first
    if tokenizer is not None and not is_wrapped:
        check_contract(drafter, target, tokenizer)
    return drafter


def _stored_drafter(name: str, target: PreTrainedModel) -> DrafterModel:
    with readable(name):
        kind = check_is_drafter(name, drafter_classes())
    return drafter_classes()[kind].from_pretrained(name, dtype=target.dtype).eval().to(target.device)


def _take_tree(drafter: DrafterModel, name: str, file: str) -> None:
    """Put the tree of a file in the place of the drafter's own."""
    tree = load_tree(file)
    if drafter.draft_tree is None:
        raise DraftTreeError(
            f"`--draft_tree` must be given to drafters that draft static trees, but `{name}` is a "
            f"`{type(drafter).__name__}`, which makes its own. Leave it out."
        )
    drafter.generation_config.draft_tree = tree.to_json()
    drafter.generation_config.dynamic_tree = None


def _layer_parallel(name: str, target: PreTrainedModel) -> LayerParallelDrafter:
    group_size, _, folder = name.partition(":")[2].partition(":")
    if not group_size.isdecimal() or int(group_size) < 1 or not folder:
        raise OptionError(
            f"`{LAYER_PARALLEL}:N:FOLDER` needs a whole number above 0 and the folder of a language model, but it is "
            f"{name!r}."
        )
    return LayerParallelDrafter.from_pretrained(folder, target=target, group_size=int(group_size))


def load_trainable(name: str) -> PreTrainedModel:
    """A drafter, or a model that drafts in stock `generate`, in float32, with the weights free that training changes."""
    base = base_of_adapter(name)
    if base is not None:
        raise OptionError(
            f"`--drafter` must be a whole drafter, but `{name}` is an adapter of `{base}`. Train from that one, or "
            "load the adapter, `merge_and_unload()` it and save the drafter that comes out."
        )
    with readable(name):
        kind = config_of(name).model_type
        stock = AutoModel if kind == MuseGlimmerAssistantConfig.model_type else AutoModelForCausalLM
        drafter = drafter_classes().get(kind, stock).from_pretrained(name, dtype=torch.float32)
    with torch.device("meta"):
        fresh = type(drafter)(drafter.config)
    if hasattr(drafter.config, FIELD):
        setattr(drafter.config, FIELD, None)  # training signs it for its own target
    for part, weight in fresh.named_parameters():  # loading makes every weight one to be trained
        drafter.get_parameter(part).requires_grad_(weight.requires_grad)
    return drafter


def load_assistant(
    names: list[str],
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tree: str | None = None,
) -> DrafterModel | DrafterPool:
    """A drafter, or several of which the tuner asks one in each step."""
    drafters = [load_drafter(name, target, tokenizer, draft_tree) for name in names]
    return drafters[0] if len(drafters) == 1 else DrafterPool(drafters)


def load_tree(name: str) -> DraftTree:
    """A static tree from a JSON file that is one or holds one as `draft_tree`, or from a drafter's folder."""
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
        f"`{name}` must be a JSON file with `parents` and `ranks`, or with a `draft_tree` that has them, or the "
        "folder of a drafter that stores such a tree, but none was found. `falcon-spec trees fit` writes one."
    )


def save_tree(folder: Path, tree: dict[str, list[int]]) -> None:
    """Make a static tree the drafter's own: it goes into its `config.json`."""
    save_fields(folder, {"draft_tree": tree})


def save_fields(folder: Path, fields: dict[str, Any]) -> None:
    """Write fields into the `config.json` of a drafter's folder; weights stay as they are."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), **fields}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
