"""Loading targets, tokenizers, drafters and static trees for commands, and changing fields of a saved config."""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    MuseGlimmerAssistantConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    logging,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.hub import cached_file

from ..convert.conversion import check_there, own_checkpoint, read_drafter
from ..core.tree import DraftTree
from ..drafters.base import DrafterModel
from ..drafters.checkpoint import base_of_adapter, kind_of, readable
from ..drafters.easyspec import LayerParallelDrafter
from ..drafters.falcon import paper_tree
from ..drafters.fingerprint import FIELD, check_fingerprint
from ..drafters.registry import class_of, drafter_classes
from ..drafters.target_loading import gguf_options, load_weights
from ..drafters.target_loading import read_config as target_config
from ..errors import DraftTreeError, OptionError, short
from ..evaluation.methods import Method, prompt_lookup, stock_assistant, stock_dflash, with_drafter
from ..generation.model_parts import device_of

DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CAPTURES: dict[str, bool | str] = {"auto": "auto", "yes": True, "no": False}  # by the words of `--capture`
PROMPT_LOOKUP = "prompt-lookup"
PAPER_TREE = "paper"  # in place of the file of a tree
LAYER_PARALLEL = "layer-parallel"  # prefix of the name of a language model that is to draft with EasySpec


def load_target(
    name: str, dtype: str, device: str, gguf_file: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a target in evaluation mode, and its tokenizer; `name` may also be that of an adapter.

    Its weights may be a GGUF file, `gguf_file` or the only one in the folder.
    """
    check_device(device)
    check_there(name, "target")
    is_on_cpu = device == "cpu" or (device == "auto" and not torch.accelerator.is_available())
    device_map: dict[str, Any] = {}
    if not is_on_cpu:
        import_module("accelerate")  # which Transformers needs for a `device_map`
        device_map = {"device_map": device}

    with readable(name):
        gguf = gguf_options(name, gguf_file)
        target = load_weights(name, target_config(name, gguf), gguf, dtype=DTYPES[dtype], **device_map)
        return target, _tokenizer(name, gguf)


def check_device(device: str) -> None:
    """Refuse what is no device, and a CUDA device that PyTorch does not find here."""
    if device != "auto":
        try:
            torch.device(device)
        except RuntimeError as error:
            raise OptionError(f"`device` must be cpu, cuda, cuda:N or auto, but it is {device!r}.") from error

    kind, _, number = device.partition(":")
    num_found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(number if number.isdecimal() else 0) >= num_found:
        raise OptionError(
            f"`device` must be one that this machine has, but it is {device!r}, and PyTorch {torch.__version__} finds "
            f"{num_found} CUDA devices. Give `--device cpu`, or install a driver and a PyTorch with CUDA."
        )


def read_config(name: str, gguf_file: str | None = None) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Load the config and the tokenizer of a target, but no weights; the config of an adapter is that of its base."""
    check_there(name, "target")
    with readable(name):
        gguf = gguf_options(name, gguf_file)
        return target_config(name, gguf), _tokenizer(name, gguf)


def _tokenizer(name: str, gguf: dict[str, Any]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model; an adapter may have its own or use that of its base model."""
    base = base_of_adapter(name)
    has_own = base is None or cached_file(name, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False)
    try:
        return AutoTokenizer.from_pretrained(name if has_own else base, **gguf)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise OptionError(
            f"`{name}` must have a tokenizer beside its weights, but none can be loaded: {short(error)}. Save it "
            f"there: `tokenizer.save_pretrained({name!r})`."
        ) from error


def load_drafter(
    name: str,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tree: str | None = None,
    capture: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> DrafterModel:
    """Load a drafter as [`convert.load_drafter`] does, for a command.

    `layer-parallel:N:FOLDER` is a language model that drafts with groups of N layers. With `draft_tree` the drafter
    uses the static tree of that file, and with `capture`, one of `CAPTURES`, that option replaces its own. With
    `tokenizer` the chat template and its `template_kwargs` are compared with those of the training; a difference is
    logged, as other differences are when the drafter is used.
    """
    if name.partition(":")[0] == LAYER_PARALLEL:
        drafter: DrafterModel = _layer_parallel(name, target)
    else:
        drafter = read_drafter(name, target)

    if capture is not None:
        drafter.generation_config.capture = CAPTURES[capture]
    if draft_tree is not None:
        _set_tree(drafter, name, draft_tree)
    if draft_tree is not None or tokenizer is not None:
        drafter.check_target(target)  # sizes are compared before the chat template
    if tokenizer is not None:
        check_fingerprint(drafter, target, tokenizer, template_kwargs)

    return drafter


def _set_tree(drafter: DrafterModel, name: str, file: str) -> None:
    """Let the drafter use the static tree of a file instead of its own."""
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

    check_there(folder, "language model")
    return LayerParallelDrafter.from_pretrained(folder, target=target, group_size=int(group_size))


def load_stock(name: str, dtype: torch.dtype) -> PreTrainedModel | None:
    """Load what stock `generate` drafts with, a DFlash drafter or a language model; None for drafters, foreign too."""
    with readable(name):
        kind = kind_of(name)

    if kind == MuseGlimmerAssistantConfig.model_type:
        return AutoModel.from_pretrained(name, dtype=dtype).eval()
    if kind in drafter_classes() or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None

    options: dict[str, Any] = {"ignore_mismatched_sizes": True, "output_loading_info": True}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what is missing is no warning here
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)
    finally:
        logging.set_verbosity(verbosity)

    model, info = loaded  # without some weights it is a drafter in a language model's config
    return None if info["missing_keys"] or info["mismatched_keys"] else model.eval()


def load_method(
    source: str, target: PreTrainedModel, draft_tree: str | None = None, capture: str | None = None
) -> Method:
    """Load what writes text with `target`, in its dtype and on its device; it is called after its folder.

    `source` is `prompt-lookup`, or the name of a drafter or of a model: its config and weights decide whether it is a
    drafter of this package or of other software, which then uses the static tree in the file `draft_tree` and is
    decoded as `capture` says, a DFlash drafter of Transformers, or a language model for stock assisted generation.
    """
    name = Path(source).name
    if source == PROMPT_LOOKUP:
        return prompt_lookup(name)

    assistant: Any = None if source.startswith(f"{LAYER_PARALLEL}:") else load_stock(source, target.dtype)
    if assistant is not None:
        make = stock_assistant if assistant.can_generate() else stock_dflash
        return make(name, assistant.to(device_of(target)))

    drafter = load_drafter(source, target, draft_tree=draft_tree, capture=capture)
    drafter.check_target(target)
    return with_drafter(name, drafter)


def load_trainable(name: str, target: PreTrainedModel) -> PreTrainedModel:
    """Load a drafter, or an assistant of stock `generate`, in float32 and with the trainable weights marked.

    A checkpoint of other software is converted for `target`.
    """
    check_there(name)
    base = base_of_adapter(name)
    if base is not None:
        raise OptionError(
            f"`--drafter` must be a whole drafter, but `{name}` is an adapter of `{base}`. Train from that one, or "
            "load the adapter, `merge_and_unload()` it and save the drafter that comes out."
        )

    drafter = load_stock(name, torch.float32)
    if drafter is None:
        name, _ = own_checkpoint(name, target)
        drafter = class_of(name).from_pretrained(name, dtype=torch.float32)

    with torch.device("meta"):
        fresh = type(drafter)(drafter.config)

    if hasattr(drafter.config, FIELD):
        setattr(drafter.config, FIELD, None)  # training records its own target

    for part, weight in fresh.named_parameters():  # loading makes every weight trainable
        drafter.get_parameter(part).requires_grad_(weight.requires_grad)

    return drafter


def load_tree(name: str) -> DraftTree:
    """Read a static tree from a JSON file, where it may also be the field `draft_tree`.

    `paper` is the tree that the Falcon paper shows.
    """
    if name == PAPER_TREE:
        return paper_tree()

    try:
        value = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DraftTreeError(
            f"`{name}` must be a JSON file of a tree, as `falcon-spec trees` writes it, or `{PAPER_TREE}`, but it is "
            f"none: {error}. Give another."
        ) from None

    if isinstance(value, dict) and "draft_tree" in value:
        value = value["draft_tree"]

    return DraftTree.from_json(value)


def check_own_config(name: str) -> None:
    """Check that a drafter is a folder with a config that can be changed."""
    if not (Path(name) / "config.json").is_file():
        raise OptionError(
            "This writes into the drafter's config.json, so `drafter` must be a folder that holds one, but it is "
            f"`{name}`. Download it; an adapter is merged and saved first."
        )

    if kind_of(name) not in (*drafter_classes(), MuseGlimmerAssistantConfig.model_type):
        raise OptionError(
            f"This writes into the drafter's config.json, but `{name}` is a checkpoint of other software, "
            "and what stands there would not be read. Convert it, and name `DEST`: `falcon-spec convert "
            f"{name} DEST --target TARGET`."
        )
