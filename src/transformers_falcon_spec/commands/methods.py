"""Reading the methods and targets of a benchmark from the command line, and loading methods."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..convert.loading import check_there
from ..errors import OptionError
from ..evaluation.methods import (
    BASELINE,
    PROMPT_LOOKUP_TOKENS,
    Method,
    prompt_lookup,
    stock_assistant,
    stock_dflash,
    with_drafter,
)
from ..generation.model_parts import device_of
from .loading import LAYER_PARALLEL, load_drafter, load_stock

PROMPT_LOOKUP = "prompt-lookup"
TREES = "trees"  # prefix of the folder of a DFlash drafter of Transformers that is to draft in this package's loop


@dataclass(frozen=True)
class MethodEntry:
    """One entry of `--methods`: `SOURCE`, `NAME=SOURCE`, or `NAME@TARGET=SOURCE` for one target only.

    `SOURCE` is the folder or Hub name of a drafter or of a causal language model, `prompt-lookup`, `prompt-lookup:N`
    for N tokens, `layer-parallel:N:FOLDER` for a language model that drafts with groups of N layers, or
    `trees:FOLDER` for a DFlash drafter of Transformers in this package's loop.

    Example:

    ```python
    >>> MethodEntry.parse("falcon@small=models/falcon-reference")
    MethodEntry(name='falcon', target='small', source='models/falcon-reference')
    >>> MethodEntry.parse("prompt-lookup:5").name
    'prompt-lookup:5'

    ```
    """

    name: str
    target: str | None
    source: str

    @classmethod
    def parse(cls, entry: str) -> "MethodEntry":
        """Parse an entry."""
        label, source = _split_name(entry)
        name, at, target = label.partition("@") if "=" in entry else (label, "", "")
        if not name or not source or (at and not target):
            raise OptionError(
                f"A method must be `SOURCE`, `NAME=SOURCE` or `NAME@TARGET=SOURCE`, but one is {entry!r}."
            )
        return cls(name, target or None, source)

    def load(self, target: PreTrainedModel, draft_tree: str | None = None, step: str | None = None) -> Method:
        """Load the method in the dtype and on the device of the target.

        Config and weights of a folder decide whether it is a drafter of this package or of other software, which then
        uses the static tree in the file `draft_tree` and is decoded as `step` says, a DFlash drafter of Transformers,
        or a language model for stock assisted generation.
        """
        prefix, _, rest = self.source.partition(":")
        if prefix == PROMPT_LOOKUP:
            return prompt_lookup(self.name, _num_tokens(rest, self.source))
        source = rest if prefix == TREES else self.source
        is_own = prefix in {LAYER_PARALLEL, TREES}
        assistant: Any = None if is_own else load_stock(source, target.dtype)
        if assistant is not None:
            make = stock_assistant if assistant.can_generate() else stock_dflash
            return make(self.name, assistant.to(device_of(target)))
        drafter = load_drafter(source, target, draft_tree=draft_tree, step=step)
        drafter.check_target(target)
        return with_drafter(self.name, drafter)

    def check_there(self) -> None:
        """Refuse the name of a model that is not there, before anything is loaded."""
        prefix, _, rest = self.source.partition(":")
        if prefix != PROMPT_LOOKUP:
            folders = {LAYER_PARALLEL: rest.partition(":")[2], TREES: rest}
            check_there(folders.get(prefix, self.source), "method")


def parse_targets(entries: list[str]) -> dict[str, str]:
    """Parse targets, `NAME=FOLDER` or a folder, into folders by name; a single target may do without a name."""
    named = [_split_name(entry) for entry in entries]
    if len(entries) == 1 and "=" not in entries[0]:
        named = [(BASELINE, entries[0])]
    targets = dict(named)
    if not targets or len(targets) < len(named):
        raise OptionError(
            f"Each target needs a name of its own, but they are {entries}. Write `--targets NAME=FOLDER ...`."
        )
    return targets


def parse_methods(entries: list[str], targets: dict[str, str]) -> list[MethodEntry]:
    """Parse methods, and check that they name known targets and that names are unique on each target."""
    methods = [MethodEntry.parse(entry) for entry in entries]
    for method in methods:
        if method.target is not None and method.target not in targets:
            raise OptionError(f"`{method.name}@{method.target}` must name one of the targets {sorted(targets)}.")
    for target in targets:
        names = [BASELINE, *(method.name for method in methods if method.target in (None, target))]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise OptionError(
                f"Each method needs a name of its own, and `{BASELINE}` is that of the target alone, but several are "
                f"called {twice}. Name them: `--methods one=FOLDER other=FOLDER`."
            )
    return methods


def _split_name(entry: str) -> tuple[str, str]:
    """Split an entry into name and folder; the default name is the last part of the folder."""
    name, _, folder = entry.rpartition("=")
    return name or folder.rstrip("/").rpartition("/")[2], folder


def _num_tokens(text: str, source: str) -> int:
    if not text and ":" not in source:
        return PROMPT_LOOKUP_TOKENS
    if not text.isdecimal() or int(text) < 1:
        raise OptionError(f"`{PROMPT_LOOKUP}:N` needs a whole number above 0, but it is {source!r}.")
    return int(text)
