"""The `generate` of published drafters, which Transformers runs for `custom_generate=REPO`.

`bundle.py` publishes it with all modules that it imports, so it works where Transformers is installed and this package
is not.
"""

import re
import threading
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ..drafters.base import DrafterModel
from ..errors import GenerationError
from ..generation.patch import attached, drafter_of

_HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")


class CustomGenerate:
    """Decodes a target with the drafter of the repository and commit that this code was loaded from.

    Args:
        drafter_class (`type[DrafterModel]`): The class of the drafter in the repository.
        file (`str`): `__file__` of the module that Transformers loaded, whose path holds repository and commit.
    """

    def __init__(self, drafter_class: type[DrafterModel], file: str) -> None:
        self.drafter_class, self.file = drafter_class, file
        self._drafters: WeakKeyDictionary[PreTrainedModel, DrafterModel] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def generate(self, inputs: Any = None, *, model: PreTrainedModel, **arguments: Any) -> Any:
        """Generate text of `model` with the drafter; the arguments are those of `model.generate`.

        `assistant_model` may be another drafter to use. `revision`, `token`, `cache_dir`, `local_files_only`,
        `force_download` and `proxies` are used to load the drafter, as in `from_pretrained`.
        """
        if isinstance(model, DrafterModel):  # whose `generate` Transformers replaces by the code that came with it
            DrafterModel.generate(model)
        hub = {name: arguments.pop(name) for name in _HUB_OPTIONS if name in arguments}
        drafter = arguments.pop("assistant_model", None)
        if drafter is None:
            drafter = self._drafter_for(model, hub)
        elif drafter_of(drafter) is None:
            raise GenerationError(
                "This `custom_generate` decodes with a drafter, but `assistant_model` is a "
                f"`{type(drafter).__name__}`. Leave it out to use the drafter of the repository, or leave out "
                "`custom_generate`."
            )

        with attached(model):
            return model.generate(inputs, assistant_model=drafter, **arguments)  # type: ignore[operator]  # of a mixin

    def _drafter_for(self, model: PreTrainedModel, hub: dict[str, Any]) -> DrafterModel:
        """The drafter with the dtype and device of `model`, loaded once for each model and kept with it."""
        with self._lock:
            if model not in self._drafters:
                repo_id, revision = origin(self.file)
                options = {**hub, "revision": revision, "dtype": model.dtype}
                self._drafters[model] = self.drafter_class.from_pretrained(repo_id, **options).eval()
            return self._drafters[model].to(device=model.device, dtype=model.dtype)  # type: ignore[call-arg]


def origin(file: str) -> tuple[str, str]:
    """The repository and commit of a module that Transformers fetched into `OWNER/NAME/COMMIT/custom_generate`."""
    owner, name, commit = Path(file).parts[-5:-2]
    if re.fullmatch(r"[0-9a-f]{40}", commit) is None:
        raise GenerationError(
            "This `custom_generate` takes its drafter from the Hub repository that it came from, but it came from a "
            "local folder. Keep `custom_generate`, and pass the drafter beside it: "
            "`assistant_model=AutoModel.from_pretrained(FOLDER, trust_remote_code=True)`."
        )

    return f"{_hub_name(owner)}/{_hub_name(name)}", commit


def _hub_name(module_name: str) -> str:
    """The name on the Hub of a folder that Transformers renamed so that Python can import it."""
    name = module_name.replace("_dot_", ".").replace("_hyphen_", "-")
    return name[1:] if re.match(r"_\d", name) else name
