"""DiffuSpec: any masked diffusion language model as a drafter (arXiv 2510.02358).

The model stays as it is: the configuration holds what differs between families. The mask of a model that others
trained is found by its string, for its id may be a word of the target. The model fills in masks behind the text, and
a search picks a path or a tree, which comes without draft probabilities: the walk compares tokens (the paper hands
over the marginals in its equation 6, which holds for tokens drawn from them alone).

What is kept of keys and values depends on who sees whom: all of the text where nothing in it sees masks, whole blocks
of a grid, nothing where all see all. New text and masks of all rows are read in one pass: a row's text stands in the
first slots of a cache and its masks behind it, where the next text is written over them; the last slot in sight takes
what nobody reads.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from operator import sub
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import Self

from ...core.masks import additive
from ...core.options import option
from ...core.verification import TokenTree
from ...errors import DrafterMismatchError, OptionError
from ...generation.capture.graph import batched_experts
from ...generation.drafting import Committed, Draft, DraftBudget, TargetView, TreeCandidateGenerator
from ...generation.head import apply_head
from ...generation.model_parts import decoder_of, layer_kinds
from ...generation.slot_cache import EXACT, SlotCache
from ...generation.tree_attention import tree_attention
from ...transformers_versions import cache_name
from ..autoregressive import make_draft_model
from ..config_fields import context_of, own_fields
from ..fingerprint import FIELD
from ..tree_drafting.proposing import ROOM, stacked_noise
from ..tree_drafting.text import GROWTH
from ..whole_model import WholeModelConfig, WholeModelDrafter, shared_vocabulary
from .search import (
    ContextProxy,
    Lattice,
    NgramProxy,
    PathScores,
    load_saved_proxy,
    prune,
    search_path,
    tree_over,
)

PAPER_LENGTH = 20  # k_min of the paper, where its controller settles


@strict
class DiffusionConfig(WholeModelConfig):
    """Configuration of [`DiffusionDrafter`]; it searches as the paper does (arXiv 2510.02358) at a fixed length.

    It has the fields of [`~drafters.whole_model.WholeModelConfig`], too: `draft_config`, `vocab_size`,
    `draft_vocab_size` and `target_name_or_path`.

    Args:
        auto_class (`str`, *optional*, defaults to `"AutoModelForCausalLM"`): Class of Transformers that loads it.
        mask_token_id (`int`): The diffusion model's id of a token to be filled in. It is never drafted.
        logits_shift (`int`, *optional*, defaults to 1):
            1: the row of a token speaks of the next one, as in models made of autoregressive ones; 0: a mask's row
            speaks of the mask. With 1 the newest token's own row drafts the first token, so that a draft of k
            takes k - 1 masks.
        attention (`str`, *optional*, defaults to `"prefix_causal"`):
            Who sees whom. `"full"`: all see all. `"prefix_causal"`: text sees what stands before it, masks see text
            and all masks. `"block_causal"`: blocks of `block_size` on a fixed grid see themselves and earlier blocks.
        block_size (`int`, *optional*): Tokens that the model was trained to fill in at once; None: no such limit.
        draft_length (`str`, *optional*, defaults to `"fixed"`):
            `"fixed"`; `"adaptive"`, the paper's controller.
        num_draft_tokens (`int`, *optional*): Most tokens of a draft; 0 is `block_size`, or 20. k_max in the paper.
        min_draft_tokens (`int`, *optional*, defaults to 1): Fewest of an adaptive length. k_min, 20 in the paper.
        growth (`int`, *optional*, defaults to 10): Tokens that a fully kept draft adds. delta in the paper.
        smoothing (`float`, *optional*, defaults to 0.5): Weight of the newest round. rho in the paper.
        search (`str`, *optional*, defaults to `"cps"`):
            `"cps"`: the path that diffusion model and a causal proxy like best, without a proxy the best token of
            every position; `"tree"`: a tree.
        mass (`float`, *optional*, defaults to 0.8): Probability that the candidates of a position must have. tau in
            the paper.
        max_candidates (`int`, *optional*, defaults to 15): Most candidates of a position. M_max in the paper.
        beam_width (`int`, *optional*, defaults to 3): Paths that the search keeps. B in the paper.
        model_weight (`float`, *optional*, defaults to 0.5): Weight of the diffusion model's score; the proxy has the
            rest. lambda in the paper.
        target_fingerprint (`dict`, *optional*): That of the target it was trained for; None for models that others
            trained.

    Raises:
        [`OptionError`]: an option out of range, or at odds with another.

    Example:

    ```python
    >>> from transformers import LlamaConfig
    >>> draft_config = LlamaConfig(vocab_size=101)
    >>> config = DiffusionConfig(draft_config=draft_config, vocab_size=100, mask_token_id=100, block_size=8)
    >>> config.num_draft_tokens, config.draft_vocab_size
    (8, 100)

    ```
    """

    model_type = "diffusion_spec"

    auto_class: str = option(
        "AutoModelForCausalLM", one_of=("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModel")
    )
    mask_token_id: int | None = None
    logits_shift: int = option(1, one_of=(0, 1))
    attention: str = option("prefix_causal", one_of=("full", "prefix_causal", "block_causal"))
    block_size: int | None = option(None, least=1)
    draft_length: str = option("fixed", one_of=("adaptive", "fixed"))
    num_draft_tokens: int = option(0, least=0)
    min_draft_tokens: int = option(1, least=1)
    growth: int = option(10, least=0)
    smoothing: float | int = option(0.5, above=0, most=1)
    search: str = option("cps", one_of=("cps", "tree"))
    mass: float | int = option(0.8, above=0, most=1)
    max_candidates: int = option(15, least=1)
    beam_width: int = option(3, least=1)
    model_weight: float | int = option(0.5, least=0, most=1)
    target_fingerprint: dict[str, Any] | None = None

    def fill_in(self) -> None:
        """Set the longest draft: the block that the model was trained on, else the paper's length."""
        if not self.num_draft_tokens:
            self.num_draft_tokens = self.block_size or max(PAPER_LENGTH, self.min_draft_tokens)

    def validate_token_ids(self) -> None:
        """Skip the stock check, which looks for the mask among the target's tokens, where it must not be."""

    def check(self) -> None:
        """Refuse options out of range or at odds with one another."""
        super().check()
        if self.block_size is not None and self.num_draft_tokens > self.block_size:
            raise OptionError(
                f"`num_draft_tokens` must be at most {self.block_size}, the block that the model was trained to fill "
                f"in, but it is {self.num_draft_tokens}. Take a model of larger blocks."
            )

        if self.min_draft_tokens > self.num_draft_tokens:
            raise OptionError(
                f"`min_draft_tokens` must be at most `num_draft_tokens`, {self.num_draft_tokens}, but it is "
                f"{self.min_draft_tokens}."
            )

        if self.attention == "block_causal" and self.block_size is None:
            raise OptionError('`attention="block_causal"` needs the `block_size` of its grid, but there is none.')

        size = self.draft_config.vocab_size
        if self.mask_token_id is None or not 0 <= self.mask_token_id < size:
            raise OptionError(
                f"`mask_token_id` must lie in 0..{size - 1}, the diffusion model's ids, but it is "
                f"{self.mask_token_id}."
            )

        if any(kind.sliding_window or kind.chunk_size for kind in layer_kinds(self.draft_config)):
            raise OptionError(
                "The layers of a diffusion model must see the whole text, but some see a window or a chunk. Take a "
                "model without."
            )


OWN_FIELDS = own_fields(DiffusionConfig)


# How masks behind texts are read

_HEADS = ("logits_to_keep", "num_logits_to_keep")  # what models call the number of last rows that the head reads


def arguments_of(
    model: PreTrainedModel, token_ids: Tensor, positions: Tensor, allowed: Tensor, cache: Any = None
) -> dict[str, Any]:
    """Arguments of the forward of this model for one pass, with the mask in its type.

    Ids and positions in the text are `[rows, tokens]`. What each token sees is `allowed` `[rows, tokens, slots]`, the
    slots of `cache` first: keys and values of what was read before, to which those of all these tokens are added.
    """
    return {
        "input_ids": token_ids,
        "attention_mask": additive(allowed, model.dtype),
        "position_ids": positions,
        cache_name(model.forward): cache,
        "use_cache": cache is not None,
    }


def logits_of(
    model: PreTrainedModel,
    token_ids: Tensor,
    positions: Tensor,
    allowed: Tensor,
    num_rows: int,
    cache: Any = None,
) -> Tensor:
    """Logits `[rows, num_rows, vocab]` in float32 over the model's ids, of the last tokens of a pass."""
    known = inspect.signature(model.forward).parameters
    heads = {name: num_rows for name in _HEADS if name in known}
    outputs = model(**arguments_of(model, token_ids, positions, allowed, cache), **heads)
    logits: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs.logits  # as the model's config says
    return logits[:, -num_rows:].float()


def visible(
    attention: str,
    num_committed: int | Int[Tensor, "rows 1 1"],
    block_size: int | None,
    queries: Int[Tensor, "*rows queries"],
    keys: Int[Tensor, "*rows keys"],
) -> Bool[Tensor, "*rows queries keys"]:
    """Which keys each query sees, both given as positions in the text; masks stand from `num_committed` on.

    `attention` and `block_size` are those of [`DiffusionConfig`].

    ```python
    >>> positions = torch.arange(4)
    >>> visible("prefix_causal", 2, None, positions, positions).int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]

    ```
    """
    queries, keys = queries[..., :, None], keys[..., None, :]
    if attention == "full":
        return torch.ones_like(keys + queries, dtype=torch.bool)
    if attention == "prefix_causal":
        return (keys <= queries) | (queries >= num_committed)

    assert block_size is not None  # the configuration sees to it
    return keys // block_size <= queries // block_size


class DenoisedTexts:
    """What a diffusion model keeps of the texts of all rows, and how it reads them on."""

    def __init__(self, drafter: "DiffusionDrafter", num_rows: int, num_slots: int) -> None:
        self.config = drafter.config
        self.model: Any = drafter.model
        self.device = drafter.device
        self.num_read = [0] * num_rows  # tokens of each row whose keys and values are kept
        self.cache: SlotCache | None = None
        if self.config.attention != "full":
            num_layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
            self.cache = SlotCache(num_layers, num_rows, EXACT.slots(num_slots), self.device)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        self.num_read = [self.num_read[row] for row in rows]
        if self.cache is not None:
            self.cache.select(list(rows))

    def logits(self, texts: Sequence[Tensor], nums: Sequence[int]) -> Tensor:
        """Logits `[rows, positions, vocab]` of the positions behind each row's text, of which there are `nums`.

        Read with them is what is not kept of the text, the newest token always.
        """
        config = self.config
        lengths = list(map(len, texts))
        starts = [min(num_read, end - 1) for num_read, end in zip(self.num_read, lengths, strict=True)]
        given = texts[0].new_zeros(len(texts), max(map(sub, lengths, starts)))
        for row, text in enumerate(texts):
            new = text[starts[row] :]
            given[row, -len(new) :] = new

        start, length, num = torch.tensor([starts, lengths, nums], device=self.device)[:, :, None]  # each [rows, 1]
        num_masks = (num - config.logits_shift).clamp(min=0)
        masks = torch.full(
            (len(texts), max(nums) - config.logits_shift), config.mask_token_id or 0, device=self.device
        )
        columns = torch.arange(-given.shape[1], masks.shape[1], device=self.device)
        is_read = (columns >= start - length) & (columns < num_masks)
        positions = length + columns
        ids = torch.cat([given.to(self.device), masks], dim=-1)
        ids = ids.where(ids < self.model.config.vocab_size, 0)  # ones that the model lacks

        held = positions
        is_held = is_read
        if self.cache is not None:
            shown = EXACT.slots(max(lengths) + config.num_draft_tokens + 1)
            if shown > self.cache.capacity:
                self.cache.grow(max(shown, int(GROWTH * self.cache.capacity)))

            held = torch.arange(shown, device=self.device).expand(len(ids), -1)
            is_held = held < length + num_masks
            behind = start + torch.arange(config.num_draft_tokens + 1, device=self.device)
            self.cache.forget(behind.clamp(max=shown - 1))
            self.cache.see(shown)
            self.cache.view.write_to(positions.where(is_read, shown - 1))
            grid = (config.block_size or 1) if config.attention == "block_causal" else 1
            self.num_read = [end - end % grid for end in lengths]

        seen = visible(config.attention, length[..., None], config.block_size, positions, held)
        allowed = seen & is_held[:, None]
        positions = positions.where(is_read, 0)
        with tree_attention(self.model), batched_experts(self.model):
            return logits_of(self.model, ids, positions, allowed, max(nums), self.cache)


def most_behind(drafter: "DiffusionDrafter", num_committed: int) -> int:
    """Most tokens of a draft behind a text of this length: to the end of its block on the grid or the context."""
    config = drafter.config
    most = config.num_draft_tokens
    shift = config.logits_shift
    context = context_of(drafter.model.config)
    if context is not None:
        most = min(most, context - num_committed + shift)

    if config.attention == "block_causal":
        block_size = config.block_size or 1  # the configuration sees to it that there is one
        most = min(most, block_size - num_committed % block_size + shift)

    return max(most, 0)


# The drafter

_LEAST_TOKENS = 6  # before and behind the first mask
_SHARE = 1e-4  # of what a token says of itself; less than that is rounding


def mask_id(config: PreTrainedConfig, options: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> int:
    """The id of the mask: as asked for, else that of the tokenizer, else that of the configuration."""
    named = getattr(tokenizer, "mask_token_id", None)
    candidates = (options.get("mask_token_id"), named, getattr(config, "mask_token_id", None))
    found: int | None = next((each for each in candidates if each is not None), None)
    if found is None:
        raise OptionError(
            "A diffusion model needs the id of its mask, but neither `mask_token_id`, a tokenizer nor its "
            "configuration names one. Pass `mask_token_id=...`."
        )

    if named is not None and tokenizer is not None and named != found:
        raise DrafterMismatchError(
            f"The mask must be {tokenizer.mask_token!r}, token {named} of the diffusion model's tokenizer, but "
            f"`mask_token_id` is {found}, there {tokenizer.convert_ids_to_tokens(found)!r}. Pass "
            f"`mask_token_id={named}`, or the tokenizer that the model was trained with."
        )

    return found


@torch.no_grad()
def check_attention(model: PreTrainedModel, config: DiffusionConfig, device: torch.device) -> None:
    """Refuse a model that does not attend as configured: a later token is changed, and early rows are compared."""
    if device.type == "meta":
        return

    size = max(_LEAST_TOKENS, config.block_size or 0)
    positions = torch.arange(2 * size, device=device)
    seen = visible(config.attention, size, config.block_size, positions, positions)[None]
    texts = torch.zeros(2, 2 * size, dtype=torch.long, device=device)
    texts[1, -1] = 1
    try:
        logits = logits_of(model, texts, positions.expand(2, -1), seen.expand(2, -1, -1), 2 * size)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:  # as where positions are counted by a mask `[rows, tokens]`
        raise OptionError(
            f"A diffusion model must take a mask that says what each token sees, but a `{type(model).__name__}` "
            f"fails at one: {error}. Take a model of another kind."
        ) from error

    changes = (logits[1] - logits[0]).abs().amax(dim=-1)
    leaks = bool(changes[: size - 1].max() > _SHARE * changes[-1])
    if leaks != (config.attention == "full"):
        raise OptionError(
            f"With `attention={config.attention!r}` the first tokens of a text must{' not' if leaks else ''} see the "
            f"last one, but in a `{type(model).__name__}` they {'do' if leaks else 'do not'}. Choose another "
            '`attention`, or load the model with `attn_implementation="sdpa"`.'
        )


DEFAULT_BLOCK = 8  # of a fresh drafter
_NOT_DRAFTING = {"draft_config", "auto_class", "vocab_size", "draft_vocab_size", "target_name_or_path", FIELD}


class DiffusionDrafter(WholeModelDrafter):
    """A drafter that is a masked diffusion model: one pass predicts all next positions, and a search picks from them.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM
    >>> target = AutoModelForCausalLM.from_pretrained("models/reference-target")
    >>> drafter = DiffusionDrafter.from_target(target, num_hidden_layers=1, block_size=4)
    >>> drafter.config.mask_token_id, drafter.num_nodes
    (4096, 5)
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> drafted = target.generate(ids, assistant_model=drafter, max_new_tokens=8, do_sample=False)
    >>> drafted.equal(target.generate(ids, max_new_tokens=8, do_sample=False))
    True

    ```
    """

    config: DiffusionConfig
    config_class = DiffusionConfig
    _supports_sdpa = True

    def __init__(self, config: DiffusionConfig, model: PreTrainedModel | None = None) -> None:
        super().__init__(config, model)
        self.proxy: NgramProxy | None = None  # what a path must please besides the model; None: the model alone
        self.post_init()

    @classmethod
    def from_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        """An untrained drafter for `target`, on its device: a smaller model of its kind with one token more, the mask.

        The model starts as the target's own layers, spread evenly, where it differs in depth alone; the mask starts as
        the mean of all tokens. `options` are fields of [`DiffusionConfig`], or else of the target's own configuration,
        such as `num_hidden_layers`.

        Raises:
            [`OptionError`]: an option that is neither, or not how the target's kind works.
        """
        given = {name: options.pop(name) for name in OWN_FIELDS & options.keys()}
        model = make_draft_model(target, **options)
        mask_token_id = model.config.vocab_size
        _add_mask(model)
        given = {"block_size": DEFAULT_BLOCK, "mask_token_id": mask_token_id, **given}
        config = DiffusionConfig.for_models(model, target, mask_token_id, given)
        drafter = cls(config, model).eval()
        check_attention(model, config, drafter.device)
        return drafter

    @classmethod
    def wrap(
        cls,
        model: PreTrainedModel,
        target: PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        **options: Any,
    ) -> Self:
        """A drafter for `target` that drafts with `model`, which stays where it is and becomes a part of the drafter.

        Args:
            model ([`~transformers.PreTrainedModel`]): A masked diffusion model with the target's tokens.
            target ([`~transformers.PreTrainedModel`]): The target.
            tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*): That of `model`, to compare tokens and
                to find the mask. Without both only vocabularies of one size are the same.
            target_tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*): That of the target.
            options: Fields of [`DiffusionConfig`].

        Raises:
            [`OptionError`]: an option that is unknown, out of range, or not how the model works.
            [`DrafterMismatchError`]: the model has other tokens than the target.
        """
        found = mask_id(model.config, options, tokenizer)
        options["mask_token_id"] = found

        sizes = (model.config.vocab_size, target.config.get_text_config(decoder=True).vocab_size)
        if sizes[0] == sizes[1] + 1 and found == sizes[1]:  # the target's tokens and a mask behind them
            sizes = (sizes[1], sizes[1])

        num_shared = shared_vocabulary(sizes, (tokenizer, target_tokenizer))

        config = DiffusionConfig.for_models(model, target, num_shared, options)
        drafter = cls(config, model).eval()
        check_attention(model, config, drafter.device)
        return drafter

    def load_extra_files(self, name_or_path: Any, **hub: Any) -> None:
        """Load the proxy, if one was saved."""
        self.proxy = load_saved_proxy(name_or_path, self.config.vocab_size, **hub)

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:  # type: ignore[override]
        """Save weights, config, options and the proxy; the arguments are those of `PreTrainedModel.save_pretrained`.

        Raises:
            [`OptionError`]: the model's code came with its weights, so that its class could not be found again.
        """
        if type(self.model).__module__.startswith("transformers_modules."):
            raise OptionError(
                f"A drafter is saved without code, but `{type(self.model).__name__}` came with code of its own. Wrap "
                "it anew instead: `DiffusionDrafter.from_pretrained(NAME, target=target, trust_remote_code=True)`."
            )

        super().save_pretrained(save_directory, **kwargs)
        if self.proxy is not None:
            self.proxy.save(save_directory)

    def forward(
        self,
        token_ids: Int[Tensor, "rows tokens"],
        positions: Int[Tensor, "rows tokens"],
        allowed: Bool[Tensor, "rows tokens tokens"],
        kept: Bool[Tensor, "rows tokens"],
        **_: Any,
    ) -> Tensor:
        """Logits `[kept, draft_vocab_size]` in float32 of the `kept` tokens; for training, without a cache.

        `positions` are those of texts with masks, whose tokens see what is `allowed`.
        """
        decoder: Any = decoder_of(self.model)
        states = decoder(**arguments_of(decoder, token_ids, positions, allowed))[0]
        return apply_head(self.model, states[kept])[:, : self.config.draft_vocab_size]

    @property
    def block_size(self) -> int:
        """Tokens drafted in one pass."""
        return self.config.num_draft_tokens

    @property
    def max_depth(self) -> int:
        """The depth of the deepest draft."""
        return self.config.num_draft_tokens

    @property
    def num_nodes(self) -> int:
        """Most nodes of a draft, root included."""
        is_tree = self.config.search == "tree"
        return self.num_tree_nodes if is_tree else 1 + self.config.num_draft_tokens

    @property
    def draft_settings(self) -> dict[str, Any]:
        """Settings besides weights that decide its drafts."""
        settings: dict[str, Any] = {}
        for name in sorted(OWN_FIELDS - _NOT_DRAFTING):
            settings[name] = getattr(self.config, name)

        if self.config.search == "tree":
            settings["num_tree_nodes"] = self.num_tree_nodes

        settings["proxy"] = None if self.proxy is None else self.proxy.fingerprint
        return settings

    def _check_tree(self, model: PreTrainedModel) -> None:
        super()._check_tree(model)
        self.config.check()  # its options may have changed


@torch.no_grad()
def _add_mask(model: PreTrainedModel) -> None:
    """Give a model one token more, which starts as the mean of all others; nothing is drawn."""
    size = model.config.vocab_size
    model.resize_token_embeddings(size + 1, mean_resizing=False)
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight: Tensor = part.weight  # type: ignore[assignment]
        weight[size] = weight[:size].mean(dim=0)
        if getattr(part, "bias", None) is not None:
            part.bias[size] = part.bias[:size].mean()  # type: ignore[index, operator]


class DraftLength:
    """The published adaptive length: longer after drafts that were accepted whole, shorter where the text ends.

    With moving averages that start at 0, `generated = (1 - rho) * generated + rho * num_generated` and the same for
    `accepted`, the next draft has `ceil(generated + delta * [accepted >= generated])` positions, at least `min_length`
    and at most `max_length`; the first one has `max_length`. Since `num_generated` never exceeds the length itself,
    the length falls to `min_length` in the second step and stays there except after drafts accepted almost whole:
    small drafters want a small `min_length`. Where both are the same, so is the length of every draft. Lengths count
    drafted tokens; root and bonus token are excluded. Source: arXiv 2510.02358, section 3.3.

    Example:

    ```python
    >>> length = DraftLength(min_length=20, max_length=30, delta=10, rho=0.5)
    >>> length.observe(num_generated=30, num_accepted=7)
    >>> length.length
    20

    ```
    """

    def __init__(self, min_length: int, max_length: int, delta: int, rho: float) -> None:
        self.min_length = min_length
        self.max_length = max_length
        self.delta = delta
        self.rho = rho
        self.length = max_length  # positions that the next pass denoises
        self._generated = 0.0
        self._accepted = 0.0

    def observe(self, num_generated: int, num_accepted: int) -> None:
        """Learn from a verified draft: positions before the end of the text, and drafted tokens that were accepted."""
        self._generated += self.rho * (num_generated - self._generated)
        self._accepted += self.rho * (num_accepted - self._accepted)
        bonus = self.delta * (self._accepted >= self._generated)
        self.length = min(max(math.ceil(self._generated + bonus), self.min_length), self.max_length)


class DiffusionCandidateGenerator(TreeCandidateGenerator):
    """Drafting with a [`DiffusionDrafter`] during one call; all rows share the passes."""

    def __init__(self, drafter: DiffusionDrafter, target: TargetView, max_length: int, rng: torch.Generator) -> None:
        super().__init__(drafter, target, max_length, rng)
        self.config = drafter.config
        self.end_ids, self.forbidden_ids = _special_ids(self.config)
        self._rows: list[_Row] = []
        self._texts: DenoisedTexts | None = None  # from the first commit on

    def commit(self, committed: Committed) -> None:
        """Keep the new text, and learn how much of each row's draft was kept."""
        if self._texts is None:
            self._rows = [_Row(self.drafter) for _ in committed.lengths]
            num_slots = min(max(committed.lengths) + ROOM, self.max_length)
            self._texts = DenoisedTexts(self.drafter, len(self._rows), num_slots)

        for number, (row, length) in enumerate(zip(self._rows, committed.lengths, strict=True)):
            row.take(committed.sequence_ids[number, :length], committed.num_new[number])

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        self._rows = [self._rows[row] for row in rows]
        if self._texts is not None:
            self._texts.select(rows)

    @torch.no_grad()
    def propose(self, budget: DraftBudget) -> Draft | None:
        """A path or a tree for each row within the budget; None where no row may have one."""
        if budget.num_passes == 0:
            return None

        nums = []
        for row, depth in zip(self._rows, budget.depths, strict=True):
            most = depth if self._draws_tree(budget) else min(depth, budget.num_nodes - 1)
            nums.append(row.num_positions(most))

        if not any(nums):
            return None

        found = self._denoised(nums, budget)
        max_depth = 0
        rows_of_ids = []
        rows_of_parents = []
        for row, lattice, num in zip(self._rows, found, nums, strict=True):
            tree = self._searched(row, lattice, budget) if num else _path([int(row.text[-1])])
            rows_of_ids.append(torch.tensor(tree.token_ids))
            rows_of_parents.append(torch.tensor(tree.parents))
            max_depth = max(max_depth, *tree.depths)

        device = self.drafter.device
        token_ids = pad_sequence(rows_of_ids, batch_first=True)
        parents = pad_sequence(rows_of_parents, batch_first=True, padding_value=-1)
        return Draft(
            token_ids.to(device, non_blocking=True),
            parents.to(device, non_blocking=True),  # -1 at the end of shorter rows: nodes that belong to nobody
            max_depth=max_depth,
        )

    def _draws_tree(self, budget: DraftBudget) -> bool:
        """Whether the draft is a tree and no path."""
        return self.config.search == "tree" and not budget.is_chain

    def _denoised(self, nums: Sequence[int], budget: DraftBudget) -> list[Lattice]:
        """The candidates of each row's positions behind its text; the host waits for them."""
        assert self._texts is not None  # text came first
        noise = self._noise(len(self._rows), max(nums), budget)
        logits = self._texts.logits([row.text for row in self._rows], nums)
        scores = self._scores_of(logits, noise)
        sharpened = scores / (budget.temperature or 1.0)
        found = prune(sharpened, self.config.mass, self.config.max_candidates, self.end_ids)
        return [found[row][:num] for row, num in enumerate(nums)]

    def _noise(self, num_rows: int, num: int, budget: DraftBudget) -> Tensor | None:
        """What draws to come take off the scores `[rows, num, vocab]`; None where they are not known."""
        if budget.noise is None:
            return None

        coming = stacked_noise(budget.noise, range(num_rows), range(1, num + 1))
        scaled = coming.to(self.drafter.device, torch.float).log() * (budget.temperature or 1.0)
        return scaled.unflatten(0, (num_rows, num))

    def _scores_of(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """Logits `[..., positions, vocab]` over the target's tokens, -inf where it would never write one."""
        shared = logits[..., : self.config.draft_vocab_size]
        scores = functional.pad(shared, (0, self.target.vocab_size - shared.shape[-1]), value=-torch.inf)
        for token in self.forbidden_ids:
            scores[..., token].fill_(-torch.inf)

        return scores if noise is None else scores - noise

    def _searched(self, row: "_Row", lattice: Lattice, budget: DraftBudget) -> TokenTree:
        """The path or tree that the search picks for one row, root included."""
        root = int(row.text[-1])
        row.num_generated = lattice.num_generated
        scores = PathScores(lattice, row.read_proxy(), row.text[-2:].tolist(), self.config.model_weight)
        if self._draws_tree(budget):
            return tree_over(scores, root, min(self.drafter.num_tree_nodes, budget.num_nodes))

        return _path([root, *search_path(scores, self.config.beam_width)])


def _path(token_ids: list[int]) -> TokenTree:
    """A draft whose tokens follow one another, the root first."""
    return TokenTree(range(-1, len(token_ids) - 1), token_ids)


class _Row:
    """The state of one row during a call: its text, proxy and draft length."""

    def __init__(self, drafter: DiffusionDrafter) -> None:
        self.drafter = drafter
        config = drafter.config
        most = config.num_draft_tokens
        least = config.min_draft_tokens if config.draft_length == "adaptive" else most
        self.draft_length = DraftLength(least, most, config.growth, config.smoothing)
        self.text = torch.empty(0, dtype=torch.long)  # all committed tokens
        self.num_generated: int | None = None  # of a draft that is not verified yet, the positions before its end
        self._proxy = None if drafter.proxy is None else ContextProxy(drafter.proxy)
        self._num_counted = 0

    def take(self, text: Tensor, num_new: int) -> None:
        """All of the text, and how many tokens of it are new."""
        self.text = text
        if self.num_generated is not None and num_new:
            self.draft_length.observe(self.num_generated, num_new - 1)

        self.num_generated = None

    def num_positions(self, most: int) -> int:
        """Positions to fill in, `most` of them."""
        return min(most, self.draft_length.length, most_behind(self.drafter, len(self.text)))

    def read_proxy(self) -> ContextProxy | None:
        """The proxy, which has read all of the text; None without one."""
        if self._proxy is not None:
            self._proxy.update(self.text[self._num_counted :].tolist())
            self._num_counted = len(self.text)

        return self._proxy


def _special_ids(config: DiffusionConfig) -> tuple[list[int], list[int]]:
    """Tokens that end a text, and tokens that never follow one: the mask, and what begins or fills up texts."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    end_ids = [end for end in ends if end is not None and end < config.vocab_size]
    never = (config.mask_token_id, config.bos_token_id, config.pad_token_id)
    known = {token for token in never if token is not None and token < config.vocab_size}
    return end_ids, sorted(known.difference(end_ids))


DiffusionDrafter.generator_class = DiffusionCandidateGenerator
