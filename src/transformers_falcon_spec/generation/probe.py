"""Finds out whether a target can read trees, by a few tiny forwards of the model itself."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from ..core.tree import DraftTree
from ..errors import TargetError
from ..transformers_versions import CACHE
from .adapters import RowAdapters
from .cache import new_cache
from .model_parts import device_of
from .modes import check_target_mode
from .target import Form, Target
from .text_limits import frequencies_kept

_PROMPT_LEN = 6
_TREE = [-1, *[0] * 12, *[12] * 12]  # parents; each level's last node leads on
_PATH = [0, 12, 24]  # slots far from its positions: even attention biased a little by slot reads it wrong
_TOLERANCE = 0.1  # of the error of a reading with a wrong mask
_PROBED: WeakKeyDictionary[PreTrainedModel, dict[tuple[str, ...], "Capability"]] = WeakKeyDictionary()
_FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, TargetError)


@dataclass(frozen=True)
class Capability:
    """How a target reads drafts rightly. Errors are the largest differences from plain logits."""

    form: Form  # the best way to read a draft
    tree_error: float
    control_error: float  # the same reading with a wrong mask
    reason: str = ""
    has_hooks: bool = True  # False where hooks may not fire, as in a compiled target
    head_fault: str = ""  # why drafters cannot use the head, in a sentence


def probe(model: PreTrainedModel) -> Capability:
    """The forms in which `model` reads drafts rightly, by comparison with plain forwards; kept. None is an error."""
    key = (str(model.config._attn_implementation), str(model.dtype), str(model.device), str(_is_compiled(model)))
    known = _PROBED.setdefault(model, {})
    if key not in known:
        check_target_mode(model)  # the answer holds for eval mode
        with RowAdapters(model).suspended(), frequencies_kept(model):  # the rows are not those of the call
            known[key] = _probe(model)
    return known[key]


@torch.no_grad()
def reads_masks(model: PreTrainedModel) -> bool:
    """Whether the attention reads masks: a node's logits must change with its parent."""
    prompt, nodes = _ids(model, 4).split([_PROMPT_LEN, 4], dim=-1)
    one, other = (_logits(model, prompt, nodes, [_Read([0, 1, 2, 3], [-1, 0, 0, parent], [3])]) for parent in (1, 2))
    return not torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@dataclass(frozen=True)
class _Read:
    """One forward over a tree of tokens, after which its first path is kept."""

    tokens: list[int]  # indices into the ids that are read
    parents: list[int]
    compared: list[int]  # nodes whose logits are compared
    kept: Sequence[int] = (0,)


_ALL = list(range(len(_TREE)))
_TREE_READS = [_Read(_ALL, _TREE, _PATH, _PATH), _Read([0], [-1], [0])]  # the path, and the root after it
_WRONG_READS = [_Read(_ALL, [node - 1 for node in _ALL], _PATH)]  # as if the nodes were a chain
_CHAIN_READS = [_Read(_PATH, [-1, 0, 1], [0]), _Read(_PATH[1:], [-1, 0], [0, 1])]  # two tokens are taken back


@torch.no_grad()
def _probe(model: PreTrainedModel) -> Capability:
    if model._is_stateful:  # a state that happens to forget quickly would pass
        raise TargetError(f"{_refusal(model)} It keeps a recurrent state, which cannot take back rejected drafts.")
    prompt, nodes = _ids(model, len(_TREE)).split([_PROMPT_LEN, len(_TREE)], dim=-1)
    text = torch.cat([prompt, nodes[:, [*_PATH, 0]]], dim=-1)
    plain = model(input_ids=text, use_cache=False, return_dict=True).logits.float()[:, _PROMPT_LEN:]
    has_hooks = not _is_compiled(model)
    head_fault = _head_fault(model, prompt, has_hooks)

    def error(reads: list[_Read], form: Form) -> tuple[float, Exception | None]:
        try:
            logits = _logits(model, prompt, nodes, reads, form)
        except _FAILURES as failure:
            return inf, failure
        return (logits - plain[:, : logits.shape[1]]).abs().max().item(), None

    (tree_error, failure), (control_error, other) = error(_TREE_READS, "tree"), error(_WRONG_READS, "tree")
    reason = f"a tree's logits are off by {tree_error:.2g}, those of a wrong mask by {control_error:.2g}"
    if failure or other:
        tree_error, control_error, reason = inf, 0.0, f"reading a tree failed: {failure or other}"
    if tree_error <= _TOLERANCE * control_error:
        return Capability("tree", tree_error, control_error, has_hooks=has_hooks, head_fault=head_fault)
    chain_error, failure = error(_CHAIN_READS, "chain")
    if failure:
        raise TargetError(f"{_refusal(model)} Reading a chain failed: {failure}") from failure
    allowed = 1e-2 * max(float(plain.std()), control_error * _TOLERANCE)
    if chain_error > allowed:
        raise TargetError(f"{_refusal(model)} Even a chain's logits are off by {chain_error:.2g}; {reason}.")
    form: Form = "paths" if error(_TREE_READS, "paths")[0] <= allowed else "chain"
    return Capability(form, tree_error, control_error, reason, has_hooks, head_fault)


def _ids(model: PreTrainedModel, num_nodes: int) -> Tensor:
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    return ((torch.arange(_PROMPT_LEN + num_nodes, device=device_of(model)) * 7 + 3) % vocab_size)[None]


def _logits(model: PreTrainedModel, prompt: Tensor, nodes: Tensor, reads: list[_Read], form: Form = "tree") -> Tensor:
    """The logits of the nodes that are compared, of trees that are read one after another behind the prompt."""
    target, found = _prefilled(model, prompt), []
    for read in reads:
        parents = torch.tensor([read.parents], device=prompt.device)
        tree = DraftTree(parents, torch.zeros_like(parents))
        found.append(target.read(nodes[:, read.tokens], tree, form).logits.float()[:, read.compared])
        target.keep(len(tree), [read.kept])
    return torch.cat(found, dim=1)


def _is_compiled(model: PreTrainedModel) -> bool:
    """Whether some graphs of the model may have been made without our hooks, so that those never fire in them."""
    return model._compiled_call_impl is not None or hasattr(model.forward, "_torchdynamo_orig_callable")


def _refusal(model: PreTrainedModel) -> str:
    return f"`{type(model).__name__}` cannot verify drafts: generate without `assistant_model`."


def _prefilled(model: PreTrainedModel, prompt: Tensor) -> Target:
    target = Target(model, ())
    kwargs = {CACHE: new_cache(model.config), "use_cache": True, "attention_mask": torch.ones_like(prompt)}
    if "position_ids" in inspect.signature(model.forward).parameters:  # as `generate` does
        kwargs["position_ids"] = model._prepare_position_ids_for_generation(prompt, kwargs)
    target.prefill(prompt, GenerationConfig(), kwargs)
    return target


def _head_fault(model: PreTrainedModel, prompt: Tensor, has_hooks: bool) -> str:
    """Why `Target.head` of the features does not give the model's own logits, in a sentence; empty where it does."""
    try:
        target = Target(model, (-1,), has_hooks)
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
