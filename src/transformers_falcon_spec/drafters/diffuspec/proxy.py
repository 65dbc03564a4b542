"""The causal proxy: a counted n-gram model over token ids, which says how well tokens follow one another.

Interpolated Witten-Bell smoothing: with c(h, w) counted after the history h, N(h) in all and T(h) different tokens,
p(w | h) = (c(h, w) + T(h) p(w | h')) / (N(h) + T(h)), where h' is h without its oldest token and the last resort is 1
/ V. It needs no held-out text, is a distribution at once, and can be counted on while text is written. Sources: Witten
and Bell 1991 (method C), in the interpolated form of Chen and Goodman 1998, section 2.6. The paper (arXiv 2510.02358)
takes 3-grams of KenLM, which needs a C++ build, reads words and cannot count on.

A search asks for a dozen tokens after a few contexts at a time, of which most come again: contexts are opened as
dictionaries and kept. Searching sorted tensors took about twenty times as long (LOG.md, 2026-11-22).
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils.hub import cached_file

from ...errors import CheckpointError, OptionError
from ...provenance import file_sha256
from ..saved_adapters import base_of_adapter, options_of_base
from .ngram_counts import Followers, NgramCounts, count_ngrams

LONGEST_ORDER = 3
LARGEST_VOCAB = 2**21  # three tokens then fit one 64-bit number
MOST_OPENED = 2**16  # contexts kept open
COUNTS_FILE, DESCRIPTION_FILE = "ngram_proxy.safetensors", "ngram_proxy.json"
VERSION = 1  # of these files
_KINDS = {"version": int, "order": int, "vocab_size": int, "sha256": str}  # of the description's fields
_REMEDY = "Fetch the proxy again, or fit and save it again."

Context = tuple[int, ...]


class NgramProxy:
    """Probabilities of tokens after up to two others; made by [`NgramProxy.fit`] or [`NgramProxy.load`].

    Example:

    ```python
    >>> proxy = NgramProxy.fit([[1, 2, 3, 1, 2]], order=2, vocab_size=4)
    >>> proxy.probs([2], [0, 1, 2, 3])
    [0.046875, 0.171875, 0.171875, 0.609375]

    ```
    """

    def __init__(self, ngrams: list[NgramCounts], vocab_size: int) -> None:
        """`ngrams` of 1 token, 2 tokens and so on."""
        self.ngrams, self.order, self.vocab_size = ngrams, len(ngrams), vocab_size
        self._opened: dict[Context, Followers] = {}

    @staticmethod
    def fit(token_sequences: Iterable[Sequence[int] | Tensor], order: int, vocab_size: int) -> "NgramProxy":
        """The model of a text; that of no text at all finds every token as likely as any other.

        Args:
            token_sequences (`Iterable`): Texts as token ids; no n-gram reaches from one into the next.
            order (`int`): Longest n-gram, from 1 to 3; the paper takes 3.
            vocab_size (`int`): Size of the target's vocabulary.

        Raises:
            [`OptionError`]: an order or a vocabulary out of range, or a token outside of the vocabulary.
        """
        if not 1 <= order <= LONGEST_ORDER or not 1 <= vocab_size <= LARGEST_VOCAB:
            raise OptionError(
                f"`order` must lie from 1 to {LONGEST_ORDER} and `vocab_size` from 1 to {LARGEST_VOCAB}, but they are "
                f"{order} and {vocab_size}."
            )
        return NgramProxy(count_ngrams(token_sequences, order, vocab_size), vocab_size)

    @staticmethod
    def load(folder: str | Path) -> "NgramProxy":
        """The model that [`NgramProxy.save`] wrote.

        Raises:
            [`CheckpointError`]: a file is missing, cut short, changed, or of another version.
        """
        described, path = _description(Path(folder) / DESCRIPTION_FILE), Path(folder) / COUNTS_FILE
        tensors, found = _read(path, "be a whole safetensors file", load_file), file_sha256(path)
        if found != described["sha256"]:
            raise CheckpointError(
                f"`{path}` must have the checksum {described['sha256']} of `{DESCRIPTION_FILE}`, but it has {found}. "
                f"{_REMEDY}"
            )
        size, lengths = described["vocab_size"], range(1, described["order"] + 1)
        pairs = [(tensors[f"keys.{length}"], tensors[f"counts.{length}"]) for length in lengths]
        return NgramProxy([NgramCounts.of_tensors(keys, counts, size) for keys, counts in pairs], size)

    def save(self, folder: str | Path) -> None:
        """Write it as safetensors with a description, without which counts that were not finished cannot be read."""
        tensors: dict[str, Tensor] = {}
        for length, level in enumerate(self.ngrams, start=1):
            tensors[f"keys.{length}"], tensors[f"counts.{length}"] = level.to_tensors()
        counts, description = Path(folder) / COUNTS_FILE, Path(folder) / DESCRIPTION_FILE
        counts.parent.mkdir(parents=True, exist_ok=True)
        description.unlink(missing_ok=True)
        save_file(tensors, counts)
        sizes = {"version": VERSION, "order": self.order, "vocab_size": self.vocab_size}
        described = json.dumps({**sizes, "sha256": file_sha256(counts)}, indent=2)
        description.write_text(described + "\n", encoding="utf-8")
        shutil.copymode(description, counts)  # safetensors writes for the owner alone

    @property
    def fingerprint(self) -> str:
        """A digest of the counts, which differs between proxies of different texts."""
        found = hashlib.blake2b(f"{self.vocab_size}".encode(), digest_size=8)
        for level in self.ngrams:
            found.update(level.keys.tobytes() + level.counts.tobytes())
        return found.hexdigest()

    def in_context(self) -> "ContextProxy":
        """A model that starts out as this one and learns from the text of one call; this one stays as it is."""
        return ContextProxy(self)

    def probs(
        self, history: Sequence[int], token_ids: Sequence[int], known: dict[Context, list[float]] | None = None
    ) -> list[float]:
        """The probability of each of `token_ids` after a text, of whose end, `history`, up to two tokens are read.

        What was found for the same tokens before may come, by context, as `known`, where what is found is put.
        """
        context = tuple(history[max(len(history) - self.order + 1, 0) :])
        return self._probs(context, token_ids, {} if known is None else known)

    def followers(self, context: Context) -> Followers:
        """Counts of the tokens that followed a context of at most `order - 1` tokens."""
        found = self._opened.get(context)
        if found is None:
            if len(self._opened) >= MOST_OPENED:
                self._opened = {}
            found = self._opened[context] = self.ngrams[len(context)].followers(context)
        return found

    def _probs(self, context: Context, token_ids: Sequence[int], known: dict[Context, list[float]]) -> list[float]:
        found = known.get(context)
        if found is None:
            uniform = [1 / self.vocab_size] * len(token_ids)
            shorter = self._probs(context[1:], token_ids, known) if context else uniform
            found = known[context] = self.followers(context).interpolated(token_ids, shorter)
        return found


class ContextProxy(NgramProxy):
    """A proxy that goes on counting while one text is written, as if fitted to that text as well.

    Example:

    ```python
    >>> proxy = NgramProxy.fit([], order=2, vocab_size=4).in_context()
    >>> proxy.update([1, 2, 3])
    >>> proxy.update([1, 2])
    >>> proxy.probs([2], [3])
    [0.609375]

    ```
    """

    def __init__(self, proxy: NgramProxy) -> None:
        super().__init__(proxy.ngrams, proxy.vocab_size)
        self._shared = proxy
        self._own: dict[Context, Followers] = {}
        self._newest: Context = ()  # what n-grams of coming tokens may begin with

    def followers(self, context: Context) -> Followers:
        """Counts of the tokens that followed a context, this text included."""
        return self._own.get(context) or self._shared.followers(context)

    def update(self, token_ids: Sequence[int]) -> None:
        """Take in the next tokens of the text."""
        for token in token_ids:
            for start in range(len(self._newest) + 1):
                context = self._newest[start:]
                if context not in self._own:
                    self._own[context] = self._shared.followers(context).copy()
                self._own[context].count(token)
            newest = (*self._newest, token)
            self._newest = newest[max(len(newest) - self.order + 1, 0) :]

    def save(self, folder: str | Path) -> None:
        """Refuse to save, by an [`OptionError`]: the counts of one text are not kept."""
        raise OptionError(
            f"A fitted proxy can be saved in `{folder}`, but this one belongs to a context. Save the one it came from."
        )


def load_saved_proxy(name_or_path: Any, **hub: Any) -> NgramProxy | None:
    """The proxy of a saved drafter, in a folder or on the Hub; an adapter has that of the drafter it was made for."""
    base = base_of_adapter(name_or_path, **hub)
    if base is not None:
        return load_saved_proxy(base, **options_of_base(hub))
    files = [
        cached_file(str(name_or_path), file, _raise_exceptions_for_missing_entries=False, **hub)
        for file in (COUNTS_FILE, DESCRIPTION_FILE)
    ]
    folder = next((Path(file).parent for file in files if file is not None), None)
    return None if folder is None else NgramProxy.load(folder)


def _description(path: Path) -> dict[str, Any]:
    """The description of saved counts, all of whose fields are there."""
    described = _read(path, "hold a JSON object", lambda path: json.loads(path.read_text(encoding="utf-8")))
    if not isinstance(described, dict) or any(type(described.get(name)) is not kind for name, kind in _KINDS.items()):
        raise CheckpointError(
            f"`{path}` must be an object with {sorted(_KINDS)}, but it is {described!r:.200}. {_REMEDY}"
        )
    if described["version"] != VERSION:
        raise CheckpointError(
            f"`{path}` must be of version {VERSION}, but it is of version {described['version']}. Fit and save the "
            "proxy again, or take the version of this package that wrote it."
        )
    return described


def _read(path: Path, what: str, read: Callable[[Path], Any]) -> Any:
    """What `read` finds in a file, which must be there and must do `what`."""
    try:
        return read(path)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"A proxy must have both `{COUNTS_FILE}` and `{DESCRIPTION_FILE}`, but `{path}` is not there. {_REMEDY}"
        ) from error
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"`{path}` must {what}, but it cannot be read: {error}. {_REMEDY}") from error
