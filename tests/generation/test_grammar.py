"""Grammars through the real packages: the text is the one that plain decoding writes under the same grammar, and it obeys."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests import runs
from tests.doubles import InformedDrafter
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import DraftTree, SpeculationConfig, collect_speculation
from transformers_falcon_spec.errors import OptionError

pytestmark = pytest.mark.grammar

EMBEDDED = Path(__file__).parents[2] / "models" / "reference-target"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "enum": ["Tom", "Ann", "Barbara"]},
        "boxes": {"type": "array", "items": {"enum": [3, 12, 120]}, "minItems": 2, "maxItems": 4},
        "open": {"type": "boolean"},
    },
    "required": ["name", "boxes", "open"],
    "additionalProperties": False,
}
REGEX = r"(yes|no): [0-9]{1,3} (pencils|boxes)(, [a-z]{3,8}){2}\."
MODES: dict[str, dict[str, Any]] = {"greedy": {}, "sampling": {"do_sample": True, "temperature": 1.3, "top_p": 0.95}}
Makers = dict[tuple[str, str], Callable[[], Any]]  # a processor serves one call, so each call makes a new one
CASES = [
    ("xgrammar", "schema"),
    ("xgrammar", "regex"),
    ("outlines_core", "schema"),
    ("outlines_core", "regex"),
    ("outlines_xgrammar", "regex"),  # its schemas leave white space free, so that a random model never ends the text
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The embedded target's."""
    return AutoTokenizer.from_pretrained(EMBEDDED)


@pytest.fixture(scope="module")
def target(tokenizer: Any) -> Any:
    """A tiny one with that vocabulary; its text ends where the tokenizer says."""
    target = make_target(vocab_size=len(tokenizer)).double()
    target.generation_config.eos_token_id = tokenizer.eos_token_id
    return target


@pytest.fixture(scope="module")
def drafter(target: Any) -> Any:
    return make_drafter(target, block_size=2, draft_tree=DraftTree.from_lists([-1, 0, 0, 1, 1, 2, 3]).to_json())


@pytest.fixture(scope="module")
def makers(target: Any, tokenizer: Any) -> Makers:
    """Processors of every engine, for the schema and the regular expression."""
    # Only this lane's environment has these packages.
    import outlines  # noqa: PLC0415
    import xgrammar  # noqa: PLC0415
    from outlines.backends import get_json_schema_logits_processor, get_regex_logits_processor  # noqa: PLC0415
    from xgrammar.contrib.hf import LogitsProcessor  # noqa: PLC0415

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=target.config.vocab_size)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    model, schema = outlines.from_transformers(target, tokenizer), json.dumps(SCHEMA)
    makers: Makers = {
        ("xgrammar", "schema"): lambda: LogitsProcessor(compiler.compile_json_schema(schema, any_whitespace=False)),
        ("xgrammar", "regex"): lambda: LogitsProcessor(compiler.compile_regex(REGEX)),
    }
    makers["outlines_core", "schema"] = lambda: get_json_schema_logits_processor("outlines_core", model, schema)
    for backend in ("outlines_core", "xgrammar"):
        engine = f"outlines_{backend.removeprefix('outlines_')}"
        makers[engine, "regex"] = lambda name=backend: get_regex_logits_processor(name, model, REGEX)
    return makers


def assert_obeyed(grammar: str, text: str) -> None:
    if grammar == "regex":
        assert re.fullmatch(REGEX, text)
        return
    from jsonschema import validate  # noqa: PLC0415  comes with outlines

    validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("engine", "grammar"), CASES)
def test_a_grammar_yields_the_text_of_plain_decoding(
    target: Any, drafter: Any, tokenizer: Any, makers: Makers, engine: str, grammar: str, mode: str
) -> None:
    prompt = tokenizer("Tom has 3 boxes.", return_tensors="pt").input_ids
    make, options = makers[engine, grammar], {"max_new_tokens": 120, "seed": 3, **MODES[mode]}
    gold = runs.plain(target, prompt, logits_processor=[make()], **options).sequences
    state = torch.get_rng_state()

    drafted = runs.drafted(target, InformedDrafter(drafter, gold), prompt, logits_processor=[make()], **options)

    assert drafted.sequences.tolist() == gold.tolist()
    assert torch.get_rng_state().equal(state)
    assert drafted.speculation.acceptance_length > 1.3
    assert drafted.sequences[0, -1] == tokenizer.eos_token_id
    assert_obeyed(grammar, tokenizer.decode(drafted.sequences[0, prompt.shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("engine", ["xgrammar", "outlines_core"])
def test_rules_that_ask_in_order_obey_a_grammar_and_traversal_refuses_it(
    target: Any, tokenizer: Any, makers: Makers, engine: str
) -> None:
    drafter, prompt = make_drafter(target, block_size=2), tokenizer("Tom has 3 boxes.", return_tensors="pt").input_ids
    options = {"do_sample": True, "max_new_tokens": 120}

    for verifier in ("gumbel", "recursive_rejection"):
        drafter.generation_config = SpeculationConfig(verifier=verifier)
        out = runs.drafted(target, drafter, prompt, logits_processor=[makers[engine, "regex"]()], **options)
        assert_obeyed("regex", tokenizer.decode(out.sequences[0, prompt.shape[1] :], skip_special_tokens=True))
    drafter.generation_config = SpeculationConfig(verifier="traversal")
    with pytest.raises(OptionError, match=r"must be a function of the text alone.* may remember its calls"):
        runs.drafted(target, drafter, prompt, logits_processor=[makers[engine, "regex"]()], **options)


def test_outlines_own_call_hands_the_drafter_on(target: Any, drafter: Any, tokenizer: Any) -> None:
    import outlines  # noqa: PLC0415  only this lane's environment has it

    model, options = outlines.from_transformers(target, tokenizer), {"max_new_tokens": 60, "do_sample": False}
    grammar = outlines.regex(REGEX)
    plain = model("Tom has 3 boxes.", grammar, **options)
    known = tokenizer(
        model.type_adapter.format_input("Tom has 3 boxes."), return_tensors="pt", add_special_tokens=False
    )
    gold = tokenizer(plain, return_tensors="pt", add_special_tokens=False)
    text = torch.cat([known.input_ids, gold.input_ids], dim=-1)

    with collect_speculation() as stats:
        drafted = model("Tom has 3 boxes.", grammar, assistant_model=InformedDrafter(drafter, text), **options)

    assert drafted == plain
    assert_obeyed("regex", drafted)
    assert stats[0].num_accepted > 0
