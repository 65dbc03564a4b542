"""Finds out whether a target can read trees, by a few tiny forwards of the model itself."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from ..core.tree import DraftTree
from ..errors import TargetError
from .adapters import RowAdapters
from .cache import new_cache
from .modes import check_target_mode
from .target import Form, Target

_TREE = DraftTree.from_lists([-1, *[0] * 12, *[12] * 12])  # each level's last node leads on
_PATH = (0, 12, 24)  # slots far from its positions: even attention biased a little by slot reads it wrong
_TOLERANCE = 0.1  # of the error of a reading with a wrong mask
_PROBED: WeakKeyDictionary[PreTrainedModel, dict[tuple[str, ...], "Capability"]] = WeakKeyDictionary()
_FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, TargetError)


@dataclass(frozen=True)
class Capability:
    """The forms in which a target reads drafts rightly. Errors are the largest differences from plain logits."""

    can_tree: bool
    tree_error: float
    control_error: float  # the same reading with a wrong mask
    reason: str = ""
    has_hooks: bool = True  # False where hooks may not fire, as in a compiled target
    can_paths: bool = False  # a tree as one row for each of its paths; not tried where trees are read

    @property
    def form(self) -> Form:
        """The best way to read a draft."""
        return "tree" if self.can_tree else "paths" if self.can_paths else "chain"


def probe(model: PreTrainedModel) -> Capability:
    """The forms in which `model` can read drafts, found by comparing a small tree with plain forwards; kept per model.

    A model that does not even read chains rightly, is recurrent, or whose head cannot be reproduced raises an error.
    """
    key = (str(model.config._attn_implementation), str(model.dtype), str(model.device), str(_is_compiled(model)))
    known = _PROBED.setdefault(model, {})
    if key not in known:
        check_target_mode(model)  # the answer holds for eval mode
        with RowAdapters(model).suspended():  # the rows are not those of the call
            known[key] = _probe(model)
    return known[key]


@torch.no_grad()
def reads_masks(model: PreTrainedModel) -> bool:
    """Whether the attention reads masks: a node's logits must change with its parent."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = ((torch.arange(10, device=model.device) * 7 + 3) % vocab_size)[None]
    readings = []
    for parent in (1, 2):
        tree = _on(DraftTree.from_lists([-1, 0, 0, parent]), model.device)
        readings.append(_prefilled(model, ids[:, :6]).read(ids[:, 6:], tree).logits.float()[:, -1])
    return not torch.allclose(readings[0], readings[1], rtol=1e-4, atol=1e-6)


@torch.no_grad()
def _probe(model: PreTrainedModel) -> Capability:
    if model._is_stateful:  # a state that happens to forget quickly would pass
        raise TargetError(f"{_refusal(model)} It keeps a recurrent state, which cannot take back rejected drafts.")
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = ((torch.arange(6 + len(_TREE), device=model.device) * 7 + 3) % vocab_size)[None]
    prompt, nodes = ids[:, :6], ids[:, 6:]
    tree = _on(_TREE, model.device)
    path_ids = nodes[:, list(_PATH)]
    text = torch.cat([prompt, path_ids, nodes[:, :1]], dim=-1)
    logits = model(input_ids=text, use_cache=False, return_dict=True).logits
    plain = logits.float()[:, 6:]  # of the path, then one more token
    has_hooks = _check_head(model, prompt)
    try:
        tree_error = _tree_error(model, prompt, nodes, tree, plain)
        control_error = _control_error(model, prompt, nodes, plain)
    except _FAILURES as error:
        tree_error, control_error, reason = float("inf"), 0.0, f"reading a tree failed: {error}"
    else:
        reason = f"a tree's logits are off by {tree_error:.2g}, those of a wrong mask by {control_error:.2g}"
    if tree_error <= _TOLERANCE * control_error:
        return Capability(True, tree_error, control_error, has_hooks=has_hooks)
    try:
        chain_error = _chain_error(model, prompt, path_ids, plain)
    except _FAILURES as error:
        raise TargetError(f"{_refusal(model)} Reading a chain failed: {error}") from error
    allowed = 1e-2 * max(float(plain.std()), control_error * _TOLERANCE)
    if chain_error > allowed:
        raise TargetError(f"{_refusal(model)} Even a chain's logits are off by {chain_error:.2g}; {reason}.")
    try:
        can_paths = _tree_error(model, prompt, nodes, tree, plain, "paths") <= allowed
    except _FAILURES:
        can_paths = False  # the chain remains
    return Capability(False, tree_error, control_error, reason, has_hooks, can_paths)


def _is_compiled(model: PreTrainedModel) -> bool:
    """Whether some graphs of the model may have been made without our hooks, so that those never fire in them."""
    return model._compiled_call_impl is not None or hasattr(model.forward, "_torchdynamo_orig_callable")


def _on(tree: DraftTree, device: torch.device) -> DraftTree:
    return DraftTree(tree.parents.to(device), tree.ranks.to(device))


def _refusal(model: PreTrainedModel) -> str:
    return f"`{type(model).__name__}` cannot verify drafts: generate without `assistant_model`."


def _prefilled(model: PreTrainedModel, prompt: Tensor) -> Target:
    target = Target(model, ())
    kwargs = {"past_key_values": new_cache(model.config), "use_cache": True, "attention_mask": torch.ones_like(prompt)}
    target.prefill(prompt, GenerationConfig(), kwargs)
    return target


def _tree_error(
    model: PreTrainedModel, prompt: Tensor, nodes: Tensor, tree: DraftTree, plain: Tensor, form: Form = "tree"
) -> float:
    """Error of a tree reading and of the root after it."""
    target = _prefilled(model, prompt)
    logits = target.read(nodes, tree, form).logits.float()[:, list(_PATH)]
    target.keep(len(tree), [_PATH])
    root = DraftTree(tree.parents[:, :1], tree.ranks[:, :1])
    after = target.read(nodes[:, :1], root, form).logits.float()
    return (torch.cat([logits, after], dim=1) - plain).abs().max().item()


def _control_error(model: PreTrainedModel, prompt: Tensor, nodes: Tensor, plain: Tensor) -> float:
    """Error of the same nodes read as if they were a chain."""
    chain = _on(DraftTree.chain(nodes.shape[1] - 1), nodes.device)
    wrong = _prefilled(model, prompt).read(nodes, chain).logits.float()[:, list(_PATH)]
    return (wrong - plain[:, : len(_PATH)]).abs().max().item()


def _chain_error(model: PreTrainedModel, prompt: Tensor, path_ids: Tensor, plain: Tensor) -> float:
    """Error of a chain reading, and of reading on after its last two tokens were taken back."""
    target = _prefilled(model, prompt)
    chain = _on(DraftTree.chain(path_ids.shape[1] - 1), path_ids.device)
    first = target.read(path_ids, chain, form="chain").logits.float()
    target.keep(len(chain), [(0,)])
    rest = DraftTree(chain.parents[:, :2], chain.ranks[:, :2])
    second = target.read(path_ids[:, 1:], rest, form="chain").logits.float()
    reading = torch.cat([first[:, :1], second], dim=1)
    return (reading - plain[:, : path_ids.shape[1]]).abs().max().item()


def _check_head(model: PreTrainedModel, prompt: Tensor) -> bool:
    """`Target.head` of the features must give the model's own logits. Returns whether hooks catch the features."""
    has_hooks = not _is_compiled(model)
    target = Target(model, (-1,), has_hooks)
    with target.feature_hooks.active():
        outputs = model(input_ids=prompt, use_cache=False, return_dict=True, output_hidden_states=not has_hooks)
        features = target.features(outputs, prompt.shape[1])
    assert features is not None  # one layer is read
    logits = outputs.logits.float()
    error = (target.head(features) - logits).abs().max().item()
    if error > 1e-2 * max(logits.abs().max().item(), 1e-6):
        raise TargetError(
            f"The logits of `{type(model).__name__}` cannot be rebuilt from the input of its head (off by "
            f"{error:.2g}): it scales or caps them in a way this version does not know. Please report the model."
        )
    return has_hooks
