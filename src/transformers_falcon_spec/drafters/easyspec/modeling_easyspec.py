"""The EasySpec drafter: a language model whose middle layers compute attention in groups, from the same input.

Only attention reads the older input; MLPs stay in order and read what came before them. Source: arXiv 2502.02493,
section 4.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import Self

from ...core.masks import additive
from ...errors import OptionError
from ...generation.distributed import SINGLE_PROCESS, Processes, ProcessGroup, named_options
from ...generation.head import apply_head
from ...provenance import weights_fingerprint
from ..tree_drafting.grown import GrowingDrafter
from ..whole_model import WholeModelDrafter, shared_vocabulary
from .backends import Backend, FusedBackend, weights_state
from .configuration_easyspec import LayerParallelConfig, build_groups
from .distributed import DistributedBackend
from .families import Inputs, LayeredModel, check_family
from .generator import LayerParallelCandidateGenerator


class LayerParallelDrafter(WholeModelDrafter, GrowingDrafter):
    """A drafter that is a small language model of the target's family, several layers of which attend at once.

    What a step drafts is computed roughly, what became text exactly: the first pass of every step reads the new text
    layer after layer, as the model itself would, and nothing rough outlives the step.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM
    >>> from transformers_falcon_spec.drafters.autoregressive import make_draft_model
    >>> target = AutoModelForCausalLM.from_pretrained("models/reference-target")
    >>> drafter = LayerParallelDrafter.wrap(make_draft_model(target, num_hidden_layers=8), target, group_size=3)
    >>> drafter.config.layer_groups
    [[0], [1, 2, 3], [4, 5, 6], [7]]
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> drafted = target.generate(ids, assistant_model=drafter, max_new_tokens=8, do_sample=False)
    >>> drafted.equal(target.generate(ids, max_new_tokens=8, do_sample=False))
    True

    ```
    """

    config: LayerParallelConfig
    config_class = LayerParallelConfig
    generator_class = LayerParallelCandidateGenerator
    base_model_prefix = "drafter"
    wrapping_options = ("group_size", *WholeModelDrafter.wrapping_options)
    default_depth = 5  # the paper's
    _supports_sdpa = True

    def __init__(self, config: LayerParallelConfig, model: PreTrainedModel | None = None) -> None:
        super().__init__(config, model)
        self.layered = LayeredModel(self.model)
        self._fused: tuple[Any, FusedBackend] | None = None  # what it was made of, and it
        self._processes: Processes | None = None
        self.post_init()

    @classmethod
    def check_wrappable(cls, config: PreTrainedConfig) -> None:
        """Refuse a model of a family whose layers are not known: [`OptionError`]."""
        check_family(config)

    @classmethod
    def wrap(
        cls,
        model: PreTrainedModel,
        target: PreTrainedModel,
        *,
        group_size: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        **options: Any,
    ) -> Self:
        """A drafter for `target` that drafts with `model`, which stays where it is and becomes a part of the drafter.

        Args:
            model ([`~transformers.PreTrainedModel`]): A causal language model with the target's tokens.
            target ([`~transformers.PreTrainedModel`]): The target.
            group_size (`int`, *optional*): Most layers of a group, by default 2 in models of up to 16 layers and 4 in
                others; not beside `layer_groups`.
            tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*): That of `model`, to compare tokens.
                Without both of them only vocabularies of one size are taken for the same.
            target_tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*): That of the target.
            options: Fields of [`LayerParallelConfig`].

        Raises:
            [`OptionError`]: the model is of a family that cannot be wrapped, or an option is out of range or unknown.
            [`DrafterMismatchError`]: the model has other tokens than the target.
        """
        check_family(model.config)
        sizes = (model.config.vocab_size, target.config.get_text_config(decoder=True).vocab_size)
        num_shared = shared_vocabulary(sizes, (tokenizer, target_tokenizer))
        given = {name: value for name, value in options.items() if value is not None}
        if given.get("draft_vocab_size", num_shared) > num_shared:
            raise OptionError(
                f"`draft_vocab_size` must be at most {num_shared}, what both models have, but it is "
                f"{given['draft_vocab_size']}."
            )
        if group_size is not None and "layer_groups" in given:
            raise OptionError(
                "`group_size` makes groups and `layer_groups` names them, so one must be left out, but they are "
                f"{group_size} and {given['layer_groups']}."
            )
        if group_size is not None:
            given["layer_groups"] = build_groups(model.config.num_hidden_layers, group_size)
        return cls(LayerParallelConfig.for_models(model, target, num_shared, given), model).eval()

    def forward(self, input_ids: Tensor, is_exact: bool = False, **_: Any) -> Tensor:
        """Logits `[rows, tokens, draft_vocab_size]` in float32 of whole texts `[rows, tokens]` without padding.

        With `is_exact` the layers follow each other, as in the model alone.
        """
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        allowed = (positions[:, None] <= positions[..., None]).expand(len(input_ids), -1, -1)
        states = self.read(input_ids, allowed, positions, positions, DynamicCache(), self.backend(), is_exact)
        return self.logits(states)

    def read(
        self,
        token_ids: Tensor,
        allowed: Tensor,
        positions: Tensor,
        slot_positions: Tensor,
        cache: Any,
        backend: Backend,
        is_exact: bool,
    ) -> Tensor:
        """States `[rows, tokens, hidden]` after the final norm; keys and values are added to `cache`.

        Tokens `[rows, tokens]` that the model lacks are read as id 0. Each sees the slots that `allowed`
        `[rows, tokens, slots]` names, less those beyond a window: of tokens and slots, these tokens' last, `positions`
        and `slot_positions` say where they stand in the text. If `is_exact`, every layer reads what the one before it
        gave.
        """
        layered = self.layered
        known = token_ids.where(token_ids < self.model.config.vocab_size, 0)
        states = self.model.get_input_embeddings()(known)
        masks = {}
        for kind in layered.kinds:
            seen = allowed
            if kind.sliding_window is not None:
                seen = allowed & (slot_positions[:, None] > positions[..., None] - kind.sliding_window)
            masks[kind.name] = additive(seen, states.dtype)
        rotary = layered.rotary(states, positions)
        for number, group in enumerate(backend.groups):
            inputs = Inputs(masks, positions, rotary, backend.cache_of(number, cache))
            if is_exact or len(group) == 1:
                for index in group:
                    states = layered.read(index, states, inputs)
            else:
                for index, attended in zip(group, backend.attend(number, states, inputs), strict=True):
                    states = layered.finish(index, states, attended)
        return layered.final_norm(states)

    def logits(self, states: Tensor) -> Tensor:
        """Logits over the tokens that can be drafted, in float32."""
        return apply_head(self.model, states)[..., : self.config.draft_vocab_size]

    def backend(self) -> Backend:
        """The backend that computes groups; fused weights are made anew if the model's have changed."""
        self.config.check()
        assert self.config.layer_groups is not None  # checked
        groups = [list(group) for group in self.config.layer_groups]
        if self.config.backend == "distributed":
            self._processes = self._processes or ProcessGroup(self.config.timeout_seconds)  # the same for all calls
            return DistributedBackend(self.layered, groups, self._processes)
        made_of = (groups, weights_state(self.model))
        if self._fused is None or self._fused[0] != made_of:
            with torch.no_grad():
                self._fused = (made_of, FusedBackend(self.layered, groups))
        return self._fused[1]

    def join(self) -> Processes:
        """The processes on which it computes; this one alone unless `backend` is `"distributed"`.

        Raises:
            [`OptionError`]: `torch.distributed` does not run, or with more processes than the model has layers.
            [`DistributedError`]: drafters of the processes have other weights or options, or one did not come.
        """
        if self.config.backend != "distributed":
            return SINGLE_PROCESS
        backend = self.backend()
        assert isinstance(backend, DistributedBackend)  # as its name says
        options = {**named_options(self.config), **named_options(self.generation_config)}
        backend.processes.check_same({"drafter weights": weights_fingerprint(self), **options})
        return backend.processes

    @property
    def draft_settings(self) -> dict[str, Any]:
        """Settings besides weights that decide its drafts."""
        names = ("layer_groups", "backend", "draft_vocab_size")
        return {**(super().draft_settings or {}), **{name: getattr(self.config, name) for name in names}}
