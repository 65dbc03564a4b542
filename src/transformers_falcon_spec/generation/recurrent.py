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


def show(layer: Any, states: States) -> None:
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


class TreeLevels:
    """The nodes of a draft by their depth; a mixer reads those of one depth in all rows as one batch.

    A row with fewer nodes of a depth than others repeats one. Fillers are left out.
    """

    def __init__(self, tree: DraftTree, num_rows: int) -> None:
        parents_of = tree.parents.tolist()
        if len(parents_of) < num_rows:
            parents_of *= num_rows
        by_depth = [_nodes_by_depth(parents) for parents in parents_of]
        self.num_nodes = len(tree)
        self.num_rows = num_rows
        self.places: list[dict[int, tuple[int, int]]] = [{} for _ in by_depth]  # of a row's nodes: level, place in it
        self._nodes: list[Tensor] = []  # of each level [rows, width]
        self._parents: list[Tensor] = []  # of each level [rows x width]: their places in the level before
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
            self._parents.append(torch.tensor(parents, device=tree.parents.device))
            num_columns += width

        self._columns = torch.tensor(columns, device=tree.parents.device)
        self._is_chain = num_columns == self.num_nodes == len(self._nodes) and columns[0] == list(range(num_columns))

    def __len__(self) -> int:
        return len(self._nodes)

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
        if self._is_chain:
            return value[:, level : level + 1]

        rows = torch.arange(self.num_rows, device=value.device)[:, None]
        nodes = self._nodes[level].to(value.device)
        return value.expand(self.num_rows, *value.shape[1:])[rows, nodes].flatten(0, 1)[:, None]

    def outputs(self, values: Sequence[Any]) -> Any:
        """A mixer's outputs `[rows, nodes, ...]` from those of each level `[rows x width, 1, ...]`."""
        first = values[0]
        if isinstance(first, tuple | list):
            return type(first)(map(self.outputs, zip(*values, strict=True)))
        if not isinstance(first, Tensor):
            return first

        joined = torch.cat([value.reshape(self.num_rows, -1, *value.shape[2:]) for value in values], dim=1)
        if self._is_chain:
            return joined
        rows = torch.arange(self.num_rows, device=joined.device)[:, None]
        return joined[rows, self._columns.to(joined.device)]

    def states(self, before: dict[Key, Tensor], level: int) -> dict[Key, Tensor]:
        """A copy of the states of each node's parent, from those of the level before or from those of the text."""
        return {key: state.index_select(0, self._parents[level].to(state.device)) for key, state in before.items()}


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


class _MixerRead:
    """One read of a mixer, level by level, in which its linear layers are computed once and not for each level.

    Those on the mixer's own inputs are computed for all nodes when the first level comes to them. Where the output of
    one is that of the mixer, as the first level shows, the other levels leave it to the end. Hooks keep such a layer
    from computing anything: it gets no tokens, and its output is replaced.
    """

    def __init__(self, mixer: nn.Module, levels: TreeLevels, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._mixer, self._thread = mixer, threading.get_ident()
        self._levels, self._args, self._kwargs = levels, args, kwargs
        self._level = 0
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
        self._level = level
        parts = [*args, *kwargs.values()]
        wholes = [*self._args, *self._kwargs.values()]
        pairs = zip(parts, wholes, strict=True)
        self._inputs = [(part, whole) for part, whole in pairs if isinstance(part, Tensor) and part is not whole]
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
        self._output = self._levels.inputs(self._projected[id(whole), linear], self._level)
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
        if self._level == 0 and is_newest:
            self._last = linear
        if self._last is not None and not (is_newest and len(self._waiting) == self._level):
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
        self._levels: TreeLevels | None = None  # of the draft that was read last, until a path is kept
        self._texts: dict[Key, Tensor] = {}  # as before that draft
        self._read: dict[Key, list[Tensor]] = {}  # by level, behind each node
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

    @contextmanager
    def reading(self, tree: DraftTree, num_rows: int) -> Iterator[None]:
        """Around the read of a draft; the cache holds the states of the texts before and after it.

        Raises:
            [`TargetError`]: some state was not updated by one mixer, once for each level.
        """
        self._levels = TreeLevels(tree, num_rows)
        self._texts, self._read = {}, {}
        for index, layer in enumerate(self.cache.layers):
            for (name, number), state in states_of(layer).items():
                self._texts[index, name, number] = state

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
            self._show(self._texts)

        if any(len(self._read.get(key, ())) != len(self._levels) for key in self._texts):
            raise TargetError(
                "each recurrent state must be updated by one module, which is handed the cache once in a forward"
            )

    def _held(self, mixer: nn.Module) -> dict[Key, Tensor]:
        """The states that a mixer updates, as the cache holds them now."""
        found = {}
        for key in self._mixers[mixer]:
            index, name, number = key
            state = getattr(self.cache.layers[index], name)[number]
            if state is not None:
                found[key] = state
        return found

    def _show(self, states: Mapping[Key, Tensor]) -> None:
        """Let the cache hold these states."""
        for (index, name, number), state in states.items():
            getattr(self.cache.layers[index], name)[number] = state

    def _begin(self, mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Read all levels but the last one, which the call that has begun is to read."""
        is_ours = any(value is self.cache for value in (*args, *kwargs.values()))  # and not of another thread
        if not is_ours or self._mixer_read is not None or self._levels is None:
            return None

        self._mixer_read = read = _MixerRead(mixer, self._levels, args, kwargs)
        states = self._held(mixer)
        for level in range(len(self._levels)):
            self._show(self._levels.states(states, level))
            level_args, level_kwargs = read.begin(level)
            if level < len(self._levels) - 1:
                read.end(mixer.forward(*level_args, **level_kwargs))
                states = self._note_read(mixer)
        return level_args, level_kwargs

    def _end(self, mixer: nn.Module, _: Any, output: Any) -> Any:
        """Give the output of all levels."""
        read = self._mixer_read
        if read is None or not read.is_of(mixer):
            return None

        self._mixer_read = None
        read.end(output)
        self._note_read(mixer)
        return read.joined()

    def _note_read(self, mixer: nn.Module) -> dict[Key, Tensor]:
        """Note the states behind the nodes of a level, and return them."""
        states = self._held(mixer)
        for key, state in states.items():
            self._read.setdefault(key, []).append(state)
        return states

    def _before_linear(self, linear: Any, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        read = self._mixer_read
        return read.before_linear(linear, args[0]) if read is not None and read.is_of() else None

    def _after_linear(self, linear: Any, _: Any, output: Tensor) -> Tensor | None:
        read = self._mixer_read
        return read.after_linear(linear, output) if read is not None and read.is_of() else None

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Let the states of each row be those behind its path of the draft that was read last."""
        if self._levels is None:
            return  # a root alone was read, into the states of the texts

        for row, path in enumerate(paths):
            if path:
                level, place = self._levels.places[row][path[-1]]
                for key, text in self._texts.items():
                    text[row].copy_(self._read[key][level][place])

        self._levels = None
        self._texts, self._read = {}, {}
