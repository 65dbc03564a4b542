"""The buffers of texts that are decoded in fixed shapes, and the work repeated on them; kept from call to call."""

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, PreTrainedModel

from ..adapters import unwrapped
from ..drafting import FixedGenerator
from ..recurrent import FixedStates
from ..slot_cache import BUCKETS, NODE_BUCKETS, SlotCache, bucket
from .graph import MemoryPool, RepeatedWork, Trust
from .scoring import DeviceScoring

MOST_AHEAD = 4096  # tokens that get slots before they are written; longer texts grow
MOST_STATES = 2  # of a model, for calls of different numbers of rows
LEAST_DRAWS = 17  # whose noise is held: of a path of 16 nodes
MOST_SCORINGS = 4  # of a state, for calls with different processors


def shown_slots(num_tokens: int, num_nodes: int) -> int:
    """The slots that attention sees of a text of so many tokens with a tree of so many nodes behind it."""
    return BUCKETS.slots(num_tokens + bucket(num_nodes, NODE_BUCKETS))


def capacity_for(num_tokens: int, most_tokens: int) -> int:
    """The slots of a text that may get so many more, for trees behind it, too."""
    return BUCKETS.slots(min(most_tokens, num_tokens + MOST_AHEAD) + BUCKETS.least_slots // 2)


_SWITCHES = ("_active_adapter", "merged_adapters", "_disable_adapters", "scaling")  # of PEFT's layers


def weights_key(model: nn.Module) -> int:
    """What captured work depends on of a model: where its weights lie, its adapters, and kernels of attention."""
    facts: list[Any] = []
    for weight in (*model.parameters(), *model.buffers()):
        facts += (weight.data_ptr(), weight.dtype, weight.device)
    for part in map(vars, model.modules()):
        if "_active_adapter" in part:
            facts.append(repr(list(map(part.get, _SWITCHES))))
        if "config" in part:
            facts.append(getattr(part["config"], "_attn_implementation", None))
    return hash(tuple(facts))


class TreeBuffers:
    """What trees of a fixed number of nodes are read from, and what reading them gives."""

    @torch.inference_mode(False)
    def __init__(self, num_rows: int, num_nodes: int, device: torch.device) -> None:
        self.token_ids = torch.zeros(num_rows, num_nodes, dtype=torch.long, device=device)
        self.parents = torch.full_like(self.token_ids, -1)  # -1 at the root and at nodes that fill the tree up
        self.text_parents = torch.full_like(self.token_ids, -1)  # -1 at nodes that must not become text, too
        self.depths = torch.zeros_like(self.token_ids)
        self.logits: Any = None  # [rows, nodes, vocab]
        self.features: Any = None  # [rows, nodes, feature_dim]

    def give(self, token_ids: Tensor, parents: Tensor) -> None:
        """Copy a tree into the buffers, and fill it up with nodes that see the text and themselves."""
        num = token_ids.shape[1]
        self.token_ids[:, :num].copy_(token_ids)
        if num < self.parents.shape[1]:
            self.parents.fill_(-1)
        self.parents[:, :num].copy_(parents)

    @property
    def results(self) -> list[Tensor]:
        """What the newest forward gave."""
        return [self.logits] if self.features is None else [self.logits, self.features]

    def take(self, logits: Tensor, features: Tensor | None) -> None:
        """Copy what a forward gave."""
        with torch.inference_mode(False):
            if self.logits is None or self.logits.dtype != logits.dtype:
                self.logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
            if features is not None and (self.features is None or self.features.shape != features.shape):
                self.features = torch.empty(features.shape, dtype=features.dtype, device=features.device)

        self.logits.copy_(logits)
        if features is not None:
            self.features.copy_(features)


class StaticState:
    """All that outlives a call: the cache, the trees' buffers and the work on them, for a fixed number of rows."""

    @torch.inference_mode(False)
    def __init__(self, num_layers: int, offsets: Tensor, capacity: int) -> None:
        self.num_layers, self.num_rows, self.device = num_layers, offsets.shape[-2], offsets.device
        self.offsets = offsets.clone()  # [rows, 1] or [axes, rows, 1]: position id of a row's slot 0
        self.is_open = torch.ones(self.num_rows, 1, dtype=torch.bool, device=self.device)
        self.roots = torch.zeros(self.num_rows, 1, dtype=torch.long, device=self.device)

        self.cache = SlotCache(num_layers, self.num_rows, capacity, self.device)
        self.recurrent = FixedStates()
        self.trees: dict[int, TreeBuffers] = {}
        self.noise: Tensor | None = None  # [draws, rows, vocab] of the coming draws
        self.paths: dict[Any, Any] = {}  # buffers of accepted paths by depth
        self.scorings: list[DeviceScoring] = []  # of the processors of earlier calls, the newest last
        self.pool = MemoryPool()  # what crosses from one piece of work to another lies outside of it
        self._drafts: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()  # buffers of drafters
        self._done: torch.cuda.Event | None = None
        self._work: dict[tuple[Any, ...], RepeatedWork] = {}
        self.root_copies: dict[Any, RepeatedWork] = {}  # as `Draft.copies`, of drafts of the roots

    def work(self, key: Any, held: dict[Any, RepeatedWork] | None = None) -> RepeatedWork:
        """The work of this key, which the state holds unless a draft does."""
        held = self._work if held is None else held
        if key not in held:
            held[key] = RepeatedWork(self.device, pool=self.pool)
        return held[key]

    def scoring(self, processors: LogitsProcessorList, vocab_size: int) -> DeviceScoring:
        """The processors as work of fixed shape, from an earlier call with such processors where there was one."""
        found = next((each for each in self.scorings if each.fits(processors)), None)
        if found is None:
            found = DeviceScoring(processors, self.num_rows, vocab_size, self.device)
        self.scorings = [*(each for each in self.scorings if each is not found), found]
        for dropped in self.scorings[:-MOST_SCORINGS]:
            self._work = {key: work for key, work in self._work.items() if dropped not in key}
        self.scorings = self.scorings[-MOST_SCORINGS:]
        return found

    def enter(self, generator: FixedGenerator, drafter: Any, max_length: int, backend: str | None = None) -> None:
        """Let a generator go on in fixed shapes, with a backend compiled, in the buffers of such an earlier call."""
        old_key, buffers = self._drafts.get(drafter, (None, None))
        key, num_slots = (weights_key(drafter), backend), min(max_length, self.cache.capacity)
        most_kept = 1 + drafter.max_depth
        generator.backend = backend
        buffers = generator.enter_fixed(num_slots, most_kept, buffers if old_key == key else None)
        buffers.pool = self.pool
        self._drafts[drafter] = (key, buffers)

    def tree(self, num_nodes: int) -> TreeBuffers:
        """The buffers of the least bucket that holds so many nodes."""
        size = bucket(num_nodes, NODE_BUCKETS)
        if size not in self.trees:
            self.trees[size] = TreeBuffers(self.num_rows, size, self.device)
        return self.trees[size]

    def noise_of(self, num_draws: int, vocab_size: int) -> Tensor:
        """The noise `[draws, rows, vocab]` of so many coming draws or more; if it moves, what reads it goes."""
        num_held = 0 if self.noise is None else len(self.noise)
        if self.noise is None or num_held < num_draws:
            shape = (max(num_draws, 2 * num_held, LEAST_DRAWS), self.num_rows, vocab_size)
            with torch.inference_mode(False):
                larger = torch.ones(shape, dtype=torch.float, device=self.device)
            if self.noise is not None:
                larger[:num_held] = self.noise
            self.noise = larger
            self._work = {key: work for key, work in self._work.items() if key[0] != "accept"}
        return self.noise

    def reserve(self, num_nodes: int) -> None:
        """Make room for the recurrent states behind so many nodes; if they move, all is captured anew."""
        if self.recurrent.reserve(bucket(num_nodes, NODE_BUCKETS)):
            self._work = {}

    def forget(self, first: int, end: int) -> None:
        """Overwrite what nodes from number `first` on, up to `end`, left behind each text."""
        stale = self.cache.lengths + torch.arange(first, end, device=self.device)
        self.cache.forget(stale.clamp(max=self.cache.capacity - 1))

    def changed_by_keep(self, depth: int) -> list[Tensor]:
        """All that keeping paths of this depth changes. The host is asked where the texts end."""
        return [self.cache.lengths, *self.cache.behind(depth + 1), *self.recurrent.texts.values()]

    def keep(self, path: Tensor, num_kept: Tensor) -> None:
        """Keep of each row the first `num_kept` `[rows, 1]` nodes of `path` `[rows, depths]`."""
        self.cache.keep(path, num_kept)
        self.recurrent.keep(path, num_kept)

    def grow(self, capacity: int) -> None:
        """Make room for a longer text; what was captured is captured anew."""
        self._work = {}
        self.cache.grow(capacity)

    def free_work(self) -> None:
        """Free all but the cache; no call may go on in it."""
        self._work, self.trees, self.noise, self.paths, self.scorings = {}, {}, None, {}, []
        self._drafts.clear()
        torch.cuda.empty_cache()

    def done(self) -> None:
        """Note where the work of a call ends on its stream."""
        self._done = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def wait(self) -> None:
        """Let the present stream wait for the call before, which may have used another one."""
        if self._done is not None:
            torch.cuda.current_stream(self.device).wait_event(self._done)

    @property
    def all_work(self) -> list[RepeatedWork]:
        """The pieces of work that are held, those of drafters included."""
        of_drafters = [work for _, buffers in self._drafts.values() for work in buffers.repeated]
        return [*self._work.values(), *self.root_copies.values(), *of_drafters, *self.pool.joined]

    @property
    def failure(self) -> str | None:
        """Why some of the work could not be captured and runs as it is; None if all could."""
        return next((work.failure for work in self.all_work if work.failure is not None), None)


_STATES: WeakKeyDictionary[PreTrainedModel, dict[Any, StaticState]] = WeakKeyDictionary()
_TRUST: WeakKeyDictionary[PreTrainedModel, Trust] = WeakKeyDictionary()
_IN_USE: set[int] = set()  # ids of the models that decode in fixed shapes right now
_LOCK = threading.Lock()


def occupy(model: PreTrainedModel) -> bool:
    """Take a model for one call that decodes in fixed shapes; False while another call has it. `vacate` ends that."""
    with _LOCK:
        is_free = id(model) not in _IN_USE
        _IN_USE.add(id(model))
    return is_free


def vacate(model: PreTrainedModel) -> None:
    """Let other calls decode with the model in fixed shapes."""
    with _LOCK:
        _IN_USE.discard(id(model))


def state_of(model: PreTrainedModel, key: Any, capacity: int, make: Callable[[], StaticState]) -> StaticState:
    """The state of earlier calls with this key if it has the capacity, else a new one; the oldest are dropped."""
    with _LOCK:
        states = _STATES.setdefault(model, {})
        found = states.pop(key, None)

    if found is None or found.cache.capacity < capacity:
        found = None  # its memory may be needed
        found = make()
    with _LOCK:
        found.pool.trust = _TRUST.setdefault(model, Trust())
        states[key] = found
        while len(states) > MOST_STATES:
            del states[next(iter(states))]

    return found


def states_of(model: PreTrainedModel) -> list[StaticState]:
    """The states that are held of a model."""
    with _LOCK:
        return list(_STATES.get(model, {}).values())


def doubt_of(model: PreTrainedModel) -> str | None:
    """Why nothing of a model is captured any more, in words; None while no replay was wrong."""
    with _LOCK:
        return _TRUST.get(model, Trust()).doubt


def release(target: PreTrainedModel) -> None:
    """Free what captured steps keep of a target for later calls: caches, buffers and captured graphs.

    The next call makes them anew. A call that is running keeps its own until it ends. They also go with the target
    itself, so this is for programs that keep the target and need the memory for something else. PyTorch then has the
    memory for other tensors; `torch.cuda.empty_cache()` gives it to other programs.

    Args:
        target (`PreTrainedModel`): The model that generated, or the `PeftModel` around it.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM
    >>> from transformers_falcon_spec import FalconSpecDrafter
    >>> target = AutoModelForCausalLM.from_pretrained("models/reference-target")
    >>> drafter = FalconSpecDrafter.from_pretrained("models/falcon-reference")
    >>> drafter.generation_config.capture = True
    >>> text = target.generate(torch.tensor([[1, 2, 3]]), assistant_model=drafter, max_new_tokens=8)
    >>> len(states_of(target))
    1
    >>> release(target)
    >>> len(states_of(target))
    0

    ```
    """
    with _LOCK:
        for held in (_STATES, _TRUST):
            held.pop(unwrapped(target), None)
