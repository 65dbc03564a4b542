"""Targets as people load them: adapters, half precision, quantised, offloaded, in pipelines and threads, compiled."""

import threading
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import cpu_offload
from transformers import AutoModelForCausalLM, pipeline

from tests import quantized, runs
from tests.adapters import switch_off
from tests.chat import make_tokenizer
from tests.doubles import InformedDrafter, RandomDrafter
from tests.pairs import in_turn
from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec import (
    EagleDrafter,
    FalconSpecDrafter,
    LookaheadDrafter,
    MedusaDrafter,
    collect_speculation,
)
from transformers_falcon_spec.generation.probe import probe

pytestmark = pytest.mark.families


def informed(target: Any, **options: Any) -> InformedDrafter:
    """A drafter that is often right about this target."""
    return InformedDrafter(RandomDrafter(feature_layers=(1, -1)), runs.plain(target, **options).sequences)


def with_adapter(target: Any) -> Any:
    """A LoRA adapter whose weights are not zero."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(target, config)


@pytest.mark.parametrize("is_merged", [False, True])
def test_a_target_with_an_adapter_writes_its_own_text(is_merged: bool) -> None:
    bare = runs.plain(make_target().double()).sequences
    target = with_adapter(make_target().double())
    target = target.merge_and_unload() if is_merged else target

    pair = runs.both(target, informed(target))

    pair.assert_equal()
    assert pair.stats.acceptance_length > 1
    assert not pair.plain.sequences.equal(bare)


@pytest.mark.parametrize("mode", [{}, runs.SAMPLING], ids=["greedy", "sampling"])
def test_a_target_that_an_adapter_was_loaded_into(mode: dict[str, Any], tmp_path: Path) -> None:
    with_adapter(make_target().double()).save_pretrained(tmp_path)
    target = make_target().double()
    bare = runs.plain(target, **mode).sequences
    target.load_adapter(str(tmp_path))
    drafter = InformedDrafter(make_drafter(make_target().double(), block_size=2), runs.plain(target, **mode).sequences)

    pair = runs.both(target, drafter, **mode)
    switch_off(target)
    without = runs.both(target, drafter, **mode)

    pair.assert_equal()
    assert pair.stats.acceptance_length > 1
    without.assert_equal()
    assert without.plain.sequences.equal(bare)
    assert not pair.plain.sequences.equal(bare)


def test_an_adapter_switched_off_is_not_heard() -> None:
    target = with_adapter(make_target().double())

    with target.disable_adapter():
        pair = runs.both(target, informed(target))

    pair.assert_equal()
    assert pair.plain.sequences.equal(runs.plain(make_target().double()).sequences)


def test_under_inference_mode() -> None:
    target = make_target().double()
    gold = runs.plain(target, **runs.SAMPLING).sequences

    with torch.inference_mode():
        pair = runs.both(target, InformedDrafter(make_drafter(target, block_size=2), gold), **runs.SAMPLING)

    pair.assert_equal()
    assert pair.stats.num_accepted > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_with_a_drafter_in_full(dtype: torch.dtype) -> None:
    target = make_target().to(dtype)
    drafter = make_drafter(make_target(), block_size=2)

    out = runs.drafted(target, drafter)

    assert out.sequences.shape == runs.plain(target).sequences.shape
    assert out.speculation.num_drafted > 0


def test_a_pipeline_hands_the_drafter_on() -> None:
    target, tokenizer = make_target().double(), make_tokenizer()
    prompt = tokenizer("one two three", return_tensors="pt").input_ids
    gold = runs.plain(target, prompt).sequences
    drafter = InformedDrafter(make_drafter(target, block_size=2), gold)
    options = {"max_new_tokens": 24, "do_sample": False, "return_full_text": False}
    write = pipeline(
        "text-generation", model=target, tokenizer=tokenizer, device="cpu"
    )  # else to a GPU, where there is one
    plain = write("one two three", **options)

    with collect_speculation() as stats:
        drafted = write("one two three", assistant_model=drafter, **options)

    assert drafted == plain
    assert [each.num_tokens for each in stats] == [24]
    assert stats[0].num_accepted > 0


def test_a_target_with_layers_on_disk(tmp_path: Path) -> None:
    make_target().save_pretrained(tmp_path / "target", max_shard_size="20KB")
    devices = {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.norm": "cpu",
        "lm_head": "cpu",
        "model.rotary_emb": "cpu",
    }
    devices |= {f"model.layers.{layer}": "disk" for layer in range(1, make_target().config.num_hidden_layers)}
    target = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", device_map=devices, offload_folder=str(tmp_path / "offload")
    )

    for drafter in (
        informed(target),
        InformedDrafter(make_drafter(target, block_size=2), runs.plain(target).sequences),
    ):
        pair = runs.both(target, drafter)

        pair.assert_equal()
        assert pair.stats.acceptance_length > 1


OF_TARGETS = (FalconSpecDrafter, EagleDrafter, MedusaDrafter, LookaheadDrafter)
PARTS_ON_DISK: dict[str, dict[str, Any]] = {
    "all": {"": "disk"},
    "embeddings": {"model.embed_tokens": "disk"},
    "head": {"lm_head": "disk"},
}


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        *((kind, "all") for kind in OF_TARGETS),
        *in_turn(OF_TARGETS, ("embeddings", "head", "all in memory")),
        (FalconSpecDrafter, "head"),
    ],
)
def test_a_target_whose_weights_only_come_to_be_read(kind: Any, parts: str, tmp_path: Path) -> None:
    target = make_target(tie_word_embeddings=False)
    if parts == "all in memory":
        target = cpu_offload(target, execution_device=torch.device("cpu"))
    else:
        target.save_pretrained(tmp_path / "target", max_shard_size="10KB")
        names = ("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head")
        devices = {**({} if parts == "all" else dict.fromkeys(names, "cpu")), **PARTS_ON_DISK[parts]}
        target = AutoModelForCausalLM.from_pretrained(
            tmp_path / "target", device_map=devices, offload_folder=str(tmp_path / "offload")
        )
        target.generation_config.eos_token_id = None

    drafter = kind.from_target(target).eval()  # with weights of its own
    gold = runs.plain(target).sequences
    pair = runs.both(target, InformedDrafter(drafter, gold) if kind is not LookaheadDrafter else drafter)

    pair.assert_equal(is_kept=kind is not LookaheadDrafter)
    assert drafter.device.type == "cpu"


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("saved", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]], ids="-".join)
def test_adapters_of_embeddings_that_are_the_head_too(saved: list[str], ties: bool) -> None:
    target = make_target(tie_word_embeddings=True)
    options: dict[str, Any] = {"modules_to_save": saved, "ensure_weight_tying": ties}
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    adapted = peft.get_peft_model(target, config).double().eval()
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "modules_to_save" in name:
                weight.mul_(1.3)

    pair = runs.informed(adapted, make_drafter(target), make_prompt())

    pair.assert_equal()


def test_threads_share_one_target_and_one_drafter() -> None:
    target, prompts = make_target().double(), [runs.make_prompt(10 + seed, seed) for seed in range(4)]
    alone = [runs.plain(target, prompt, max_new_tokens=40).sequences for prompt in prompts]
    drafter, before = make_drafter(target, block_size=2, feature_layers=[1, -1]), runs.traces(target)
    written: dict[int, Any] = {}

    def write(number: int) -> None:
        informed = InformedDrafter(drafter, alone[number])  # what it knows differs, the weights are shared
        written[number] = [runs.drafted(target, informed, prompts[number], max_new_tokens=40) for _ in range(3)]

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for number, text in enumerate(alone):
        assert [out.sequences.tolist() for out in written[number]] == [text.tolist()] * 3
        assert all(out.speculation.num_accepted > 0 for out in written[number])
    assert runs.traces(target) == before


@pytest.mark.quantized
@pytest.mark.parametrize("mode", [{}, runs.SAMPLING], ids=["greedy", "sampling"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_target_with_weights_of_eight_bits(kind: str, mode: dict[str, Any]) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_  # noqa: PLC0415  only this lane has it

    target, full = make_target(kind), make_target(kind)
    quantize_(target, Int8WeightOnlyConfig())
    gold = runs.plain(target, **mode).sequences
    logits = target(runs.make_prompt()).logits

    for drafter in (RandomDrafter(feature_layers=(1, -1)), make_drafter(full, block_size=2)):
        pair = runs.both(target, InformedDrafter(drafter, gold), **mode)

        pair.assert_equal()
        assert pair.stats.acceptance_length > 1
    assert type(target.get_output_embeddings().weight).__name__ == "Int8Tensor"
    assert not logits.equal(full(runs.make_prompt()).logits)


@pytest.mark.quantized
@pytest.mark.parametrize("mode", [{}, runs.SAMPLING], ids=["greedy", "sampling"])
@pytest.mark.parametrize("kind", ["torchao", "nf4", "fp4", "nf4, scales quantised too", "gptq", "awq"])
def test_a_target_that_was_quantised_or_is_while_it_loads(kind: str, mode: dict[str, Any]) -> None:
    target, full = quantized.loaded(kind), make_target(**quantized.BLOCKS)
    gold, drafter = runs.plain(target, **mode).sequences, make_drafter(make_target(), block_size=2)
    drafter.generation_config.pack_weights = True

    pair = runs.both(target, InformedDrafter(drafter, gold), **mode)

    pair.assert_equal()
    assert probe(target).form == "tree"
    assert pair.stats.acceptance_length > 1
    assert not any("int8" in note for note in pair.stats.notes)
    kernel = target.model.layers[0].mlp.up_proj
    weight = kernel.qweight if kind in quantized.KERNELS else kernel.weight
    assert type(weight).__name__ == {"torchao": "Int8Tensor", "gptq": "Tensor", "awq": "Tensor"}.get(
        kind, "Params4bit"
    )
    assert not target(runs.make_prompt()).logits.equal(full(runs.make_prompt()).logits)


@pytest.mark.quantized
@pytest.mark.parametrize("seed", range(4))
def test_int8_layers_that_round_what_they_read_get_no_drafts_and_that_is_told(seed: int) -> None:
    target = quantized.loaded("int8", seed=seed)
    gold = runs.plain(target).sequences

    pair = runs.both(target, InformedDrafter(RandomDrafter(), gold))

    pair.assert_equal(is_kept=False)
    assert probe(target).form == "plain"
    (note,) = pair.stats.notes
    assert note.startswith("The target reads one token at a time, and nothing is drafted: even a chain's logits")


@pytest.mark.gpu
def test_a_target_quantised_by_bitsandbytes() -> None:
    pytest.importorskip("bitsandbytes")
    target, prompt = quantized.loaded("nf4", device="cuda"), runs.make_prompt().cuda()
    gold = runs.plain(target, prompt).sequences

    pair = runs.both(target, InformedDrafter(RandomDrafter(feature_layers=(1, -1)), gold), prompt)

    pair.assert_equal()
    assert pair.stats.acceptance_length > 1
