"""Reading the tokens of a foreign checkpoint from the files of its tokenizer, as data: none of its code is run.

Tokenizers of public diffusion models often come with code of their own. To compare tokens with a target's, their
strings and ids suffice, and those are JSON.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from ..errors import CheckpointError

_CONFIG = "tokenizer_config.json"
_SPECIAL = "special_tokens_map.json"
TOKENIZER_FILES = ("tokenizer.json", _CONFIG, _SPECIAL, "vocab.json", "added_tokens.json")
SENTENCEPIECE = "tokenizer.model"  # is not read: only what it lacks beside it is said


def existing(folder: Path, names: Iterable[str]) -> list[Path]:
    """Those files of a folder that are there."""
    return [folder / name for name in names if (folder / name).is_file()]


def named_mask(folder: Path) -> str | None:
    """The token that a tokenizer calls its mask; None where it names none."""
    for name in (_CONFIG, _SPECIAL):
        token = read_object(folder / name).get("mask_token")
        if token is not None:
            return str(token["content"] if isinstance(token, dict) else token)
    return None


def mask_id_of(folder: Path) -> int | None:
    """The id of the mask that a tokenizer names; None where it names none, or holds no tokens."""
    tokenizer = read_vocabulary(folder) if named_mask(folder) is not None else None
    return None if tokenizer is None else tokenizer.mask_token_id


def read_vocabulary(folder: Path) -> PreTrainedTokenizerFast | None:
    """A tokenizer of the same tokens, ids and mask, which cannot read text; None where the files hold no tokens.

    Raises:
        [`CheckpointError`]: the files hold no JSON of the usual form, a mask that is no token, or nothing but a
            SentencePiece model.
    """
    tokens = _tokens(folder)
    if not tokens:
        if (folder / SENTENCEPIECE).is_file():
            raise CheckpointError(
                f"`{folder}` must hold its tokens as `tokenizer.json` or `vocab.json`, but it holds them as "
                f"`{SENTENCEPIECE}` alone. Write them, with `sentencepiece` installed: "
                "`AutoTokenizer.from_pretrained(SOURCE).save_pretrained(FOLDER)`. Put config and weights beside them, "
                "and convert that folder."
            )
        return None
    mask = named_mask(folder)
    if mask is not None and mask not in tokens:
        raise CheckpointError(
            f"The mask of `{folder}` must be one of its tokens, but {mask!r} is none. Fetch the files of its "
            "tokenizer again."
        )
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(tokens)), mask_token=mask)


def _tokens(folder: Path) -> dict[str, int]:
    """The ids of all tokens, those that were added later included."""
    whole = read_object(folder / "tokenizer.json")
    listed = read_object(folder / "vocab.json")
    if not whole and not listed:  # what was added later is no vocabulary
        return {}

    added = read_object(folder / _CONFIG).get("added_tokens_decoder") or {}
    try:
        tokens = whole["model"]["vocab"] if whole else {**listed, **read_object(folder / "added_tokens.json")}
        if isinstance(tokens, list):  # of a unigram model: each with its score
            tokens = {token: index for index, (token, _score) in enumerate(tokens)}

        ids = {str(token): int(index) for token, index in tokens.items()}
        for token in whole.get("added_tokens") or ():
            ids[str(token["content"])] = int(token["id"])
        for index, token in added.items():
            ids[str(token["content"])] = int(index)
        return ids
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"The tokenizer of `{folder}` must list its tokens in the form of Transformers, but it does not "
            f"({type(error).__name__}: {error}). Fetch its files again."
        ) from error


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also what is no UTF-8
        raise CheckpointError(f"`{path}` must hold JSON, but it does not ({error}). Fetch it again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"`{path}` must hold a JSON object, but it holds a {type(content).__name__}.")
    return content
