"""Loading a target, its tokenizer and drafters for a command, in one place."""

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

from ..drafters.base import DrafterModel, check_is_drafter, readable
from ..drafters.eagle import EagleConfig, EagleDrafter
from ..drafters.falcon import FalconSpecConfig, FalconSpecDrafter
from ..drafters.lookahead import LookaheadConfig, LookaheadDrafter
from ..drafters.medusa import MedusaConfig, MedusaDrafter
from ..errors import OptionError

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


def load_drafter(name: str, target: PreTrainedModel) -> DrafterModel:
    """A drafter of the kind that its config names, in the target's type and on its device.

    Raises:
        [`CheckpointError`]: the config names no drafter of this package.
    """
    with readable(name):
        kind = check_is_drafter(name, DRAFTERS)
    drafter = DRAFTERS[kind].from_pretrained(name, dtype=target.dtype).eval()
    return drafter.to(target.device)


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
