"""What lies in a reader's folder when the code of a page runs.

That is what the commands before it on the page would have made, and stand-ins for names on the Hub.

The package is imported inside functions only, so that pytest's type-checking hook is in place before it.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET, DRAFTER = ROOT / "models" / "reference-target", ROOT / "models" / "falcon-reference"
CONVERSATION = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "5"}]


def make_folder(page: str, folder: Path) -> None:
    """Fill `folder` with the repository's own folders, and with what `page` needs besides. Commands may write into drafters."""
    for name in ("models/reference-target", "benchmarks", "examples"):
        _stand_in(folder / name, ROOT / name)
    for drafter in ("falcon-reference", "lookahead"):
        shutil.copytree(ROOT / "models" / drafter, folder / "models" / drafter)
    if page in _MAKERS:
        _MAKERS[page](folder)


def _stand_in(path: Path, for_it: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(for_it)


def _convert(folder: Path) -> None:
    """A Falcon checkpoint of other software, its target's config, an Eagle drafter of this package, and a published one."""
    from tests.convert import foreign  # noqa: PLC0415
    from tests.convert.exports import eagle  # noqa: PLC0415
    from tests.tiny import make_target  # noqa: PLC0415

    config, weights = foreign.falcon()
    foreign.written(folder / "SOURCE", config, weights)
    make_target("llama").save_pretrained(folder / "TARGET")
    eagle().save_pretrained(folder / "DRAFTER")
    _stand_in(folder / "Qwen" / "Qwen3-8B", TARGET)
    _stand_in(folder / "someone" / "falcon-qwen3-8b", DRAFTER)


def _published(folder: Path) -> None:
    """An Eagle-3 drafter in the published form, of random weights, and its target."""
    from tests.convert import foreign  # noqa: PLC0415

    _stand_in(folder / "meta-llama" / "Llama-3.1-8B-Instruct", TARGET)
    sizes = json.loads((TARGET / "config.json").read_text(encoding="utf-8"))
    fields = {name: sizes[name] for name in foreign.SIZES.keys() & sizes.keys() - {"num_hidden_layers"}}
    config, weights = foreign.eagle3(eagle_aux_hidden_state_layer_ids=[0, 2, 3], **fields)
    foreign.written(folder / "yuhuili" / "EAGLE3-LLaMA3.1-Instruct-8B", config, weights)


def _which(folder: Path) -> None:
    """A diffusion drafter of one layer, a conversation, a small Dream with the tokens of its target, and a small model of its family."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    from tests.convert import foreign, foreign_diffusion  # noqa: PLC0415
    from transformers_falcon_spec import DiffusionDrafter  # noqa: PLC0415

    for name in ("TARGET", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"):
        _stand_in(folder / name, TARGET)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    tokenizer.add_special_tokens({"mask_token": "<|dream_mask|>"})
    sizes = {"vocab_size": len(tokenizer), "mask_token_id": tokenizer.mask_token_id}
    dream = folder / "Dream-org" / "Dream-v0-Instruct-7B"
    foreign.written(dream, *foreign_diffusion.dream(**sizes), "model.safetensors")
    tokenizer.save_pretrained(dream)
    target = AutoModelForCausalLM.from_pretrained(TARGET)
    DiffusionDrafter.from_target(target, num_hidden_layers=1).save_pretrained(folder / "my-diffusion")
    (folder / "answered.jsonl").write_text(json.dumps({"messages": CONVERSATION}) + "\n", encoding="utf-8")


def _train(folder: Path) -> None:
    """A DFlash drafter of one layer, an adapter for the embedded drafter, and a conversation."""
    import peft  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    from transformers_falcon_spec import DraftTree, FalconSpecDrafter  # noqa: PLC0415
    from transformers_falcon_spec.drafters.dflash import make_dflash  # noqa: PLC0415

    _stand_in(folder / "TARGET", TARGET)
    _stand_in(folder / "someone" / "falcon-drafter", DRAFTER)
    (folder / "answered.jsonl").write_text(json.dumps({"messages": CONVERSATION}) + "\n", encoding="utf-8")
    target = AutoModelForCausalLM.from_pretrained(TARGET)
    make_dflash(target, num_hidden_layers=1).save_pretrained(folder / "my-dflash")
    drafter = FalconSpecDrafter.from_pretrained(DRAFTER)
    adapted = peft.get_peft_model(drafter, peft.LoraConfig(r=4, target_modules="all-linear"))
    adapted.save_pretrained(folder / "my-adapter")
    fitted = {"draft_tree": DraftTree.chain(3).to_json()}  # as `falcon-spec trees` leaves it
    (folder / "tree.json").write_text(json.dumps(fitted), encoding="utf-8")


def _walk(folder: Path) -> None:
    shutil.copytree(DRAFTER, folder / "falcon-qwen3-8b")


_MAKERS: dict[str, Callable[[Path], None]] = {
    "README.md": _published,
    "convert.md": _convert,
    "qwen3_8b.md": _walk,
    "train_your_own.md": _train,
    "options.md": _which,
}
