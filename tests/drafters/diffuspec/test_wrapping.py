"""Models that others trained: each stand-in is called as its family is, its mask is found by its token, and the paper's preset drafts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import runs
from tests.drafters.diffuspec.naive_model import naive_mask
from tests.drafters.diffuspec.stand_ins import KINDS, MASK, OPTIONS, logits_behind, make_model
from tests.drafters.diffuspec.test_denoising import TEXT
from tests.drafters.tokenizers import make_tokenizer
from tests.families import VOCAB_SIZE
from tests.tiny import make_target
from transformers_falcon_spec import DiffusionDrafter
from transformers_falcon_spec.drafters.diffuspec import NgramProxy
from transformers_falcon_spec.drafters.diffuspec.drafter import DenoisedTexts, mask_id, most_behind
from transformers_falcon_spec.errors import DrafterMismatchError, OptionError


def wrapped(kind: str, target: Any, **options: Any) -> Any:
    """A stand-in as a drafter, with the options that its family needs."""
    return DiffusionDrafter.wrap(make_model(kind), target, **{"mask_token_id": MASK, **OPTIONS[kind], **options})


def test_the_mask_is_the_tokenizers_before_that_of_the_configuration() -> None:
    tokenizer = make_tokenizer(VOCAB_SIZE - 1, mask="[MASK]", **{"[MASK]": MASK})
    config = make_model("dream", mask_token_id=5).config

    assert mask_id(config, {}, tokenizer) == MASK
    assert mask_id(config, {}, None) == 5


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_family_is_called_so_that_its_masks_and_caches_hold(kind: str) -> None:
    drafter = wrapped(kind, make_target())
    config, texts = drafter.config, DenoisedTexts(drafter, 1, 64)
    plain = make_model("diffullama")
    plain.load_state_dict(drafter.model.state_dict())

    for length in (3, 7, 8, 13):
        num = min(4, most_behind(drafter, length))
        logits = logits_behind(texts, TEXT[:length], num)

        tokens = torch.cat([TEXT[:length], torch.full((num - config.logits_shift,), MASK)])[None]
        mask = naive_mask(config.attention, length, tokens.shape[1], config.block_size)
        naive = plain(tokens, mask, torch.arange(tokens.shape[1])[None]).logits[0, -num:].float()
        torch.testing.assert_close(logits, naive, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_with_any_family_is_the_targets_own(kind: str) -> None:
    target = make_target(seed=7).double()

    pair = runs.informed(target, wrapped(kind, target))

    pair.assert_equal()
    assert pair.stats.num_drafted > 0


def test_a_model_that_ignores_its_mask_is_refused() -> None:
    target, model = make_target(), make_model("dream")
    model.config._attn_implementation = "sdpa"
    forward = model.forward
    model.forward = lambda input_ids, attention_mask=None, position_ids=None, **kwargs: forward(input_ids, "full")

    with pytest.raises(
        OptionError, match=r"a text must not see the last one, but in a `Dream` they do\. Choose another"
    ):
        DiffusionDrafter.wrap(model, target, mask_token_id=MASK, attention="prefix_causal")

    model.forward = lambda input_ids, attention_mask=None, position_ids=None, **kwargs: forward(
        input_ids, naive_mask("prefix_causal", 99, input_ids.shape[1], None)
    )
    with pytest.raises(OptionError, match="a text must see the last one, but in a `Dream` they do not"):
        DiffusionDrafter.wrap(model, target, mask_token_id=MASK, attention="full")


def test_attention_that_reads_no_masks_is_refused() -> None:
    model = make_model()
    model.config._attn_implementation = "flash_attention_2"

    with pytest.raises(
        OptionError, match=r"must take masks, as \('sdpa', 'eager'\) do, but it is 'flash_attention_2'"
    ):
        DiffusionDrafter.wrap(model, make_target(), mask_token_id=MASK)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (make_tokenizer(90, "<|mask|>", **{"<|mask|>": 92}), make_tokenizer(90)),  # free in the target
        (make_tokenizer(90, "<|mask|>", **{"<|mask|>": 92}), make_tokenizer(90, "<|mask|>", **{"<|mask|>": 92})),
        (make_tokenizer(90, "<|mask|>", **{"<|mask|>": MASK}), make_tokenizer(90)),  # behind the target's rows
    ],
)
def test_the_mask_is_that_of_the_tokenizer(ours: Any, theirs: Any) -> None:
    drafter = DiffusionDrafter.wrap(make_model(), make_target(), tokenizer=ours, target_tokenizer=theirs, block_size=4)

    assert drafter.config.mask_token_id == ours.mask_token_id


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mask_token_id": 92, "tokenizer": make_tokenizer(90, tool=92), "target_tokenizer": make_tokenizer(95)},
            "id 92 is 'tool' in the draft model and 'word92' in the target",
        ),
        (
            {
                "tokenizer": make_tokenizer(90, "<|mask|>", **{"<|mask|>": 92}),
                "target_tokenizer": make_tokenizer(90, tool=92),
            },
            "id 92 is '<|mask|>' in the draft model and 'tool' in the target",
        ),
        (
            {
                "mask_token_id": 91,
                "tokenizer": make_tokenizer(90, "<|mask|>", **{"<|mask|>": 92}),
                "target_tokenizer": make_tokenizer(90),
            },
            r"must be '<\|mask\|>', token 92 .* but `mask_token_id` is 91, there None. Pass `mask_token_id=92`",
        ),
    ],
)
def test_a_mask_of_another_tokenizer_is_refused(options: dict[str, Any], message: str) -> None:
    pattern = message if ".*" in message else message.replace("<|mask|>", r"<\|mask\|>")
    with pytest.raises(DrafterMismatchError, match=pattern):
        DiffusionDrafter.wrap(make_model(vocab_size=VOCAB_SIZE), make_target(), **options)


def test_a_model_may_be_trained_with_a_word_as_its_mask_which_is_never_drafted() -> None:
    target = make_target(seed=7).double()

    model = make_model(vocab_size=VOCAB_SIZE)

    drafter = DiffusionDrafter.wrap(model, target, mask_token_id=40, block_size=5)
    pair = runs.informed(target, drafter)

    pair.assert_equal()
    assert pair.stats.num_drafted > 0


def test_a_mask_that_nobody_names_is_refused() -> None:
    with pytest.raises(OptionError, match="needs the id of its mask, but neither"):
        DiffusionDrafter.wrap(make_model(), make_target())


def test_the_papers_options_draft_whatever_the_family() -> None:
    target = make_target(seed=7).double()
    texts = [runs.plain(target, max_new_tokens=40).sequences[0].tolist()]
    lengths = {"draft_length": "adaptive", "min_draft_tokens": 20, "num_draft_tokens": 30}

    drafter = wrapped("dream", target, **lengths)
    drafter.proxy = NgramProxy.fit(texts, 3, target.config.vocab_size)

    config = drafter.config
    assert (config.growth, config.smoothing) == (10, 0.5)
    assert (config.search, config.mass, config.max_candidates, config.beam_width) == ("cps", 0.8, 15, 3)
    assert config.model_weight == 0.5
    drafter.generation_config.tune = False  # drafts are as long as the options say
    pair = runs.informed(target, drafter, max_new_tokens=40)
    pair.assert_equal()
    assert pair.stats.num_drafted > 10 * pair.stats.num_steps  # fewer where the text has less left to write
    assert pair.stats.acceptance_length > 1.1


def test_the_papers_lengths_need_a_model_of_such_blocks() -> None:
    with pytest.raises(
        OptionError, match="`num_draft_tokens` must be at most 4, the block that the model was trained"
    ):
        wrapped("a2d on a grid", make_target(), num_draft_tokens=30)


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(DrafterMismatchError, match="must be compared, but the draft model brings no tokenizer"):
        DiffusionDrafter.wrap(make_model(vocab_size=VOCAB_SIZE + 5), make_target(), mask_token_id=VOCAB_SIZE)


def test_remote_code_runs_where_it_is_trusted_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    model = make_model("diffullama")
    model.config.auto_map = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"model_type": "llama"', '"model_type": "own"'))
    (tmp_path / "configuration_own.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )
    (tmp_path / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\n\nfrom .configuration_own import OwnConfig\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    target = make_target(seed=7).double()
    options = {"target": target, "mask_token_id": MASK, "block_size": 5}

    with pytest.raises(ValueError, match="trust_remote_code"):
        DiffusionDrafter.from_pretrained(tmp_path, **options)

    drafter = DiffusionDrafter.from_pretrained(tmp_path, **options, trust_remote_code=True)
    pair = runs.informed(target, drafter)
    pair.assert_equal()
    assert pair.stats.num_drafted > 0
    with pytest.raises(
        OptionError, match="A drafter is saved without code, but `OwnForCausalLM` came with code of its own"
    ):
        drafter.save_pretrained(tmp_path / "drafter")
