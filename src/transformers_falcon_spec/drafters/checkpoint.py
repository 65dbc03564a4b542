"""The files of a drafter, in a folder or on the Hub: their kind, decoding options, and whether they are whole.

An adapter, which PEFT wrote, is a folder, too: it names the drafter whose weights it changes.
"""

import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from shutil import copymode
from typing import Any, cast

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from ..errors import CheckpointError
from ..generation.options import SpeculationConfig

_OF_ADAPTER_ALONE = ("revision", "subfolder")  # of where to look; the drafter lies elsewhere
_HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "subfolder")


def let_others_read(path: str | Path) -> None:
    """Give a file of weights, or those of a folder, the mode that the umask says; safetensors ignores it."""
    mask = os.umask(0)
    os.umask(mask)
    files = Path(path).glob("*.safetensors") if Path(path).is_dir() else [Path(path)]
    for weights in files:
        weights.chmod(0o666 & ~mask)


def write_whole(path: str | Path, text: str) -> None:
    """Write a file in one go: whatever interrupts this, what was there before stays, or all of the text is there."""
    place = Path(path).resolve()  # of a link what it leads to
    part = place.with_name(f".{place.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        if place.exists():
            copymode(place, part)

        part.replace(place)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def hub_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `from_pretrained` that say where to look."""
    return {name: kwargs[name] for name in _HUB_OPTIONS if name in kwargs}


def read_options(name_or_path: Any, **hub: Any) -> SpeculationConfig | None:
    """The options there; None where there are none."""
    found = cached_file(str(name_or_path), GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False, **hub)
    return None if found is None else cast(SpeculationConfig, SpeculationConfig.from_pretrained(name_or_path, **hub))


@contextmanager
def readable(name_or_path: Any) -> Iterator[None]:
    """Inside, a folder's files that cannot be read are a [`CheckpointError`]; what the Hub says stays as it is."""
    try:
        yield
    except (SafetensorError, UnpicklingError, EOFError, StrictDataclassError, OSError) as error:
        if name_or_path is None or (isinstance(error, OSError) and not Path(name_or_path).is_dir()):
            raise

        raise CheckpointError(
            f"`{name_or_path}` must hold files that can be read, but they cannot: "
            f"{' '.join(str(error).split())[:300]}. Fetch or save it again; a file cut short, or one that would run "
            "code, is never read."
        ) from error


def kind_of(name_or_path: Any, **hub: Any) -> str | None:
    """The `model_type` of a model's config, of an adapter that of the model beneath; None where it has none."""
    base = base_of_adapter(name_or_path, **hub)
    if base is not None:
        return kind_of(base, **options_of_base(hub))

    config, _ = PreTrainedConfig.get_config_dict(name_or_path, **hub)
    if not config:
        raise CheckpointError(
            f"`{name_or_path}` must have a `config.json` that says what it holds, but it has none or an empty one. "
            "Fetch it again."
        )

    return config.get("model_type")


def check_is_drafter(name_or_path: Any, model_types: Collection[str], **hub: Any) -> str:
    """The `model_type` of a drafter's config; [`CheckpointError`] where it is none of `model_types`."""
    kind = kind_of(name_or_path, **hub)
    if kind not in model_types:
        raise CheckpointError(
            f"The `model_type` of `{name_or_path}` must be one of {sorted(model_types)}, but it is {kind!r}. A "
            f"checkpoint of other software must be converted first: `falcon-spec convert {name_or_path} DEST`, or "
            "`load_drafter(NAME, target)`. Draft models are for stock `generate`; `falcon-spec "
            "bench` takes them, and `LayerParallelDrafter.from_pretrained(NAME, target=target)` drafts with "
            "them. Commands know a drafter of your own by `--import MODULE`."
        )

    return str(kind)


def check_finite(model: PreTrainedModel, name_or_path: Any) -> None:
    """Refuse weights with NaN or infinity: [`CheckpointError`]."""
    wrong = []
    for name, weight in model.named_parameters():
        if weight.device.type != "meta" and not weight.isfinite().all():
            wrong.append(name)

    if wrong:
        raise CheckpointError(
            f"`{name_or_path}` must hold finite weights, but {len(wrong)} hold NaN or infinity, the first of them "
            f"`{wrong[0]}`. Take an earlier checkpoint of the training."
        )


def base_of_adapter(name_or_path: Any, **hub: Any) -> str | None:
    """The model that an adapter was made for; None if this is no adapter, or a whole model that comes with one."""
    if name_or_path is None or (Path(name_or_path) / hub.get("subfolder", "") / CONFIG_NAME).is_file():
        return None

    file = find_adapter_config_file(name_or_path, **hub)
    if file is None:
        return None

    base = json.loads(Path(file).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base:
        raise CheckpointError(
            f"`{file}` must name the model that the adapter changes as `base_model_name_or_path`, but it does not. "
            "Write it there, or load the model first and then `model.load_adapter(...)`."
        )

    return str(base)


def options_of_base(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `from_pretrained` for an adapter as its base takes them."""
    return {name: value for name, value in kwargs.items() if name not in _OF_ADAPTER_ALONE}


def put_adapter(drafter: PreTrainedModel, name_or_path: Any, **hub: Any) -> None:
    """Load an adapter, all of it, into the drafter that it fits."""
    try:
        info = drafter.load_adapter(str(name_or_path), adapter_kwargs=hub).to_dict()
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise _misfit(drafter, name_or_path, " ".join(str(error).split())[:300]) from error

    wrong = {kind: sorted(map(str, found)) for kind, found in info.items() if found}
    if wrong:
        raise _misfit(drafter, name_or_path, str(wrong)[:300])


def _misfit(drafter: PreTrainedModel, name_or_path: Any, what: str) -> CheckpointError:
    return CheckpointError(
        f"The adapter `{name_or_path}` must fit the drafter `{drafter.name_or_path}`, a `{type(drafter).__name__}`, "
        f"but: {what}. Load it into the drafter that it was trained on."
    )
