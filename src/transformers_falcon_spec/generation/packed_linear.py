"""Linear layers on a CPU with weights packed once, for reads of several tokens.

PyTorch's linear layer reads one token at the speed of memory, and packs its weights anew for every read of two or
more: the jump that makes trees dear. Here the weights are packed once by oneDNN, into a copy that lives as long as the
layer. The prefill, plain steps of a single row and other threads keep the stock layer, and its numbers.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

AUTO = "auto"
SHARE_OF_FREE = 0.5  # of the free memory, which copies may take where nobody asked for them
LEAST_WEIGHTS = 1 << 18  # of a layer; smaller ones are read in less time than the choice takes
MOST_TOKENS = 512  # of a read; for longer ones the packing of the stock layer costs little
REPEATS = 3  # of a measurement, of which the fastest counts
CACHE_BYTES = 1 << 26  # what a processor may keep of the weights that it has read
CACHE_LINE = 64  # bytes, which it reads at once
_CGROUP_FILES = [
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
]

_ACTIVE = threading.local()  # its `reads`: the reads of the call that reads packed in this thread now
_LOCK = threading.Lock()
_KNOWN: "WeakKeyDictionary[nn.Linear, PackedWeight]" = WeakKeyDictionary()
_IS_FASTER: dict[tuple[object, ...], bool] = {}  # measured: by type, threads, shape and number of tokens


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
        if reads.pack_weights == AUTO and not reads.is_faster(packed, input, self.bias):
            return super().forward(input)
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


class PackedReads:
    """The packed layers of one call of `generate`.

    Args:
        models (`Sequence[Any]`): Target and drafters; those without `modules()` have nothing to pack.
        pack_weights (`bool` or `"auto"`):
            `True` packs every layer that can be packed. `"auto"` packs layers if their copies fit in half of the free
            memory, and reads them packed where that was measured to be faster.
        clock (`Callable`, *optional*, defaults to `time.perf_counter`): What gives the seconds of measurements.
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
        self.measuring_seconds = {"draft": 0.0, "read": 0.0}  # spent on measuring kernels in each phase
        self._phase = "read"
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
    def reading(self, phase: Literal["draft", "read"], is_packed: bool = True) -> Iterator[None]:
        """Let this thread read packed for the time of the block, unless `is_packed` says no."""
        before = getattr(_ACTIVE, "reads", None), self._phase
        if is_packed and not self._held:
            self._hold()
        try:
            _ACTIVE.reads, self._phase = self if is_packed and self.layers else None, phase
            yield
        finally:
            _ACTIVE.reads, self._phase = before

    def is_faster(self, packed: PackedWeight, inputs: Tensor, bias: Tensor | None) -> bool:
        """Whether the packed read is faster, which is measured once for each shape and doubling of the tokens."""
        doublings = (inputs.numel() // inputs.shape[-1]).bit_length()
        key = (inputs.dtype, torch.get_num_threads(), packed.weight.shape, doublings)
        if key not in _IS_FASTER:
            start = self._clock()
            runs = (lambda: functional.linear(inputs, packed.weight, bias), lambda: packed.read(inputs, bias))
            of_stock, of_packed = seconds(runs, self._fill_caches, self._clock)
            _IS_FASTER[key] = of_packed < of_stock
            self.measuring_seconds[self._phase] += self._clock() - start
        return _IS_FASTER[key]

    def _fill_caches(self) -> None:
        """Read weights of other layers, as a step does between two reads of one, which then comes from memory."""
        num_left = CACHE_BYTES
        for layer in self.layers:
            if num_left > 0:
                layer.weight.detach()[:, :: CACHE_LINE // layer.weight.itemsize].sum()
            num_left -= layer.weight.nbytes


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


def seconds(
    runs: Sequence[Callable[[], Tensor]],
    before: Callable[[], None],
    clock: Callable[[], float],
) -> list[float]:
    """The seconds of the fastest of some runs of each, which take turns, after `before`; a first turn warms up."""
    fastest = [math.inf] * len(runs)
    for number in range(1 + REPEATS):
        for index, run in enumerate(runs):
            before()
            start = clock()
            run()
            spent = clock() - start
            fastest[index] = min(fastest[index], spent) if number else math.inf
    return fastest


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
