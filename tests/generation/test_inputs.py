"""Models with a `forward` argument of their own: it reaches every read of a draft as plain decoding hands it over, or is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.families import FAMILIES
from tests.generation.model_kwargs import LENGTH, prompts
from tests.generation.test_ended_rows import ending
from tests.tiny import in_double, peaked
from transformers_falcon_spec.errors import GenerationError
from transformers_falcon_spec.generation import audit
from transformers_falcon_spec.transformers_versions import CACHE


class Shifted(LlamaForCausalLM):
    """Adds `shift` to the embeddings of what it reads."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,  # what Transformers before 5.24 calls the cache
        cache: Any = None,
        shift: Any = None,
        **kwargs: Any,
    ) -> Any:
        kwargs[CACHE] = past_key_values if cache is None else cache
        embeds = self.model.embed_tokens(input_ids)
        if shift is not None:
            embeds = embeds + self.fitted(shift, embeds)
        return super().forward(None, attention_mask, position_ids, inputs_embeds=embeds, **kwargs)

    def fitted(self, shift: Any, embeds: Tensor) -> Any:
        return shift


class ShiftedByToken(Shifted):
    """Takes one number for each token that it reads, which `prepare_inputs_for_generation` picks as it does token types."""

    def fitted(self, shift: Any, embeds: Tensor) -> Any:
        assert shift.shape[1] == embeds.shape[1]
        return shift[..., None]

    def prepare_inputs_for_generation(self, input_ids: Tensor, shift: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return inputs if shift is None else {**inputs, "shift": shift[:, -inputs["input_ids"].shape[1] :]}


class ShiftedByText(Shifted):
    """Takes one number for each token of the text, which grows with it; slots that hold no token any more do not count."""

    def fitted(self, shift: Any, embeds: Tensor) -> Any:
        return shift[:, -embeds.shape[1] :, None]

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        found = super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs)
        shift = found.get("shift")
        return found if shift is None else {**found, "shift": torch.cat([shift, shift[:, -1:]], dim=-1)}


class ShiftedByRow(Shifted):
    """Takes a list with one number for each row."""

    def fitted(self, shift: Any, embeds: Tensor) -> Any:
        return torch.tensor(shift, dtype=embeds.dtype)[:, None, None]


class ShiftedByItsTail(Shifted):
    """Cuts what it is given to the tokens that it reads, so that many tokens would read other numbers than one by one."""

    def fitted(self, shift: Any, embeds: Tensor) -> Any:
        shift = shift[0] if isinstance(shift, list) else shift
        return shift[:, -embeds.shape[1] :, None]


class ShiftedByStep(Shifted):
    """Computes what it adds from the length of the text."""

    def prepare_inputs_for_generation(self, input_ids: Tensor, shift: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return inputs if shift is None else {**inputs, "shift": shift * input_ids.shape[1]}


class ShiftedByIds(Shifted):
    """Computes what it adds from the tokens that it reads."""

    def prepare_inputs_for_generation(self, input_ids: Tensor, shift: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return inputs if shift is None else {**inputs, "shift": shift * inputs["input_ids"].double().sin()[..., None]}


class ShiftedInPlace(Shifted):
    """Changes what it was given at every step."""

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        found = super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs)
        if "shift" in found:
            found["shift"] += 0.1
        return found


class Masked(Shifted):
    """Hides the first tokens of the text from new ones."""

    def prepare_inputs_for_generation(self, input_ids: Tensor, shift: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        if shift is not None:
            inputs["attention_mask"] = torch.ones_like(input_ids)
            inputs["attention_mask"][:, : int(shift)] = 0
        return inputs


def make_model(kind: type[Shifted], **changes: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return in_double(peaked(kind(LlamaConfig(**FAMILIES["llama"].fields, **changes))))


def numbers(*shape: int) -> Tensor:
    return 5 * torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(0))


FOLLOWED: dict[str, tuple[type[Shifted], Callable[[int, int], Any]]] = {
    "a number": (Shifted, lambda rows, length: 0.9),
    "a tensor without dimensions": (Shifted, lambda rows, length: torch.tensor(0.9)),
    "one entry": (Shifted, lambda rows, length: torch.tensor([0.9])),
    "one entry a row": (Shifted, lambda rows, length: numbers(rows, 1, 1)),
    "by token": (ShiftedByToken, numbers),
    "by text": (ShiftedByText, numbers),
    "a list": (ShiftedByRow, lambda rows, length: [0.3 + row for row in range(rows)]),
}
REFUSED: dict[str, tuple[type[Shifted], Any, str]] = {
    "a vector": (Shifted, numbers(64), r"`shift` must be one value, or have .* every step reads one of shape \(64,\)"),
    "as long as the prompt": (ShiftedByItsTail, numbers(1, LENGTH), r"`shift` must be one value.* shape \(1, 12\)"),
    "in a list": (ShiftedByItsTail, [numbers(1, LENGTH)], "`shift` must be one value"),
    "by step": (ShiftedByStep, 0.1, r"`shift` must be the same at every step.* gets 1\.3.* and the next one 1\.4"),
    "by ids": (ShiftedByIds, 1.0, "`shift` must be the same at every step"),
    "in place": (ShiftedInPlace, torch.tensor([0.1]), "`shift` must be the same at every step"),
    "a mask": (Masked, 4, r"`attention_mask` must say of every token whether it is padding.* \(1, 13\)"),
}


@pytest.mark.parametrize(
    ("rows", "length"),
    [(1, LENGTH), (2, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, 1), (2, LENGTH)])],
)
@pytest.mark.parametrize("kind", FOLLOWED)
def test_a_draft_is_read_with_what_plain_decoding_would_feed(kind: str, rows: int, length: int) -> None:
    model_class, value = FOLLOWED[kind]
    model, prompt, shift = make_model(model_class), prompts(rows)[:, :length], value(rows, length)
    without = runs.plain(model, prompt).sequences
    gold = runs.plain(model, prompt, shift=shift).sequences

    pair = runs.both(model, InformedDrafter(RandomDrafter(num_nodes=12), gold), prompt, shift=shift)

    is_plain = kind == "a list" and rows > 1  # nobody knows whose its entries are
    pair.assert_equal(is_kept=not is_plain)
    assert pair.stats.acceptance_length > 1.3 or is_plain
    assert any("the target takes more than its text" in note for note in pair.stats.notes) == is_plain
    assert gold.tolist() != without.tolist()


@pytest.mark.parametrize("kind", ["by token", "by text"])
def test_what_belongs_to_tokens_stays_with_them_in_a_padded_batch(kind: str) -> None:
    model, prompt = make_model(ShiftedByText if kind == "by text" else ShiftedByToken), prompts(2)
    mask = torch.ones_like(prompt)
    mask[1, :5] = 0
    options = {"attention_mask": mask, "shift": numbers(2, LENGTH)}
    gold = runs.plain(model, prompt, **options).sequences

    pair = runs.both(model, InformedDrafter(RandomDrafter(num_nodes=12), gold, mask=mask), prompt, **options)

    pair.assert_equal()
    assert pair.stats.acceptance_length > 1.3


@pytest.mark.parametrize("kind", FOLLOWED)
def test_what_belongs_to_rows_stays_with_them_where_others_end(kind: str) -> None:
    model_class, value = FOLLOWED[kind]
    shift, ends = value(4, LENGTH), ending(prompt_len=LENGTH)

    pair = runs.informed(make_model(model_class), RandomDrafter(), prompts(4), shift=shift, **ends)

    pair.assert_equal(is_kept=kind != "a list")


@pytest.mark.parametrize("kind", FOLLOWED)
def test_what_belongs_to_rows_stays_with_them_where_some_are_read_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "FLOOR", 16)  # behind it drafts are read again as plain decoding reads
    model_class, value = FOLLOWED[kind]

    pair = runs.informed(
        make_model(model_class), RandomDrafter(), prompts(3), shift=value(3, LENGTH), max_new_tokens=80
    )

    pair.assert_equal(is_kept=kind != "a list")


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_draft_cannot_be_fed_is_refused_before_anything_is_written(kind: str) -> None:
    model_class, shift, message = REFUSED[kind]
    model, streamed = make_model(model_class), []
    cache = DynamicCache(config=model.config)

    class Streamer:
        def put(self, tokens: Tensor) -> None:
            streamed.append(tokens.shape)

        def end(self) -> None:
            streamed.append(None)

    with pytest.raises(GenerationError, match=message):
        runs.drafted(model, RandomDrafter(), prompts(1), shift=shift, past_key_values=cache, streamer=Streamer())

    assert streamed == [(1, LENGTH)]  # the prompt, which `generate` itself puts
    assert cache.get_seq_length() == 0
    runs.both(model, RandomDrafter(), prompts(1)).assert_equal()
