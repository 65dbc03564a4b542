"""Published code on a machine with Transformers but without this package: the same text, from one pinned commit."""

import sys
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.utils import GenerationMixin

from tests.hub.clients import ROOT, make_environment, run_client
from tests.hub.conftest import TOKEN
from tests.hub.repositories import Hub
from tests.tiny import make_target
from transformers_falcon_spec import FalconSpecDrafter, GenerationError
from transformers_falcon_spec.generation.patch import attached
from transformers_falcon_spec.hub.card import Publication
from transformers_falcon_spec.hub.custom_generate import CustomGenerate, origin
from transformers_falcon_spec.hub.publish import publish

REPO = "someone/falcon-reference-0.1"
TARGET = ROOT / "models/reference-target"
SHORT = [[5, 6, 7, 5, 6, 7, 5, 6]]
PROMPT = [[1, 300, 301, 302, 310, 320, 300, 301]]
TIMED = [{"do_sample": True, "temperature": 0.7}, {"do_sample": False}]
_SCRIPT = """
import json, sys, time, torch
from importlib.metadata import distributions
from transformers import AutoModel, AutoModelForCausalLM

target = AutoModelForCausalLM.from_pretrained("{target}").eval()
inputs = dict(input_ids=torch.tensor({prompt}), attention_mask=torch.ones(1, len({prompt}[0]), dtype=torch.long))
custom = dict(custom_generate="{repo}", trust_remote_code=True, revision="{commit}")
texts, seconds, accepted, kinds = [], [], [], [type(target)]
for options in {settings}:
    for arguments in ({{}}, custom):
        torch.manual_seed(0)
        start = time.perf_counter()
        out = target.generate(**inputs, **options, **arguments, max_new_tokens=32, return_dict_in_generate=True)
        seconds.append(time.perf_counter() - start)
        texts.append(out.sequences.tolist())
        kinds.append(type(target))
        accepted.append(out.speculation.num_accepted if arguments else 0)
generate = target.load_custom_generate("{repo}", trust_remote_code=True, revision="{commit}")
drafter = generate.__self__._drafters[target]
target.generate(**inputs, **custom, max_new_tokens=4)
try:
    target.generate(**inputs, custom_generate="{repo}", trust_remote_code=False)
except ValueError as error:
    refusal = str(error)
alone = AutoModel.from_pretrained("{repo}", trust_remote_code=True, revision="{commit}")
given = target.generate(**inputs, **custom, assistant_model=alone.eval(), max_new_tokens=32)
print(json.dumps(dict(
    texts=texts,
    seconds=seconds,
    accepted=sum(accepted),
    is_kept=generate.__self__._drafters[target] is drafter,
    is_restored=len(set(kinds)) == 1,
    target=drafter.config.target_name_or_path,
    module=type(drafter).__module__,
    given=given.tolist(),
    refusal=refusal,
    packages=[found.metadata["Name"] for found in distributions()],
    prefix=sys.prefix,
)))
"""


@pytest.mark.parametrize(
    ("is_new", "num_timed"),
    [(False, 1), pytest.param(True, 3, marks=pytest.mark.slow)],
    ids=["hidden", "new environment"],
)
def test_published_code_writes_what_the_package_writes(
    is_new: bool, num_timed: int, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [{"do_sample": False}, *num_timed * TIMED]  # the first one warms up
    commit = publish(
        ROOT / "models/falcon-reference", REPO, Publication(target="someone/target", with_code=True), private=True
    )
    publish(ROOT / "models/falcon-reference", REPO, Publication(target="someone/other", with_code=True))
    target = AutoModelForCausalLM.from_pretrained(TARGET).eval()
    drafter = FalconSpecDrafter.from_pretrained(ROOT / "models/falcon-reference").eval()
    inputs = {"input_ids": torch.tensor(PROMPT), "attention_mask": torch.ones(1, len(PROMPT[0]), dtype=torch.long)}
    expected = []
    for options in settings:
        torch.manual_seed(0)
        expected.append(target.generate(**inputs, **options, assistant_model=drafter, max_new_tokens=32).tolist())

    facts = {"target": TARGET, "prompt": PROMPT, "repo": REPO, "commit": commit, "settings": settings}
    python = make_environment(tmp_path / "venv") if is_new else None
    results = run_client(_SCRIPT.format(**facts), tmp_path / "home", hub.url, python, HF_TOKEN=TOKEN)

    assert results["texts"] == [text for text in expected for _ in ("alone", "custom")]
    assert results["given"] == expected[0]
    assert results["accepted"] > 0
    assert results["is_kept"]
    assert results["is_restored"]
    assert results["target"] == "someone/target"  # not that of the later commit
    assert commit in results["module"]
    assert "trust_remote_code=True" in results["refusal"]
    if is_new:
        assert results["prefix"] == str(tmp_path / "venv")
        assert {"transformers_falcon_spec", "jaxtyping", "accelerate"}.isdisjoint(results["packages"])
    ratios = [sum(results["seconds"][start::4]) / sum(results["seconds"][start + 1 :: 4]) for start in (2, 4)]
    with capsys.disabled():
        sys.stdout.write(f" [custom over the target alone: sampling {ratios[0]:.2f}x, greedy {ratios[1]:.2f}x]")


@pytest.mark.usefixtures("code_folder")
def test_published_code_leaves_the_patch_of_the_package_alone(hub: Hub) -> None:
    target = make_target()
    drafter = FalconSpecDrafter.from_target(target)
    drafter.push_to_hub(REPO, target="someone/target", with_code=True)
    stock, patched = type(target), GenerationMixin._assisted_decoding
    options = {"max_new_tokens": 8, "pad_token_id": 0, "return_dict_in_generate": True}

    plain = target.generate(torch.tensor(SHORT), **options)
    custom = target.generate(torch.tensor(SHORT), **options, custom_generate=REPO, trust_remote_code=True)
    package = target.generate(torch.tensor(SHORT), **options, assistant_model=drafter)

    assert custom.sequences.tolist() == package.sequences.tolist() == plain.sequences.tolist()
    assert type(custom.speculation).__module__.endswith(".custom_generate.core_stats")
    assert type(package.speculation).__module__ == "transformers_falcon_spec.core.stats"
    assert type(target) is stock
    assert GenerationMixin._assisted_decoding is patched


def test_published_code_takes_no_stock_assistant() -> None:
    target = make_target()

    with pytest.raises(GenerationError, match="`assistant_model` is a `LlamaForCausalLM`"):
        CustomGenerate(FalconSpecDrafter, "").generate(torch.tensor(SHORT), model=target, assistant_model=target)


def test_the_path_of_a_module_holds_repository_and_commit() -> None:
    commit = "0123456789" * 4
    file = f"/home/me/modules/transformers_modules/some_hyphen_one/_7b_dot_1/{commit}/custom_generate/generate.py"

    assert origin(file) == ("some-one/7b.1", commit)
    with pytest.raises(
        GenerationError, match=r"came from a local folder\. Keep `custom_generate`, and pass the drafter beside it"
    ):
        origin("/home/me/modules/transformers_modules/folder/0123456789abcdef/custom_generate/generate.py")


def test_a_model_is_what_it_was_after_the_last_of_overlapping_calls() -> None:
    target = make_target()
    stock = type(target)
    is_inside, may_leave = threading.Event(), threading.Event()

    def call() -> None:
        with attached(target):
            is_inside.set()
            may_leave.wait(timeout=30)

    other = threading.Thread(target=call)
    other.start()
    is_inside.wait(timeout=30)
    with attached(target):
        assert type(target) is not stock
    assert type(target) is not stock
    may_leave.set()
    other.join()

    assert type(target) is stock


def test_a_model_is_what_it_was_after_an_error() -> None:
    target = make_target()
    stock = type(target)

    with pytest.raises(ZeroDivisionError), attached(target):
        raise ZeroDivisionError

    assert type(target) is stock
