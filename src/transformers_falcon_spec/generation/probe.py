"""Finds out whether a target can read trees, by a few tiny forwards of the model itself."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import inf, isnan
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from ..core.rounding import explained
from ..core.tree import DraftTree
from ..errors import GenerationError, TargetError
from ..transformers_versions import CACHE
from .adapters import RowAdapters, check_target_adapter
from .inputs import grown
from .model_parts import check_has_weights, check_takes_back, cuda_devices, device_of, named
from .modes import check_target_mode
from .stock_cache import new_cache
from .target import Form, Target
from .target_look import TargetLook, look_at
from .text_limits import frequencies_kept, num_tabled

_PROMPT_LEN = 6  # or less, where the target has few positions
_TREE = [-1, *[0] * 12, *[12] * 12]  # parents; each level's last node leads on
_PATH = [0, 12, 24]  # slots far from its positions: even attention biased a little by slot reads it wrong
_NUM_PLAIN = len(_PATH) + 1  # tokens that are read one by one: the path, and its root once more
_SHARE_OF_CONTROL = 0.1  # what a tree may be off by, of the error of a reading with a wrong mask
_NUM_TEXTS = 3  # that are read until one is read rightly: a rounding may send a token to another expert
_MOST_KEPT = 8  # answers for each target, as for adapters that take turns
_PROBED: WeakKeyDictionary[PreTrainedModel, dict[tuple[int, bool], "Capability"]] = WeakKeyDictionary()
_FAILURES = (
    *(RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NameError, AssertionError),
    TargetError,
)


@dataclass(frozen=True)
class Capability:
    """How a target reads drafts rightly. Errors are the largest differences from logits of plain decoding."""

    form: Form  # the best way to read a draft
    batch_form: Form = "tree"  # that of several rows
    tree_error: float = inf
    chain_error: float = inf  # not measured where trees are read rightly
    control_error: float = 0.0  # of a tree that is read with a wrong mask
    reason: str = ""
    has_hooks: bool = True  # False where hooks may not fire, as in a compiled target
    head_fault: str = ""  # why drafters cannot use the head, in a sentence

    @property
    def error(self) -> float:
        """That of the best form."""
        return self.tree_error if self.form == "tree" else self.chain_error


def probe(
    model: PreTrainedModel, reader: str = "", look: TargetLook | None = None, is_padded: bool = False
) -> Capability:
    """The best form in which `model` reads drafts as plain decoding reads text, found by reading a few tokens.

    Texts behind padding are asked about by themselves, as a target may count it (Bart) or read it (GIT).

    The answer is kept for what the model is made of now. Where hooks of the caller may do anything at any time, each
    call asks anew; and where a `reader`, as a processor of the caller, may look at what they keep, nothing is drafted.
    """
    look = look or look_at(model)
    if look.foreign and reader:
        return Capability("plain", "plain", reason=f"{reader} may look at what {look.foreign} keeps of each token")

    known = _PROBED.setdefault(model, {})
    if look.foreign or (look.key, is_padded) not in known:
        check_target_mode(model)  # the answer holds for eval mode
        with (
            RowAdapters(model).suspended(),  # the rows are not those of the call
            frequencies_kept(model),
            torch.random.fork_rng(cuda_devices(model)),
        ):
            capability = _probe(model, look.rounding, is_padded)

        if look.foreign:
            return capability

        look = look_at(model)  # forwards may have made what they keep
        known[look.key, is_padded] = capability
        if len(known) > _MOST_KEPT:
            del known[next(iter(known))]

    return known[look.key, is_padded]


@torch.no_grad()
def reads_masks(model: PreTrainedModel) -> bool:
    """Whether the attention reads masks: a node's logits must change with its parent."""
    prompt_len = min(_PROMPT_LEN, num_tabled(model) - _NUM_PLAIN)
    prompt, nodes = _ids(model, prompt_len + 4).split([prompt_len, 4], dim=-1)
    one, other = (_logits(model, prompt, nodes, [_Read([0, 1, 2, 3], [-1, 0, 0, parent], [3])]) for parent in (1, 2))
    return not torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@dataclass(frozen=True)
class _Read:
    """One forward over a tree of tokens, after which its first path is kept."""

    tokens: list[int]  # indices into the ids that are read
    parents: list[int]
    compared: list[int]  # nodes whose logits are compared
    kept: Sequence[int] = (0,)


_ROOT = _Read([0], [-1], [0])


def _reads_of(form: Form, num_fitting: int) -> list[_Read]:
    """What is read in a form behind the prompt, where so many tokens fit.

    A tree is no deeper than its path, and fits wherever that does.
    """
    if form == "plain":
        return [_Read([node], [-1], [0]) for node in _PATH]

    nodes = list(range(len(_TREE)))
    if form != "chain":
        return [_Read(nodes, _TREE, _PATH, _PATH), _ROOT]  # the path, and the root after it

    chain = [*_PATH, *(node for node in nodes if node not in _PATH)][:num_fitting]
    parents = [place - 1 for place in range(len(chain))]
    return [  # all but one token is taken back, then all but two
        _Read(chain, parents, [0]),
        _Read(chain[1:], parents[:-1], [0, 1], (0, 1)),
        _ROOT,
    ]


def _wrong_tree() -> list[_Read]:
    """The tree as if its first nodes were a chain, and all others children of its end."""
    nodes = list(range(len(_TREE)))
    return [_Read(nodes, [min(node, _NUM_PLAIN - 1) - 1 for node in nodes], _PATH)]


@dataclass(frozen=True)
class _Found:
    """What a reading of a text is off by, and what it may be off by."""

    error: float
    allowed: float
    failure: Exception | None = None

    @property
    def is_right(self) -> bool:
        """Whether rounding explains the error."""
        return self.error <= self.allowed


class _Text:
    """A few tokens, and the logits with which plain decoding goes on after each."""

    def __init__(self, model: PreTrainedModel, rounding: float, number: int, is_padded: bool) -> None:
        self.model, self.is_padded = model, is_padded
        num_positions = num_tabled(model)
        prompt_len = min(_PROMPT_LEN, num_positions - _NUM_PLAIN)
        self.num_fitting = min(num_positions - prompt_len, len(_TREE))
        self.prompt, self.nodes = _ids(model, prompt_len + len(_TREE), number).tensor_split([prompt_len], dim=-1)
        self.plain = _plain_logits(model, self.prompt, self.nodes[:, [*_PATH, 0]], is_padded)

        middle = self.plain.quantile(0.5, dim=-1, interpolation="lower")  # CUDA has no deterministic `median`
        largest = torch.maximum(self.plain.amax(-1), middle.abs()).max()  # some mask a few logits
        self.allowed = explained(rounding, largest.item())

    def read(self, form: Form) -> _Found:
        """Read the text in a form."""
        allowed = self.allowed
        try:
            if form == "tree":
                allowed = min(allowed, _SHARE_OF_CONTROL * self.control_error)
            return _Found(self._error(_reads_of(form, self.num_fitting), form), allowed)
        except _FAILURES as failure:
            return _Found(inf, allowed, failure)

    @cached_property
    def control_error(self) -> float:
        """What a tree is off by that is read with a wrong mask."""
        return self._error(_wrong_tree(), "tree")

    def read_rows(self) -> _Found:
        """Read two rows that keep different numbers of the tokens that they read together."""
        chain = torch.tensor([[-1, 0, 1]], device=self.prompt.device)
        try:
            target = _prefilled(self.model, self.prompt.repeat(2, 1), "chain", self.is_padded)
            target.read(self.nodes[:, _PATH].repeat(2, 1), DraftTree(chain, torch.zeros_like(chain)), "chain")
            target.keep(len(_PATH), [(0,), (0, 1)])
            roots = self.nodes[0, _PATH[1:], None]
            read = target.read(roots, DraftTree(chain[:, :1], torch.zeros_like(chain[:, :1])), "chain")
        except (*_FAILURES, GenerationError) as failure:
            return _Found(inf, self.allowed, failure)

        return _Found(_difference(read.logits[:, 0].float(), self.plain[0, 1 : len(_PATH)]), self.allowed)

    def is_changed_by(self, other: "_Text") -> bool:
        """Whether a row is read otherwise beside another one, as where all rows are rounded together."""
        try:
            target = _prefilled(self.model, torch.cat([self.prompt, other.prompt]), "plain", self.is_padded)
        except GenerationError:  # which batches are told of themselves
            return False
        root = torch.tensor([[-1]], device=self.prompt.device)
        read = target.read(self.nodes[:, :1].repeat(2, 1), DraftTree(root, torch.zeros_like(root)), "plain")
        return not _difference(read.logits[0, 0].float(), self.plain[0, 0]) <= self.allowed

    def _error(self, reads: list[_Read], form: Form) -> float:
        logits = _logits(self.model, self.prompt, self.nodes, reads, form, self.is_padded)
        return _difference(logits, self.plain[:, : logits.shape[1]])


def _difference(logits: Tensor, plain: Tensor) -> float:
    """The largest difference; both may be infinite where they are the same."""
    return (logits - plain).where(logits != plain, 0).abs().max().item()


def _found(texts: Callable[[int], _Text], form: Form) -> _Found:
    """What the first text shows that is read rightly in a form, else the very first one."""
    first = texts(0).read(form)
    found = first
    for number in range(1, _NUM_TEXTS):
        if found.is_right or found.failure is not None:
            break
        found = texts(number).read(form)
    return found if found.is_right else first


@torch.no_grad()
def _probe(model: PreTrainedModel, rounding: float, is_padded: bool) -> Capability:
    num_positions = num_tabled(model)
    if num_positions <= _NUM_PLAIN:
        raise TargetError(
            f"{_refusal(model)} It has positions for {num_positions} tokens, and trying it takes {_NUM_PLAIN + 1}."
        )

    @cache
    def texts(number: int) -> _Text:  # made when it is asked for
        return _Text(model, rounding, number, is_padded)

    try:
        tree = _found(texts, "tree")
    except NameError as failure:  # a slip in code of the target, which shorter texts do not reach
        raise TargetError(f"{_refusal(model)} Reading {_PROMPT_LEN} tokens and more fails: {failure}.") from failure

    form: Form = "tree"
    batch_form: Form = "tree"
    control_error = 0.0 if tree.failure else texts(0).control_error
    chain_error = inf
    reason = ""
    if not tree.is_right:
        plain = _found(texts, "plain")
        if is_padded and isnan(plain.error):  # plain decoding makes no numbers of it that could be compared
            return _probe(model, rounding, is_padded=False)
        if not plain.is_right:
            why = plain.failure or f"its logits differ by {plain.error:.2g}"
            raise TargetError(f"{_refusal(model)} Read twice one token at a time, {why}.")

        chain = _found(texts, "chain")
        chain_error = chain.error
        reason = _reason(chain, tree, control_error)
        form = batch_form = "plain"
        if chain.is_right:
            form = "paths" if _found(texts, "paths").is_right else "chain"
            batch_form = "chain" if texts(0).read_rows().is_right else "plain"

    # graphs of a compiled model may have been made without our hooks, so that those never fire in them
    has_hooks = model._compiled_call_impl is None and not hasattr(model.forward, "_torchdynamo_orig_callable")
    head_fault = "" if form == "plain" else _head_fault(model, texts(0).prompt, has_hooks)
    if form == "plain" and texts(0).is_changed_by(texts(1)):
        reason += "; rows of a batch change one another, so a text may differ once another one has ended"
    return Capability(form, batch_form, tree.error, chain_error, control_error, reason, has_hooks, head_fault)


def _reason(chain: _Found, tree: _Found, control_error: float) -> str:
    """Why a target reads no trees, and where that is so, no chains."""
    reason = f"a tree's logits are off by {tree.error:.2g}, those of a wrong mask by {control_error:.2g}"
    if tree.failure is not None:
        reason = f"reading a tree failed: {tree.failure}"
    if chain.failure is not None:
        reason = f"reading a chain failed: {chain.failure}; {reason}"
    elif not chain.is_right:
        reason = f"even a chain's logits are off by {chain.error:.2g}; {reason}"
    return f"{reason}; rounding explains {chain.allowed:.2g}"


def _ids(model: PreTrainedModel, num_tokens: int, number: int = 0) -> Tensor:
    """The ids of one of a few texts."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(num_tokens, device=device_of(model)) * 7 + 11 * number + 3
    return (ids % vocab_size)[None]


def _plain_logits(model: Any, prompt: Tensor, tokens: Tensor, is_padded: bool) -> Tensor:
    """The logits after each of the tokens, read one by one with the calls that plain decoding makes."""
    model_kwargs = _prompt_kwargs(model, prompt, DynamicCache(config=model.config), is_padded)
    outputs = model._prefill(prompt, GenerationConfig(), model_kwargs, is_first_iteration=True)
    text = prompt
    found = []
    for token in tokens.split(1, dim=-1):
        model_kwargs = grown(model, outputs, model_kwargs)
        text = torch.cat([text, token], dim=-1)
        inputs = model.prepare_inputs_for_generation(text, next_sequence_length=1, **model_kwargs)
        outputs = model(**inputs, return_dict=True)
        found.append(outputs.logits[:, -1:].float())

    return torch.cat(found, dim=1)


def _logits(
    model: PreTrainedModel,
    prompt: Tensor,
    nodes: Tensor,
    reads: list[_Read],
    form: Form = "tree",
    is_padded: bool = False,
) -> Tensor:
    """The logits of the nodes that are compared, of trees that are read one after another behind the prompt."""
    target, found = _prefilled(model, prompt, form, is_padded), []
    for read in reads:
        parents = torch.tensor([read.parents], device=prompt.device)
        tree = DraftTree(parents, torch.zeros_like(parents))
        found.append(target.read(nodes[:, read.tokens], tree, form).logits.float()[:, read.compared])
        target.keep(len(tree), [read.kept])
    return torch.cat(found, dim=1)


def _refusal(model: PreTrainedModel) -> str:
    return f"`{type(model).__name__}` cannot verify drafts: generate without `assistant_model`."


def _prefilled(model: PreTrainedModel, prompt: Tensor, form: Form = "tree", is_padded: bool = False) -> Target:
    target = Target(model, (), form)
    config = GenerationConfig(max_length=prompt.shape[1] + len(_TREE))
    target.prefill(prompt, config, _prompt_kwargs(model, prompt, new_cache(model.config), is_padded))
    target.move_to_slots(config.max_length)
    return target


def _prompt_kwargs(model: Any, prompt: Tensor, cache: DynamicCache, is_padded: bool) -> dict[str, Any]:
    mask = torch.ones_like(prompt)
    mask[:, : is_padded * prompt.shape[1] // 2] = 0
    kwargs = {CACHE: cache, "use_cache": True, "attention_mask": mask}
    if "position_ids" in inspect.signature(model.forward).parameters:  # as `generate` does
        kwargs["position_ids"] = model._prepare_position_ids_for_generation(prompt, kwargs)
    return kwargs


def _head_fault(model: PreTrainedModel, prompt: Tensor, has_hooks: bool) -> str:
    """Why `Target.head` of the features does not give the model's own logits, in a sentence; empty where it does."""
    try:
        target = Target(model, (-1,), has_hooks=has_hooks)
        with target.feature_hooks.active():
            outputs = model(input_ids=prompt, use_cache=False, return_dict=True, output_hidden_states=not has_hooks)
            features = target.features(outputs, prompt.shape[1])

        assert features is not None  # one layer is read
        logits = outputs.logits.float()
        error = (target.head(features) - logits).abs().max().item()
    except _FAILURES as failure:
        return f"reading its last hidden state failed: {failure}"

    if error <= 1e-2 * max(logits.abs().max().item(), 1e-6):
        return ""

    return f"what its last hidden state gives is off by {error:.2g}"


def check_target(model: PreTrainedModel) -> Capability:
    """How a target reads drafts, found by a few tiny forwards and kept; for commands, before work of hours.

    Raises:
        [`GenerationError`]: a target of its kind, or set up as it is, cannot take back rejected drafts.
        [`TargetError`]: it reads no drafts as it reads text, so that calls with a drafter draft nothing.
    """
    check_kind(model)
    capability = probe(model)
    if capability.form == "plain":
        culprit = "the target" if model._is_stateful else "a hook, or activations quantised together"
        raise TargetError(
            f"{named(model)} cannot verify drafts, so it reads one token at a time: {capability.reason}. Remove "
            f"or replace what makes it read several tokens otherwise: {culprit}."
        )

    return capability


def check_kind(model: PreTrainedModel) -> None:
    """Refuse a target that cannot be drafted for, by what is known without a forward: [`GenerationError`]."""
    check_takes_back(model)
    check_target_adapter(model)
    check_has_weights(model)

    parts = (model.config, model.config.get_text_config(decoder=True))
    if not all(part.return_dict for part in parts):
        raise GenerationError(
            "Speculative decoding reads the target's outputs by name, so `return_dict` of its config must be True, "
            "but it is False. Set `target.config.return_dict = target.config.get_text_config().return_dict = True`."
        )
