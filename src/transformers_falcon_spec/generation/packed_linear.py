"""Linear layers on a CPU with weights packed once, for reads of several tokens.

PyTorch's linear layer reads one token at the speed of memory, and packs its weights anew for every read of two or
more: the jump that makes trees dear. Here the weights are packed once by oneDNN, into a copy that lives as long as the
layer. The prefill, plain steps of a single row and other threads keep the stock layer, and its numbers.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

AUTO = "auto"
SHARE_OF_FREE = 0.5  # of the free memory, which copies may take where nobody asked for them
LEAST_WEIGHTS = 1 << 18  # of a layer; smaller ones are read in less time than the choice takes
MOST_TOKENS = 512  # of a read; for longer ones the packing of the stock layer costs little
TURNS = 4  # of each kernel, until it is known which one is faster; the first ones warm up
_CGROUP_FILES = [
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
]

_ACTIVE = threading.local()  # its `reads`: the reads of the call that reads packed in this thread now
_LOCK = threading.Lock()
_KNOWN: "WeakKeyDictionary[nn.Linear, PackedWeight]" = WeakKeyDictionary()
_TIMED: "dict[tuple[object, ...], TimedReads]" = {}  # by type, threads, shape and number of tokens


class PackedLinear(nn.Linear):
    """The class of a linear layer while a call may read it packed; outside of reads it is the stock layer.

    A copy that is made meanwhile has nothing packed, and a forward that is put on the layer itself goes before.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  as the stock layer calls it
        """Outputs `[..., out_features]` of `[..., in_features]`."""
        reads: PackedReads | None = getattr(_ACTIVE, "reads", None)
        packed = None if reads is None else _KNOWN.get(self)
        if reads is None or packed is None or packed.weight is not self.weight or not packed.can_read(input):
            return super().forward(input)
        if reads.pack_weights == AUTO:
            return reads.read_faster(packed, input, self.bias)
        return packed.read(input, self.bias)


class PackedWeight:
    """A packed copy of a layer's weight `[out_features, in_features]`."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.num_calls = weight, 0  # running calls that use it
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), MOST_TOKENS)
        self._state, self._sums = _state(weight), _sums(weight)

    def is_of(self, weight: Tensor) -> bool:
        """Whether the copy is of what the weight is now, as far as its memory, version and sums of its bits show."""
        is_same = weight is self.weight and _state(weight) == self._state
        return is_same and all(map(torch.equal, _sums(weight), self._sums))

    def can_read(self, inputs: Tensor) -> bool:
        """Whether there is a kernel for these inputs."""
        is_same_type = inputs.dtype == self.weight.dtype and not torch.is_autocast_enabled("cpu")
        return is_same_type and 0 < inputs.numel() <= MOST_TOKENS * inputs.shape[-1]

    def read(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """The outputs of the layer."""
        return torch.ops.mkldnn._linear_pointwise(inputs, self._packed, bias, "none", [], "")


@dataclass
class TimedReads:
    """Reads of one size by the stock and the packed kernel, which take turns until it is known which one is faster.

    They are the reads of the text, so that nothing is read twice.
    """

    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))  # of the stock and the packed

    @property
    def is_next_packed(self) -> bool:
        """Whether the next read takes the packed kernel."""
        stock, packed = self.seconds
        if min(len(stock), len(packed)) < TURNS:
            return len(packed) < len(stock)

        return min(packed[1:]) < min(stock[1:])

    def learn(self, is_packed: bool, seconds: float) -> None:
        """Add the seconds of a read."""
        if len(self.seconds[is_packed]) < TURNS:
            self.seconds[is_packed].append(seconds)


class PackedReads:
    """The packed layers of one call of `generate`.

    Args:
        models (`Sequence[Any]`): Target and drafters; those without `modules()` have nothing to pack.
        pack_weights (`bool` or `"auto"`):
            `True` packs every layer that can be packed. `"auto"` packs layers if their copies fit in half of the free
            memory, and reads them packed where that shows to be faster.
        clock (`Callable`, *optional*, defaults to `time.perf_counter`): What gives the seconds of reads.
    """

    def __init__(
        self,
        models: Sequence[Any],
        pack_weights: bool | str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        layers: list[nn.Linear] = []
        for model in models:
            if pack_weights and hasattr(model, "modules"):
                layers += _layers_of(model)
        layers = list(dict.fromkeys(layers))  # target and drafter may share some

        if pack_weights == AUTO:
            layers = [layer for layer in layers if layer.weight.numel() >= LEAST_WEIGHTS]
            num_new = sum(layer.weight.nbytes for layer in layers if layer not in _KNOWN)
            layers = layers if num_new <= SHARE_OF_FREE * free_bytes() else []

        self.pack_weights = pack_weights
        self.layers = layers
        self._clock = clock
        self._held: list[tuple[Any, PackedWeight]] = []
        self.notes: list[str] = []  # a sentence that says why nothing is packed, where packing was tried

    @property
    def num_held_bytes(self) -> int:
        """Memory of the copies that the call has so far; none before its first packed read."""
        return sum(layer.weight.nbytes for layer, _ in self._held)

    def _hold(self) -> None:
        """Give the layers their copies, those of earlier calls if they are right.

        If it fails, as for want of memory, and nobody asked for it, no layer is read packed.
        """
        try:
            for layer in self.layers:
                packed = _packed(layer)
                with _LOCK:
                    packed.num_calls += 1
                    self._held.append((layer, packed))
                    layer.__class__ = PackedLinear
        except (RuntimeError, MemoryError) as error:
            if self.pack_weights != AUTO:
                raise

            self.close()
            self.layers = []
            self.notes = [f"Weights could not be packed, and were read as they are: {error}."]

    def close(self) -> None:
        """Give back what the call holds from its first packed read on; layers that no other holds are stock again."""
        with _LOCK:
            for layer, packed in self._held:
                packed.num_calls -= 1
                if not packed.num_calls and type(layer) is PackedLinear:
                    layer.__class__ = nn.Linear  # type: ignore[assignment]  # the check narrowed it
        self._held = []

    @contextmanager
    def reading(self, is_packed: bool = True) -> Iterator[None]:
        """Let this thread read packed for the time of the block, unless `is_packed` says no."""
        before = getattr(_ACTIVE, "reads", None)
        if is_packed and not self._held:
            self._hold()
        try:
            _ACTIVE.reads = self if is_packed and self.layers else None
            yield
        finally:
            _ACTIVE.reads = before

    def read_faster(self, packed: PackedWeight, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """The outputs of a layer by the kernel that is faster for its shape and as many tokens, up to doubling."""
        doublings = (inputs.numel() // inputs.shape[-1]).bit_length()
        key = (inputs.dtype, torch.get_num_threads(), packed.weight.shape, doublings)
        timed = _TIMED.setdefault(key, TimedReads())

        is_packed = timed.is_next_packed
        start = self._clock()
        outputs = packed.read(inputs, bias) if is_packed else functional.linear(inputs, packed.weight, bias)
        timed.learn(is_packed, self._clock() - start)
        return outputs


def release_packed_weights() -> None:
    """Drop the packed copies that no running call uses."""
    with _LOCK:
        for layer in [layer for layer, packed in _KNOWN.items() if not packed.num_calls]:
            del _KNOWN[layer]


def free_bytes() -> int:
    """The memory that this process may still take, as Linux and the limits of a container say; 0 where nobody says.

    Processes that a launcher starts on one machine share what is free.
    """
    machine = _text(Path("/proc/meminfo")).splitlines()
    available = [1024 * int(line.split()[1]) for line in machine if line.startswith("MemAvailable")]
    for limit, used in _CGROUP_FILES:
        both = [_text(limit).strip(), _text(used).strip()]
        if all(text.isdecimal() for text in both):
            available.append(max(int(both[0]) - int(both[1]), 0))
    return min(available, default=0) // max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _layers_of(model: Any) -> Iterator[nn.Linear]:
    """The layers that can be packed: those with a stock forward and weights of their own, in models not compiled."""
    parts = list(model.modules())
    if any(part._compiled_call_impl is not None for part in parts):
        return

    for layer in parts:
        if not isinstance(layer, nn.Linear) or type(layer) not in {nn.Linear, PackedLinear}:
            continue

        if type(layer.weight) is nn.Parameter and "forward" not in layer.__dict__ and _can_pack(layer.weight):
            yield layer
        else:
            _KNOWN.pop(layer, None)  # of a type or device that the layer had before


def _can_pack(weight: Tensor) -> bool:
    """Whether the processor has packed kernels for the type of a weight, and changes of it can be noticed."""
    if weight.device.type != "cpu" or weight.is_inference() or not torch.backends.mkldnn.is_available():
        return False
    is_half = weight.dtype == torch.bfloat16
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() if is_half else weight.dtype == torch.float32


def _packed(layer: nn.Linear) -> PackedWeight:
    """The copy of what the layer's weight is now; it is made once, whoever asks."""
    packed = _KNOWN.get(layer)
    if packed is not None and packed.is_of(layer.weight):
        return packed

    fresh = PackedWeight(layer.weight)
    with _LOCK:
        found = _KNOWN.get(layer)
        if found is packed or found is None:  # nobody was faster
            _KNOWN[layer] = found = fresh
        return found


def _state(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight._version


def _sums(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of a weight's bits, of every row and, over every eighth row, of the columns.

    Changes through `weight.data` leave no other trace.
    """
    bits = weight.detach().contiguous().view(torch.int16)
    if bits.shape[-1] % 4 == 0 and bits.storage_offset() % 4 == 0:
        bits = bits.view(torch.int64)
    return bits.sum(dim=-1), bits[::8].sum(dim=0)
