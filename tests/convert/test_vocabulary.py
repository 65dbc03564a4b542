"""The tokens of a diffusion model, from each form in which a tokenizer lists them, and from forms that do not."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.families import VOCAB_SIZE
from transformers_falcon_spec import load_drafter
from transformers_falcon_spec.convert import convert_checkpoint
from transformers_falcon_spec.convert.vocabulary import read_vocabulary
from transformers_falcon_spec.errors import CheckpointError

from . import foreign_diffusion as foreign

ADDED = {"<|beginoftext|>": foreign.START, "<|mask|>": foreign.MASK}


@pytest.fixture(autouse=True)
def own_assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))


def rewritten(folder: Path, files: dict[str, Any], **config: Any) -> Path:
    """A diffusion model whose tokenizer is no `tokenizer.json` but these files; `config` is all that its config says."""
    foreign.saved(folder, foreign.a2d("qwen2"))
    (folder / "tokenizer.json").unlink()
    named = {"tokenizer_class": "Qwen2Tokenizer", "mask_token": "<|mask|>", **config}
    for name, content in {"tokenizer_config.json": named, **files}.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def in_parts() -> dict[str, Any]:
    """The files of a byte-pair tokenizer as its own class writes them: words, merges, and what was added later."""
    words = {f"word{number}": number for number in range(VOCAB_SIZE)}
    return {"vocab.json": words, "merges.txt": "#version: 0.2\n", "added_tokens.json": ADDED}


def test_words_and_added_tokens_in_files_of_their_own_are_the_tokens_of_the_whole(tmp_path: Path) -> None:
    source, target = rewritten(tmp_path / "source", in_parts()), foreign.saved_target(tmp_path / "target")
    whole = foreign.saved(tmp_path / "whole", foreign.a2d("qwen2"))

    drafter: Any = load_drafter(source, target)

    found, expected = read_vocabulary(source), read_vocabulary(whole)
    assert found.get_vocab() == expected.get_vocab()
    assert (found.mask_token, found.mask_token_id) == ("<|mask|>", foreign.MASK)
    assert (drafter.config.mask_token_id, drafter.config.draft_vocab_size) == (foreign.MASK, VOCAB_SIZE)
    pair = runs.informed(target, drafter)
    pair.assert_equal()
    assert pair.stats.num_drafted > 0


def test_the_files_of_the_tokens_are_in_the_record(tmp_path: Path) -> None:
    source = rewritten(tmp_path / "source", in_parts())
    foreign.saved_target(tmp_path / "target")

    convert_checkpoint(source, tmp_path / "own", str(tmp_path / "target"))

    record = json.loads((tmp_path / "own" / "conversion.json").read_text())
    tokens = {"vocab.json", "added_tokens.json", "tokenizer_config.json"}
    assert set(record["source_sha256"]) == {"config.json", "model.safetensors"} | tokens


def test_a_mask_that_no_file_lists_is_refused(tmp_path: Path) -> None:
    files = {name: content for name, content in in_parts().items() if name != "added_tokens.json"}
    source = rewritten(tmp_path / "source", files)

    with pytest.raises(CheckpointError, match=r"must be one of its tokens, but '<\|mask\|>' is none"):
        load_drafter(source, foreign.saved_target(tmp_path / "target"))


@pytest.mark.parametrize("is_named", [True, False], ids=["a mask of the tokenizer", "a mask of the config"])
def test_a_sentencepiece_model_alone_is_refused_and_its_added_tokens_are_not_taken_for_all(
    is_named: bool, tmp_path: Path
) -> None:
    added = {str(number): {"content": token} for token, number in {"word0": 0, "word1": 1, **ADDED}.items()}
    source = rewritten(tmp_path / "source", {"tokenizer.model": "\n\x0e\n\x05<unk>"}, added_tokens_decoder=added)
    if not is_named:
        rewritten(source, {}, added_tokens_decoder=added, mask_token=None)
        config = json.loads((source / "config.json").read_text()) | {"mask_token_id": foreign.MASK}
        (source / "config.json").write_text(json.dumps(config))
    message = (
        r"must hold its tokens as `tokenizer.json` or `vocab.json`, but it holds them as `tokenizer.model` alone\. "
        r"Write them, .*`AutoTokenizer.from_pretrained\(SOURCE\)"
    )

    with pytest.raises(CheckpointError, match=message):
        load_drafter(source, foreign.saved_target(tmp_path / "target"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.json", "{", "must hold JSON, but it does not"),
        ("added_tokens.json", "[]", "must hold a JSON object, but it holds a list"),
        ("vocab.json", {"word0": "first"}, r"must list its tokens in the form of Transformers.*\(ValueError"),
    ],
)
def test_files_of_another_form_are_refused(name: str, content: Any, message: str, tmp_path: Path) -> None:
    source = rewritten(tmp_path / "source", in_parts() | {name: content})

    with pytest.raises(CheckpointError, match=message):
        read_vocabulary(source)
