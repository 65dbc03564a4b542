"""Recurrent layers of a target: a state holds all tokens that were read, so every node of a draft needs its own.

The *mixers*, which are the modules that update states, read a draft level by level: each node goes on from the state
of its parent, with the forward of one token that plain decoding makes. All other modules read the whole draft at
once. The states of the nodes stand beside the cache until a path is kept; the cache then holds those of its last node.
"""

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..core.tree import DraftTree
from ..errors import TargetError
from .stock_cache import is_recurrent

_STATES = ("conv_states", "recurrent_states")

States = dict[tuple[str, int], Tensor]  # of one layer, by name and number: [rows, ...]
Key = tuple[int, str, int]  # of a state: its layer, and there its name and number


def states_of(layer: Any) -> States:
    """The states that a layer of a cache holds now; none if it is not recurrent."""
    found = {}
    for name in _STATES:
        for number, state in getattr(layer, name, {}).items():
            if state is not None:
                found[name, number] = state
    return found


def put_states(layer: Any, states: States) -> None:
    """Let a layer of a cache hold these states."""
    for (name, number), state in states.items():
        getattr(layer, name)[number] = state


class StatesAside:
    """A copy of the recurrent states that a cache holds."""

    def __init__(self, cache: Any) -> None:
        self._layers = list(filter(is_recurrent, cache.layers))
        self._copies = [{key: state.clone() for key, state in states_of(layer).items()} for layer in self._layers]
        self._has_previous = [dict(layer.has_previous_state) for layer in self._layers]

    def put_back(self) -> None:
        """Let the cache hold them again; states that were not there are begun anew by the next forward."""
        for layer, copies, has_previous in zip(self._layers, self._copies, self._has_previous, strict=True):
            held = states_of(layer)
            for key, copy in copies.items():
                held[key].copy_(copy)
            layer.has_previous_state.update(has_previous)


class NodesInOrder:
    """The nodes of a draft one after another; a mixer reads the same node of all rows as one batch.

    Whose child a node is need not be known, so that the shapes of what is read are fixed.
    """

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes

    def __len__(self) -> int:
        """Levels, of which each is read at once."""
        return self.num_nodes

    def inputs(self, value: Any, level: int) -> Any:
        """The part of a mixer's inputs that belongs to the nodes of a level, each as a row of one token."""
        if isinstance(value, tuple | list):
            return type(value)(self.inputs(each, level) for each in value)
        if isinstance(value, dict):
            return {name: self.inputs(each, level) for name, each in value.items()}
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if value.dim() == 1:
            return value[level : level + 1] if len(value) == self.num_nodes else value
        if value.shape[1] != self.num_nodes:
            return value
        return self._of_level(value, level)

    def outputs(self, values: Sequence[Any]) -> Any:
        """A mixer's outputs `[rows, nodes, ...]` from those of each level `[rows x width, 1, ...]`."""
        first = values[0]
        if isinstance(first, tuple | list):
            return type(first)(map(self.outputs, zip(*values, strict=True)))
        if not isinstance(first, Tensor):
            return first
        return self._joined(values)

    def _of_level(self, value: Tensor, level: int) -> Tensor:
        return value[:, level : level + 1]

    def _joined(self, values: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(values), dim=1)


class TreeLevels(NodesInOrder):
    """The nodes of a draft by their depth; a mixer reads those of one depth in all rows as one batch.

    A row with fewer nodes of a depth than others repeats one. Fillers are left out.
    """

    def __init__(self, tree: DraftTree, num_rows: int) -> None:
        super().__init__(len(tree))
        parents_of = tree.parents.tolist()
        if len(parents_of) < num_rows:
            parents_of *= num_rows
        by_depth = [_nodes_by_depth(parents) for parents in parents_of]
        self.num_rows = num_rows
        self.places: list[dict[int, tuple[int, int]]] = [{} for _ in by_depth]  # of a row's nodes: level, place in it
        self.parents: list[Tensor] = []  # of each level [rows x width]: their places in the level before
        self._nodes: list[Tensor] = []  # of each level [rows, width]
        columns = [[0] * self.num_nodes for _ in by_depth]  # of each row's nodes in the outputs of all levels
        num_columns = 0

        for level in range(max(map(len, by_depth))):
            rows = [levels[level] if level < len(levels) else [] for levels in by_depth]
            width = max(map(len, rows))
            nodes, parents = [], []
            for row, own in enumerate(rows):
                for column, node in enumerate(own):
                    self.places[row][node] = (level, row * width + column)
                    columns[row][node] = num_columns + column
                padded = own + (own[:1] or [0]) * (width - len(own))
                nodes.append(padded)
                parents += [self.places[row].get(parents_of[row][node], (0, row))[1] for node in padded]
            self._nodes.append(torch.tensor(nodes, device=tree.parents.device))
            self.parents.append(torch.tensor(parents, device=tree.parents.device))
            num_columns += width

        self._columns = torch.tensor(columns, device=tree.parents.device)
        self._is_chain = num_columns == self.num_nodes == len(self._nodes) and columns[0] == list(range(num_columns))

    def __len__(self) -> int:
        """Levels, of which each is read at once."""
        return len(self._nodes)

    def _of_level(self, value: Tensor, level: int) -> Tensor:
        if self._is_chain:
            return super()._of_level(value, level)
        rows = torch.arange(self.num_rows, device=value.device)[:, None]
        nodes = self._nodes[level].to(value.device)
        return value.expand(self.num_rows, *value.shape[1:])[rows, nodes].flatten(0, 1)[:, None]

    def _joined(self, values: Sequence[Tensor]) -> Tensor:
        joined = super()._joined([value.reshape(self.num_rows, -1, *value.shape[2:]) for value in values])
        if self._is_chain:
            return joined
        rows = torch.arange(self.num_rows, device=joined.device)[:, None]
        return joined[rows, self._columns.to(joined.device)]


def _nodes_by_depth(parents: Sequence[int]) -> list[list[int]]:
    """The nodes of each depth of one row's tree."""
    depths = {0: 0}
    levels = [[0]]
    for node, parent in enumerate(parents):
        if parent < 0:
            continue  # the root, or a filler
        depths[node] = depths[parent] + 1
        if depths[node] == len(levels):
            levels.append([])
        levels[depths[node]].append(node)
    return levels


class TreeStates:
    """The states behind each node of a draft, by level, and those of the texts before it."""

    def __init__(self, levels: TreeLevels, texts: dict[Key, Tensor]) -> None:
        self._levels, self._texts = levels, texts
        self._read: dict[Key, list[Tensor]] = {key: [] for key in texts}  # by level [rows x width, ...]

    @property
    def is_whole(self) -> bool:
        """Whether each state was updated once in each level."""
        return all(len(read) == len(self._levels) for read in self._read.values())

    def before(self, key: Key, level: int) -> Tensor:
        """A copy of the state of the parent of each node of a level."""
        state = self._read[key][level - 1] if level else self._texts[key]
        return state.index_select(0, self._levels.parents[level].to(state.device))

    def add(self, key: Key, _level: int, state: Tensor) -> None:
        """Add the state behind each node of a level."""
        self._read[key].append(state)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Let the texts' states be those behind each row's path."""
        for row, path in enumerate(paths):
            if path:
                level, place = self._levels.places[row][path[-1]]
                for key, text in self._texts.items():
                    text[row].copy_(self._read[key][level][place])


class FixedStates:
    """States in buffers that stay where they are: those of the texts, and behind each node of the newest draft.

    The device alone knows whose child a node is, and which one is kept.
    """

    def __init__(self) -> None:
        self.parents = torch.zeros(1, 1, dtype=torch.long)  # [rows, nodes] of the draft that is read
        self._held: dict[Key, Tensor] = {}  # [1 + nodes, rows, ...]: of the texts, then behind each node

    @property
    def texts(self) -> dict[Key, Tensor]:
        """Those of the texts."""
        return {key: held[0] for key, held in self._held.items()}

    def take(self, texts: Mapping[Key, Tensor]) -> None:
        """Take over the states of the texts, whose shapes are those of earlier ones."""
        for key, state in texts.items():
            if key not in self._held:
                self._held[key] = self._room(state, 1)
            self._held[key][0].copy_(state)

    def reserve(self, num_nodes: int) -> bool:
        """Make room for a draft of so many nodes; whether that moved anything, which spoils captured work.

        Without memory for it nothing has moved.
        """
        small = {key: held for key, held in self._held.items() if len(held) <= num_nodes}
        larger = {key: self._room(held[0], num_nodes) for key, held in small.items()}
        for key, held in small.items():
            larger[key][0].copy_(held[0])
        self._held |= larger
        return bool(larger)

    @staticmethod
    @torch.inference_mode(False)
    def _room(state: Tensor, num_nodes: int) -> Tensor:
        return state.new_zeros(1 + num_nodes, *state.shape)

    def before(self, key: Key, level: int) -> Tensor:
        """A copy of the state of each row's parent of the node with this number."""
        return self._choose(key, self.parents[:, level] + 1)

    def add(self, key: Key, level: int, state: Tensor) -> None:
        """Add the state behind a node of each row."""
        self._held[key][level + 1].copy_(state)

    def keep(self, path: Tensor, num_kept: Tensor) -> None:
        """Let each row's state be that behind the first `num_kept` `[rows, 1]` nodes of `path` `[rows, depths]`."""
        if not self._held:
            return
        last = path.gather(1, (num_kept - 1).clamp(min=0)) + 1
        last = torch.where(num_kept > 0, last, 0)[:, 0]
        for key, held in self._held.items():
            held[0].copy_(self._choose(key, last))

    def _choose(self, key: Key, numbers: Tensor) -> Tensor:
        held = self._held[key]
        numbers = numbers.to(held.device)
        return held[numbers, torch.arange(len(numbers), device=held.device)]


class _MixerRead:
    """One read of a mixer, level by level, in which its linear layers are computed once and not for each level.

    Those on the mixer's own inputs are computed for all nodes when the first level comes to them. Where the output of
    one is that of the mixer, as the first level shows, the other levels leave it to the end. Hooks keep such a layer
    from computing anything: it gets no tokens, and its output is replaced.
    """

    def __init__(self, mixer: nn.Module, levels: NodesInOrder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._mixer, self._thread = mixer, threading.get_ident()
        self._levels, self._args, self._kwargs = levels, args, kwargs
        self.level = 0  # that is read
        self._inputs: list[tuple[Tensor, Tensor]] = []  # tensors of the level, and of all nodes
        self._projected: dict[tuple[int, nn.Linear], Tensor] = {}  # of all nodes, by input
        self._output: Tensor | None = None  # what takes the place of the next output of a linear layer
        self._newest: tuple[nn.Linear | None, Tensor | None] = (None, None)  # that has computed, and its output
        self._last: nn.Linear | None = None  # which gives the mixer's output
        self._waiting: list[Tensor] = []  # its inputs, of each level after the first
        self._outputs: list[Any] = []  # the mixer's, of each level

    def is_of(self, mixer: nn.Module | None = None) -> bool:
        """Whether it is this thread's, and of this mixer if one is named."""
        return self._thread == threading.get_ident() and mixer in {None, self._mixer}

    def begin(self, level: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The mixer's inputs of a level."""
        args = self._levels.inputs(self._args, level)
        kwargs = self._levels.inputs(self._kwargs, level)
        self.level = level
        parts = [*args, *kwargs.values()]
        wholes = [*self._args, *self._kwargs.values()]
        self._inputs = []
        for part, whole in zip(parts, wholes, strict=True):
            if isinstance(part, Tensor) and part is not whole:
                self._inputs.append((part, whole))
        return args, kwargs

    def before_linear(self, linear: nn.Linear, tokens: Tensor) -> tuple[Tensor] | None:
        """Its inputs if its output is known or can wait: none."""
        if linear is self._last:
            self._waiting.append(tokens)
            self._output = tokens.new_empty(*tokens.shape[:-1], linear.out_features)
            return (tokens[:0],)

        whole = next((whole for part, whole in self._inputs if part is tokens), None)
        if whole is None:
            return None
        if (id(whole), linear) not in self._projected:
            self._projected[id(whole), linear] = linear.forward(whole)
        self._output = self._levels.inputs(self._projected[id(whole), linear], self.level)
        return (tokens[:0],)

    def after_linear(self, linear: nn.Linear, output: Tensor) -> Tensor:
        """Its output, or what takes the place of that."""
        output = output if self._output is None else self._output
        self._newest = (linear, output)
        self._output = None
        return output

    def end(self, output: Any) -> None:
        """Take the mixer's output of the level."""
        self._outputs.append(output)
        linear, newest = self._newest
        is_newest = _states_in(output) is newest
        if self.level == 0 and is_newest:
            self._last = linear
        if self._last is not None and not (is_newest and len(self._waiting) == self.level):
            raise TargetError("the output of a mixer is not always that of its last linear layer")

    def joined(self) -> Any:
        """The mixer's output of all nodes."""
        if self._last is not None and self._waiting:
            states = self._last.forward(torch.cat(self._waiting))
            parts = states.split([len(each) for each in self._waiting])
            for level, part in enumerate(parts, start=1):
                output = self._outputs[level]
                self._outputs[level] = part if isinstance(output, Tensor) else type(output)((part, *output[1:]))
        return self._levels.outputs(self._outputs)


def _is_usual(linear: nn.Linear) -> bool:
    """Whether nobody looks at what a layer reads, or lets it do something else."""
    return not (linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear))


def _states_in(output: Any) -> Any:
    """The hidden states in a mixer's output, which may be the first of several."""
    return output[0] if isinstance(output, tuple | list) else output


class _WatchedStates(dict[int, Any]):
    """The states of a layer, which note what module asks for one, directly or in a method of the cache."""

    def __init__(self, states: dict[int, Any], mixers: dict[nn.Module, set[Key]], layer: int, name: str) -> None:
        super().__init__(states)
        self._mixers, self._layer, self._name = mixers, layer, name

    def __getitem__(self, number: int) -> Any:
        frame = sys._getframe(1)
        while not isinstance(frame.f_locals.get("self"), nn.Module):
            assert frame.f_back is not None  # a forward is running
            frame = frame.f_back
        self._mixers.setdefault(frame.f_locals["self"], set()).add((self._layer, self._name, number))
        return super().__getitem__(number)


class RecurrentStates:
    """The recurrent states of the texts of one call."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self._mixers: dict[nn.Module, set[Key]] = {}  # and which states each updates
        self._linears: dict[nn.Module, list[nn.Linear]] = {}  # in each mixer
        self._levels = NodesInOrder(1)  # of the draft that is read
        self._states: TreeStates | FixedStates | None = None  # of the draft that was read last, until a path is kept
        self._mixer_read: _MixerRead | None = None  # that goes on

    @contextmanager
    def finding_mixers(self) -> Iterator[None]:
        """Inside, note which modules ask for the states."""
        layers = [(index, layer) for index, layer in enumerate(self.cache.layers) if is_recurrent(layer)]
        for index, layer in layers:
            for name in _STATES:
                setattr(layer, name, _WatchedStates(getattr(layer, name), self._mixers, index, name))
        try:
            yield
        finally:
            for _, layer in layers:
                for name in _STATES:
                    setattr(layer, name, dict(getattr(layer, name)))

        for mixer in self._mixers:
            self._linears[mixer] = [part for part in mixer.modules() if isinstance(part, nn.Linear)]

    def held(self) -> dict[Key, Tensor]:
        """All states that the cache holds now."""
        found = {}
        for index, layer in enumerate(self.cache.layers):
            for (name, number), state in states_of(layer).items():
                found[index, name, number] = state
        return found

    @contextmanager
    def reading(self, tree: DraftTree, num_rows: int) -> Iterator[None]:
        """Around the read of a draft; the cache holds the states of the texts before and after it.

        Raises:
            [`TargetError`]: some state was not updated by one mixer, once for each level.
        """
        levels, texts = TreeLevels(tree, num_rows), self.held()
        states = TreeStates(levels, texts)
        with self._reading(levels, states):
            try:
                yield
            finally:
                self.put(texts)
        if not states.is_whole:
            raise TargetError(
                "each recurrent state must be updated by one module, which is handed the cache once in a forward"
            )

    @contextmanager
    def reading_in_order(self, parents: Tensor, states: FixedStates) -> Iterator[None]:
        """Around the read of a draft in fixed shapes; `parents` `[rows, nodes]` are known to the device alone."""
        states.parents = parents
        with self._reading(NodesInOrder(parents.shape[1]), states):
            yield
        self._states = None

    @contextmanager
    def _reading(self, levels: NodesInOrder, states: TreeStates | FixedStates) -> Iterator[None]:
        self._levels, self._states = levels, states
        hooks = []
        for mixer in self._mixers:
            hooks.append(mixer.register_forward_pre_hook(self._begin, with_kwargs=True))
            hooks.append(mixer.register_forward_hook(self._end, prepend=True))
            for linear in filter(_is_usual, self._linears[mixer]):
                hooks.append(linear.register_forward_pre_hook(self._before_linear))
                hooks.append(linear.register_forward_hook(self._after_linear))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._mixer_read = None

    def _held(self, mixer: nn.Module) -> dict[Key, Tensor]:
        """The states that a mixer updates, as the cache holds them now."""
        found = {}
        for key in self._mixers[mixer]:
            index, name, number = key
            state = getattr(self.cache.layers[index], name)[number]
            if state is not None:
                found[key] = state
        return found

    def put(self, states: Mapping[Key, Tensor]) -> None:
        """Let the cache hold these states."""
        for (index, name, number), state in states.items():
            getattr(self.cache.layers[index], name)[number] = state

    def _begin(self, mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Read all levels but the last one, which the call that has begun is to read."""
        is_ours = any(value is self.cache for value in (*args, *kwargs.values()))  # and not of another thread
        states = self._states
        if not is_ours or self._mixer_read is not None or states is None:
            return None

        self._mixer_read = read = _MixerRead(mixer, self._levels, args, kwargs)
        keys = list(self._held(mixer))
        for level in range(len(self._levels)):
            self.put({key: states.before(key, level) for key in keys})
            level_args, level_kwargs = read.begin(level)
            if level < len(self._levels) - 1:
                self._end_level(read, mixer, mixer.forward(*level_args, **level_kwargs))
        return level_args, level_kwargs

    def _end(self, mixer: nn.Module, _: Any, output: Any) -> Any:
        """Give the output of all levels."""
        read = self._mixer_read
        if read is None or not read.is_of(mixer):
            return None

        self._mixer_read = None
        self._end_level(read, mixer, output)
        return read.joined()

    def _end_level(self, read: _MixerRead, mixer: nn.Module, output: Any) -> None:
        """Take what a mixer gave for a level, and the states behind its nodes."""
        assert self._states is not None  # they were when the read began
        for key, state in self._held(mixer).items():
            self._states.add(key, read.level, state)
        read.end(output)

    def _before_linear(self, linear: Any, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        read = self._mixer_read
        return read.before_linear(linear, args[0]) if read is not None and read.is_of() else None

    def _after_linear(self, linear: Any, _: Any, output: Tensor) -> Tensor | None:
        read = self._mixer_read
        return read.after_linear(linear, output) if read is not None and read.is_of() else None

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Let the states of each row be those behind its path of the draft that was read last."""
        if isinstance(self._states, TreeStates):  # else a root alone was read, into the states of the texts
            self._states.keep(paths)
        self._states = None
