"""Writing an Eagle or DFlash drafter in the form that speculators, vLLM or SGLang reads: the reverse of a conversion.

The forms are those of `formats.py`, which reads them. What a form or an engine cannot hold is refused before anything
is written.
"""

import copy
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..drafters.base import DrafterModel
from ..drafters.checkpoint import let_others_read
from ..drafters.config_fields import own_fields
from ..drafters.dflash import DFlashConfig, DFlashDrafter
from ..drafters.eagle import EagleConfig, EagleDrafter
from ..drafters.registry import class_of
from ..errors import CheckpointError, OptionError
from ..provenance import portable
from .conversion import check_is_new, check_there, new_folder
from .formats import DFLASH, EAGLE, EAGLE3, EAGLE3_SPECULATORS, detect
from .rules import INNER_CONFIG, LAYER_IDS, NUM_LAYERS_READ, SLIDING
from .source import CONFIG_FILE
from .table import Checkpoint, Fields, Format, read_config, shortened, write_rows

ExportFormat = Literal["speculators", "vllm", "sglang"]
# Fields that change neither what the drafter computes nor what it reads: the name, training, trees, and how far it
# looks back, which is said. `draft_vocab_size` may be left out where it is the whole vocabulary.
NOT_HELD = {"target_name_or_path", "target_fingerprint", "draft_tree", "confidence_temperatures", "draft_vocab_size"}
NOT_HELD |= {"sliding_window", "attention_dropout", "initializer_range", "pretraining_tp", "use_cache"}
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Form:
    """How drafters of one kind are written for one engine."""

    architecture: str
    format: Format  # in which it is written
    # Options of a drafter that the engine's model would leave out in silence, and the value that computes nothing.
    ignored: Mapping[str, Any] = field(default_factory=dict)
    first_feature: int = 0  # the lowest hidden state that the engine can hand over


SCALES = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}
# By engine and kind. Sources: vllm-project/speculators v0.9.0, `models/eagle3`; vLLM, `models/llama_eagle.py`,
# `llama_eagle3.py` and `qwen3_dflash.py`; SGLang, `llama_eagle.py`, `llama_eagle3.py` and `dflash.py`.
FORMS = {
    ("speculators", "Eagle-3"): Form("Eagle3Speculator", EAGLE3_SPECULATORS),
    ("vllm", "Eagle-1"): Form("EagleLlamaForCausalLM", EAGLE, {"fc_bias": False}),
    ("vllm", "Eagle-3"): Form("LlamaForCausalLMEagle3", EAGLE3),
    ("vllm", "DFlash"): Form("DFlashDraftModel", DFLASH, SCALES),
    ("sglang", "Eagle-1"): Form("LlamaForCausalLMEagle", EAGLE, {"qkv_bias": False}),
    ("sglang", "Eagle-3"): Form(
        "LlamaForCausalLMEagle3",
        EAGLE3,
        dict.fromkeys(("attention_bias", "norm_before_residual", "norm_before_fc"), False),
        first_feature=1,
    ),
    ("sglang", "DFlash"): Form("DFlashDraftModel", DFLASH, SCALES),
}


def export_drafter(drafter: DrafterModel | str | Path, dest: str | Path, export_format: ExportFormat) -> None:
    """Write an Eagle or DFlash drafter as `config.json` and `model.safetensors` that another engine reads.

    The weights are written as they are, in their dtype; only their names change. Converting the folder gives the same
    drafter back ([`convert_checkpoint`]). Trees, confidence temperatures and the target's fingerprint have no place in
    these formats. `docs/serving.md` has the command lines of the engines.

    Args:
        drafter ([`EagleDrafter`], [`DFlashDrafter`], `str` or `Path`):
            The drafter; or its folder, or its id on the Hub.
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
    found = _found(drafter)
    config = copy.deepcopy(found.config)
    _check_held(config, export_format)

    kind = _kind(config)
    form = FORMS[export_format, kind]
    config.target_name_or_path = portable(config.target_name_or_path)
    weights = found.state_dict()
    if (export_format, kind) == ("sglang", "Eagle-1") and not config.fc_bias:  # its model has one in any case
        config.fc_bias = True
        weights["fc.bias"] = torch.zeros_like(weights["fc.weight"][:, 0])

    written = _written(found, config, form, export_format)
    tensors = {form.format.name_there(name): value.detach().cpu().contiguous() for name, value in weights.items()}
    _check_way_back(found, config, weights, Checkpoint(str(dest), written, tensors, {}, dest))

    window = found.sliding_window
    if window is not None:
        flag = f"; `--speculative-draft-window-size {window}` sets it there" if export_format == "sglang" else ""
        logger.warning(
            "The window of %d tokens is left out%s: the drafter was trained to look back that far and no farther, and "
            "drafts of longer texts may be worse. The text itself does not depend on drafts.",
            window,
            flag,
        )
    with new_folder(dest) as folder:
        (folder / CONFIG_FILE).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        let_others_read(folder)


def _found(drafter: DrafterModel | str | Path) -> Any:
    """The drafter, read from a folder or the Hub in the dtype of its file; other kinds are refused."""
    kind: Any = type(drafter)
    if isinstance(drafter, str | Path):
        check_there(str(drafter))
        kind = class_of(str(drafter))
    if kind not in (EagleDrafter, DFlashDrafter):
        raise OptionError(
            f"Only an `EagleDrafter` or a `DFlashDrafter` can be exported, but this is a `{kind.__name__}`. "
            "`falcon-spec serve` serves all kinds; a language model is given to the engine as it is, and an adapter "
            "is merged first."
        )
    return kind.from_pretrained(str(drafter), dtype="auto").eval() if isinstance(drafter, str | Path) else drafter


def _kind(config: EagleConfig | DFlashConfig) -> str:
    """What forms depend on."""
    if isinstance(config, EagleConfig):
        return f"Eagle-{config.version}"
    if config.markov_rank:
        return "DSpark"
    return "DFlash2" if config.selector_rank else "DFlash"


def _check_held(config: Any, export_format: str) -> None:
    """Refuse a drafter that a format cannot hold, with those that can."""
    reason = _obstacle(config, export_format)
    if reason is None:
        return
    held = [repr(name) for name in get_args(ExportFormat) if _obstacle(config, name) is None]
    others = f"Try {' or '.join(held)}, serve" if held else "None of the others can. Serve"
    raise OptionError(
        f"The format {export_format!r} cannot hold this drafter: {reason}. {others} this drafter with "
        "`falcon-spec serve`, or train one that fits."
    )


def _obstacle(config: Any, export_format: str) -> str | None:
    """Why a format cannot hold a drafter, or its engine would leave something out in silence; None if all is well."""
    kind = _kind(config)
    form = FORMS.get((export_format, kind))
    if form is None:
        return f"it has no form for {kind}"
    ignored = [f"`{name}`" for name, nothing in form.ignored.items() if getattr(config, name) != nothing]
    if ignored:
        return f"it computes no {', '.join(ignored)}"
    if kind == "DFlash":
        usual = {SLIDING} & set(config.layer_types)
        is_usual = export_format == "vllm" or set(config.causal_layer_types or ()) == usual
        return None if is_usual else "there a token of a block sees later ones in full layers, and in no others"
    if config.own_embeddings:
        return "it reads the target's embeddings, and this drafter has its own"
    if kind == "Eagle-1":
        return None

    target = portable(config.target_name_or_path)
    if export_format == "speculators" and (target is None or target.startswith("...")):
        return (
            f"it must name the target, whose embeddings are read, but `target_name_or_path` is {target!r}; set it to "
            "the target's Hub id, or to a folder as it is named where the export is used"
        )
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


def _written(drafter: DrafterModel, config: Any, form: Form, export_format: str) -> Fields:
    fields = {
        "architectures": [form.architecture],
        "torch_dtype": str(drafter.dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
        **write_rows(form.format.rows, config),
    }
    if _kind(config) != "Eagle-1":
        fields["draft_vocab_size"] = config.num_draftable_tokens
    if export_format == "speculators":
        proposal = {"proposal_type": "greedy", "speculative_tokens": drafter.tree_depth}
        fields["speculators_config"]["proposal_methods"] = [proposal]
    elif config.target_name_or_path is None:
        fields.pop("_name_or_path", None)

    if (export_format, _kind(config)) == ("sglang", "Eagle-3"):
        ids = [index - 1 for index in fields.pop(LAYER_IDS)]
        fields[INNER_CONFIG] = {"use_aux_hidden_state": True, LAYER_IDS: ids}
    return fields


def _check_way_back(drafter: DrafterModel, config: Any, weights: dict[str, Tensor], written: Checkpoint) -> None:
    """Read what is to be written, and refuse it if another drafter comes back."""
    try:
        back = read_config(detect(written.config, written.tensors), written)
    except CheckpointError as error:
        raise OptionError(
            f"This drafter cannot be exported, for what is written must convert back. {error}"
        ) from error

    with torch.device("meta"):
        held = type(drafter)(back).state_dict()
    more = [name for name in weights if name not in held]
    if more:
        raise OptionError(
            f"Every weight of a drafter must have a place in the format, but there is no place for {shortened(more)} "
            "(an adapter must be merged first). Serve this drafter with `falcon-spec serve`."
        )

    names = own_fields(type(config)) - NOT_HELD
    if SLIDING in (getattr(config, "layer_types", None) or ()):
        names.add("sliding_window")
    lost = {}
    for name in sorted(names):
        value = getattr(config, name)
        other = getattr(back, name)
        if (list(value) != list(other)) if name == "feature_layers" else (value != other):
            lost[name] = value
    if lost:
        raise OptionError(
            f"Every field of a drafter's config must have a place in the format, but these have none: "
            f"{shortened(lost)}. Serve this drafter with `falcon-spec serve`, or train one without them."
        )
