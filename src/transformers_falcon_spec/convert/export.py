"""Writing an Eagle drafter in the form that speculators, vLLM or SGLang reads: the reverse of a conversion.

The forms are those of `eagle.py`, which reads them. What a form or an engine cannot hold is refused before anything
is written.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..drafters.base import DrafterModel
from ..drafters.checkpoint import check_is_drafter, let_others_read, readable
from ..drafters.config_fields import own_fields
from ..drafters.eagle import EagleConfig, EagleDrafter
from ..drafters.mtp import MtpDrafter
from ..drafters.registry import converter_of, drafter_classes, methods
from ..errors import CheckpointError, OptionError
from ..provenance import portable
from .eagle import FLAGS, INNER_CONFIG, LAYER, LAYER_IDS, MIDLAYER, NUM_LAYERS_READ, VOCABULARY, weight_names
from .formats import detect, shortened
from .llama_layers import foreign_rope_fields, foreign_sizes
from .loading import check_there
from .new_folder import check_is_new, new_folder
from .source import CONFIG_FILE, Checkpoint
from .target_facts import SPECIAL_IDS

ExportFormat = Literal["speculators", "vllm", "sglang"]
SPECULATORS_VERSION = "0.9.0"  # whose config is written
# Fields that change neither what the drafter computes nor what it reads: the name, training, trees, and how far it
# looks back, which is said. `draft_vocab_size` may be left out where it is the whole vocabulary.
NOT_HELD = {"target_name_or_path", "target_fingerprint", "draft_tree", "confidence_temperatures", "draft_vocab_size"}
NOT_HELD |= {"sliding_window", "attention_dropout", "initializer_range", "pretraining_tp", "use_cache"}
_ELSEWHERE = {  # what to do with drafters of other kinds, by the name of their method
    "falcon": "No engine drafts block after block with Falcon's masks; `falcon-spec serve` serves it, and an "
    "Eagle drafter trained for the same target can be exported.",
    "medusa": "Of these engines vLLM alone has such heads, in a form that is not written here; `falcon-spec serve` "
    "serves it, and an Eagle drafter trained for the same target can be exported.",
    "dflash": "Its file has the form of Transformers' own class; take the original, in the form of the engine.",
    "diffusion": "No engine drafts with a diffusion language model; `falcon-spec serve` serves it.",
    "easyspec": "It is an ordinary language model: give that model itself to the engine, as its draft model.",
    "lookahead": "It has no weights: engines bring n-gram drafting of their own.",
    "mtp": "Its layer is the target's own: engines that draft with such layers read it in the target's checkpoint.",
}
_OTHERS = "Merge an adapter first, `merge_and_unload()`; `falcon-spec serve` serves drafters of all kinds."
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Form:
    """How drafters of one version are written for one engine."""

    architecture: str
    layer: str  # what the decoder layer is called
    ignored: tuple[str, ...] = ()  # options of a drafter that the engine's model would leave out in silence
    first_feature: int = 0  # the lowest hidden state that the engine can hand over


# By format and version. Sources: vllm-project/speculators v0.9.0, `models/eagle3`; vLLM, `models/llama_eagle.py` and
# `llama_eagle3.py`; SGLang, the files of the same names. `docs/serving.md` names the commits.
FORMS = {
    ("speculators", 3): Form("Eagle3Speculator", LAYER),
    ("vllm", 1): Form("EagleLlamaForCausalLM", LAYER, ("fc_bias",)),
    ("vllm", 3): Form("LlamaForCausalLMEagle3", MIDLAYER),
    ("sglang", 1): Form("LlamaForCausalLMEagle", LAYER, ("qkv_bias",)),
    ("sglang", 3): Form(
        "LlamaForCausalLMEagle3", MIDLAYER, ("attention_bias", "norm_before_residual", "norm_before_fc"), 1
    ),
}


def export_drafter(drafter: DrafterModel | str | Path, dest: str | Path, export_format: ExportFormat) -> None:
    """Write an Eagle drafter as `config.json` and `model.safetensors` that another engine reads.

    The weights are written as they are, in their dtype; only their names change. Converting the folder gives the same
    drafter back ([`convert_checkpoint`]). Trees, confidence temperatures and the target's fingerprint have no place in
    these formats. `docs/serving.md` has the command lines of the engines.

    Args:
        drafter ([`EagleDrafter`], `str` or `Path`): The drafter; or its folder, or its id on the Hub.
        dest (`str` or `Path`): The folder to write; new or empty.
        export_format (`str`): `"speculators"`, `"vllm"` or `"sglang"`.

    Raises:
        [`OptionError`]: the format is unknown, `dest` is taken, the drafter is of another kind, or the format or its
            engine cannot hold what it computes.
        [`CheckpointError`]: there is no drafter of that name.

    Example:

    ```python
    >>> from tempfile import mkdtemp
    >>> config = EagleConfig(
    ...     version=3, hidden_size=32, intermediate_size=64, num_attention_heads=4, feature_layers=[1, 2, 3]
    ... )
    >>> dest = Path(mkdtemp())
    >>> export_drafter(EagleDrafter(config), dest, "vllm")
    >>> sorted(path.name for path in dest.iterdir())
    ['config.json', 'model.safetensors']

    ```
    """
    dest = Path(dest)
    if export_format not in get_args(ExportFormat):
        raise OptionError(f"The format must be one of {get_args(ExportFormat)}, but it is {export_format!r}.")
    check_is_new(dest)
    eagle = _eagle(drafter)
    config, tensors = _exported(eagle, export_format)
    _check_way_back(eagle, Checkpoint(str(dest), config, tensors, {}, dest))
    window = eagle.sliding_window
    if window is not None:
        flag = f"; `--speculative-draft-window-size {window}` sets it there" if export_format == "sglang" else ""
        logger.warning(
            "The window of %d tokens is left out%s: the drafter was trained to look back that far and no farther, and "
            "drafts of longer texts may be worse. The text itself does not depend on drafts.",
            window,
            flag,
        )
    with new_folder(dest) as folder:
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        let_others_read(folder)


def _eagle(drafter: DrafterModel | str | Path) -> EagleDrafter:
    """The drafter, read from a folder or the Hub in the dtype of its file; other kinds are refused."""
    if isinstance(drafter, EagleDrafter):
        return drafter
    kind: Any = type(drafter)
    if isinstance(drafter, str | Path):
        name = str(drafter)
        check_there(name)
        with readable(name):
            kind = drafter_classes()[check_is_drafter(name, drafter_classes())]
        if issubclass(kind, EagleDrafter):
            return kind.from_pretrained(name, dtype="auto").eval()
    known = {each.name: each.drafter for each in methods().values()} | {"mtp": MtpDrafter}  # of which none is saved
    method = next((name for name, drafter_class in known.items() if issubclass(kind, drafter_class)), "")
    raise OptionError(
        f"Only an `EagleDrafter` can be exported, but this is a `{kind.__name__}`. {_ELSEWHERE.get(method, _OTHERS)}"
    )


def _exported(eagle: EagleDrafter, export_format: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the weights of the exported drafter, by the names of the format."""
    if (reason := _obstacle(eagle, export_format)) is not None:
        held = [repr(name) for name in get_args(ExportFormat) if _obstacle(eagle, name) is None]
        others = f"Try {' or '.join(held)}, serve" if held else "None of the others can. Serve"
        raise OptionError(
            f"The format {export_format!r} cannot hold this drafter: {reason}. {others} this drafter with "
            "`falcon-spec serve`, or train one that fits."
        )
    form = FORMS[export_format, eagle.config.version]
    names, weights = weight_names(eagle.config, form.layer), eagle.state_dict()
    maps = VOCABULARY if eagle.config.has_own_vocabulary else ()
    tensors = {theirs: weights[ours] for theirs, ours in {**names, **{name: name for name in maps}}.items()}
    if (export_format, eagle.config.version) == ("sglang", 1) and not eagle.config.fc_bias:
        tensors["fc.bias"] = torch.zeros_like(tensors["fc.weight"][:, 0])  # its model has one in any case
    stored = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    if export_format == "speculators":
        return _speculators_config(eagle, form), stored
    return _engine_config(eagle, form, export_format), stored


def _obstacle(eagle: EagleDrafter, export_format: str) -> str | None:
    """Why a format cannot hold a drafter, or its engine would leave something out in silence; None if all is well."""
    config, form = eagle.config, FORMS.get((export_format, eagle.config.version))
    if form is None:
        return "it is for Eagle-3 alone, and this drafter is of version 1"
    if config.own_embeddings:
        return "it reads the target's embeddings, and this drafter has its own"
    ignored = [name for name in form.ignored if getattr(config, name)]
    if ignored:
        return f"it computes no {', '.join(f'`{name}`' for name in ignored)}"
    held = {*weight_names(config, form.layer).values(), *(VOCABULARY if config.has_own_vocabulary else ())}
    more = set(eagle.state_dict()) - held
    unread = None if config.version == 1 else _unread(config, form)
    return unread or (f"it has no place for {shortened(more)} (an adapter must be merged first)" if more else None)


def _unread(config: EagleConfig, form: Form) -> str | None:
    """Why an engine would not hand a drafter of version 3 the features that it reads; None if it does."""
    layers = list(config.feature_layers)
    is_read = len(layers) == NUM_LAYERS_READ and layers == sorted(set(layers)) and layers[0] >= form.first_feature
    if not is_read or config.feature_size != NUM_LAYERS_READ * config.hidden_size:
        return (
            f"it is for drafters that read {NUM_LAYERS_READ} hidden states as wide as themselves, "
            f"{config.hidden_size}, the lower ones first and none below {form.first_feature}, but this one reads "
            f"{layers}, which are {config.feature_size} wide together"
        )
    has_both = config.fc_norm and config.norm_before_fc
    return "it has one of `fc_norm` and `norm_before_fc`, but not both" if has_both else None


def _engine_config(eagle: EagleDrafter, form: Form, export_format: str) -> dict[str, Any]:
    """The `config.json` for vLLM or SGLang: that of a Llama model with fields of its own."""
    config, target = eagle.config, portable(eagle.config.target_name_or_path)
    fields = {**_head(eagle, form), **_layer(config), **foreign_rope_fields(config)}
    fields |= {} if target is None else {"_name_or_path": target}
    if config.version == 1:
        return fields if export_format == "sglang" else {**fields, "bias": config.fc_bias, "qkv_bias": config.qkv_bias}
    fields |= _flags(config)
    layers = list(config.feature_layers)
    if export_format == "vllm":
        return {**fields, LAYER_IDS: layers}
    inner = {"use_aux_hidden_state": True, LAYER_IDS: [index - 1 for index in layers]}
    return {**fields, INNER_CONFIG: inner}


def _speculators_config(eagle: EagleDrafter, form: Form) -> dict[str, Any]:
    """The `config.json` for speculators: the layer has a config of its own, and the target a name."""
    config, target = eagle.config, portable(eagle.config.target_name_or_path)
    if target is None or target.startswith("..."):
        raise OptionError(
            f"The format 'speculators' must name the target, whose embeddings are read, but `target_name_or_path` of "
            f"this drafter is {target!r}. Set it in its config to the target's Hub id, or to a folder as it is named "
            "where the export is used."
        )
    proposal = {"proposal_type": "greedy", "speculative_tokens": eagle.tree_depth}
    return {
        **_head(eagle, form),
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_config": {**_layer(config), "rope_parameters": config.rope_parameters},
        **_flags(config),
        LAYER_IDS: list(config.feature_layers),
        "embed_requires_grad": False,
    }


def _head(eagle: EagleDrafter, form: Form) -> dict[str, Any]:
    dtype = str(eagle.dtype).removeprefix("torch.")
    return {"architectures": [form.architecture], "torch_dtype": dtype, "tie_word_embeddings": False}


def _layer(config: EagleConfig) -> dict[str, Any]:
    """The fields of the decoder layer, rotary positions aside."""
    fields = ("attention_bias", "vocab_size", *SPECIAL_IDS)
    return {"model_type": "llama", **foreign_sizes(config), **{name: getattr(config, name) for name in fields}}


def _flags(config: EagleConfig) -> dict[str, Any]:
    """The fields of version 3 alone."""
    return {"draft_vocab_size": config.num_draftable_tokens, **{name: getattr(config, name) for name in FLAGS}}


def _check_way_back(eagle: EagleDrafter, exported: Checkpoint) -> None:
    """Convert what is to be written, and refuse it if another drafter comes back."""
    kind = detect(exported.config, exported.tensors)
    try:
        back = converter_of(kind.value)(exported, None).config
    except CheckpointError as error:
        raise OptionError(
            f"This drafter cannot be exported, for what is written must convert back. {error}"
        ) from error
    filled = {"fc_bias"} if "fc.bias" in exported.tensors else set()
    names = own_fields(EagleConfig) - NOT_HELD - filled
    lost = {name: getattr(eagle.config, name) for name in sorted(names) if _differ(eagle.config, back, name)}
    if lost:
        raise OptionError(
            f"Every field of a drafter's config must have a place in the format, but these have none: "
            f"{shortened(lost)}. Serve this drafter with `falcon-spec serve`, or train one without them."
        )


def _differ(config: EagleConfig, other: EagleConfig, name: str) -> bool:
    mine, theirs = getattr(config, name), getattr(other, name)
    return list(mine) != list(theirs) if name == "feature_layers" else mine != theirs
