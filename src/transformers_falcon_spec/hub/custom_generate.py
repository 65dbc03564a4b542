"""What a published drafter's `custom_generate/generate.py` runs: the target's `generate`, with the drafter.

It travels to the Hub with the modules it imports (`bundle.py`), and works where Transformers is installed and this
package is not.
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
_COMMIT = re.compile(r"[0-9a-f]{40}")


class CustomGenerate:
    """`generate` for `custom_generate`. The drafter comes from the repository and commit that the recipe came from.

    Args:
        drafter_class (`type[DrafterModel]`): The kind of the drafter beside the recipe.
        file (`str`): `__file__` of the module that Transformers loaded; its place holds repository and commit.
    """

    def __init__(self, drafter_class: type[DrafterModel], file: str) -> None:
        self.drafter_class, self.file = drafter_class, file
        self._drafters: WeakKeyDictionary[PreTrainedModel, DrafterModel] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def generate(self, inputs: Any = None, *, model: PreTrainedModel, **arguments: Any) -> Any:
        """The text of `model`, written with the drafter; the arguments are those of its `generate`.

        `assistant_model` may be a drafter to take instead of the one beside the recipe. `revision`, `token`,
        `cache_dir`, `local_files_only`, `force_download` and `proxies` say how the Hub is asked, as in
        `from_pretrained`.

        Raises:
            [`GenerationError`]: `assistant_model` is no drafter; a recipe in a local folder, and no `assistant_model`.
        """
        hub = {name: arguments.pop(name) for name in _HUB_OPTIONS if name in arguments}
        drafter = arguments.pop("assistant_model", None)
        if drafter is None:
            drafter = self._drafter_for(model, hub)
        elif drafter_of(drafter) is None:
            raise GenerationError(
                f"This recipe decodes with a drafter, but `assistant_model` is a `{type(drafter).__name__}`. Leave it "
                "out to take the drafter of the recipe, or leave out `custom_generate`."
            )
        with attached(model):
            return model.generate(inputs, assistant_model=drafter, **arguments)  # type: ignore[operator]  # of a mixin

    def _drafter_for(self, model: PreTrainedModel, hub: dict[str, Any]) -> DrafterModel:
        """The drafter in the type and on the device of `model`: loaded once for each model, and kept as long as it."""
        with self._lock:
            if model not in self._drafters:
                repo_id, revision = origin(self.file)
                options = {**hub, "revision": revision, "dtype": model.dtype}
                self._drafters[model] = self.drafter_class.from_pretrained(repo_id, **options).eval()
            return self._drafters[model].to(device=model.device, dtype=model.dtype)  # type: ignore[call-arg]


def origin(file: str) -> tuple[str, str]:
    """Repository and commit of a module that Transformers fetched: it lies in `OWNER/NAME/COMMIT/custom_generate`.

    Raises:
        [`GenerationError`]: it was loaded from a local folder.
    """
    owner, name, commit = Path(file).parts[-5:-2]
    if _COMMIT.fullmatch(commit) is None:
        raise GenerationError(
            "A recipe takes its drafter from the Hub repository that it came from, but this one came from a local "
            "folder. Pass the drafter: `assistant_model=AutoModel.from_pretrained(FOLDER, trust_remote_code=True)`."
        )
    return f"{_hub_name(owner)}/{_hub_name(name)}", commit


def _hub_name(module_name: str) -> str:
    """A name as the Hub has it; Transformers spells it in a way that Python can import."""
    name = module_name.replace("_dot_", ".").replace("_hyphen_", "-")
    return name[1:] if re.match(r"_\d", name) else name
