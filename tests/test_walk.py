"""The walk of `examples/qwen3_8b.md`, from nothing to a published drafter: the notebook's cells run as they stand, on a small Qwen3."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests import walk
from tests.chat_families import family_tokenizer
from tests.tiny import make_target

pytestmark = pytest.mark.docs


def small_qwen3(num_steps: int = 150) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A Qwen3 that has learned to add, or at least to say so, with its tokenizer."""
    tokenizer = family_tokenizer("qwen3")
    target = make_target("qwen3", vocab_size=len(tokenizer), max_position_embeddings=4096)
    target.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    rows = [walk.talk(number) for number in range(walk.NUM_TALKS)]
    texts = [tokenizer.apply_chat_template(row, tokenize=False, enable_thinking=False) for row in rows]
    optimizer = torch.optim.AdamW(target.parameters(), lr=3e-3)
    for step in range(num_steps):
        batch = tokenizer(texts[step % 4 :: 4], return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        target(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return target, tokenizer


@pytest.mark.slow
def test_the_walk_leads_from_nothing_to_a_published_drafter(tmp_path: Path) -> None:
    with walk.stage(tmp_path, *small_qwen3()) as stage:
        told = {cell: stage.run(cell).output for cell in walk.cells()[1:]}  # the first one goes to the folder
        use = walk.cells()[-1]

        published = stage.hub.load(walk.PUBLISHED, None)

    said = "\n".join(told.values())
    assert f"{walk.FOREIGN} │ Eagle-3" in said
    assert "conversations hold evaluation prompts" in said
    training = read(tmp_path / walk.DRAFTER / "training.json")
    lengths = [row["eval_acceptance_length"] for row in training["curve"] if "eval_acceptance_length" in row]
    assert len(lengths) > 1
    assert max(lengths) > 1.5  # a drafter that has learned
    assert training["template_kwargs"] == {"enable_thinking": False}
    (greedy,) = read(tmp_path / "runs" / "parity.json")["rows"]
    assert greedy["identical"] == greedy["num_prompts"] == 4
    assert greedy["tokens_per_step"] > 1
    rows = read(tmp_path / "runs" / "speed.json")["rows"]
    assert {row["set"] for row in rows} == {"gsm8k", "humaneval", "mt_bench"}
    assert [row for row in rows if row["num_identical"] != row["num_compared"]] == []
    assert sum(row["accepted_drafts_per_step"] for row in rows) > 0
    files = published["commits"][published["refs"]["main"]]["files"]
    assert {"README.md", "model.safetensors", "training.json"} <= files.keys()
    assert written(told[use])


def written(output: str) -> tuple[str, str]:
    """The text that the last cell prints, and how many of the drafted tokens were kept, which must be some."""
    found = re.search(
        r"user\n(.*)\n[\d.]+ tokens a step.*\n(0\.\d*[1-9]\d* of .* drafted tokens are kept)", output, re.DOTALL
    )
    assert found, output
    return found[1], found[2]


def read(path: Path) -> Any:
    """What a JSON file holds."""
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_notebook_is_the_page() -> None:
    render = runpy.run_path(str(walk.ROOT / "tools" / "notebook.py"))["render"]

    text = walk.NOTEBOOK.read_text(encoding="utf-8")

    assert text == render(walk.PAGE.read_text(encoding="utf-8")), "Run `make fix`."
    assert not re.search(r"(?<![\w.~)\]])/(?:home|work|tmp|root)/", text)


def test_every_block_of_the_page_is_a_cell() -> None:
    page = walk.PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w+)\n(.*?)\n```$", page, flags=re.DOTALL | re.MULTILINE)

    cells = walk.cells()[1:]

    assert {language for language, _ in blocks} == {"bash", "python"}
    assert [cell.removeprefix(walk.BASH) for cell in cells] == [code for _, code in blocks]
    assert [cell.startswith(walk.BASH) for cell in cells] == [language == "bash" for language, _ in blocks]


def test_what_is_smaller_on_the_stage_stands_on_the_page() -> None:
    cells = "\n".join(walk.cells())

    assert [pattern for pattern in walk.SIZES if not re.search(pattern, cells)] == []
