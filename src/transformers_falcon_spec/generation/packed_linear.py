"""Linear layers on a CPU with weights packed once, for reads of several tokens.

PyTorch's linear layer reads one token at the speed of memory, and packs its weights anew for every read of two or
more: the jump that makes trees dear. Here the weights are packed once by oneDNN, into a copy that lives as long as the
layer. Plain reads, the prefill and other threads keep the stock layer, so that nothing else changes by a rounding.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

AUTO = "auto"
SHARE_OF_FREE = 0.5  # of the free memory, which copies may take where nobody asked for them
LEAST_WEIGHTS = 1 << 14  # of a layer; packing smaller ones brings nothing
MOST_TOKENS = 512  # of a read; for longer ones the packing of the stock layer costs little
REPEATS = 3  # of a measurement, of which the fastest counts

_ACTIVE = threading.local()  # its `pack_weights`: how this thread reads now
_LOCK = threading.Lock()
_KNOWN: "WeakKeyDictionary[nn.Linear, PackedLinear]" = WeakKeyDictionary()
_IS_FASTER: dict[tuple[object, ...], bool] = {}  # measured: by type, threads, shape and number of tokens


class PackedLinear:
    """A packed copy of the weights of one layer, of which the original is `weight` `[out_features, in_features]`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), MOST_TOKENS)
        self._state, self._row_sums = _state(weight), _row_sums(weight)
        self.num_calls = 0  # running calls of `generate` that use it

    def is_of(self, layer: nn.Linear) -> bool:
        """Whether the copy is of the weights that the layer has now, bit for bit."""
        is_same = layer.weight is self.weight and layer.bias is self.bias and _state(layer.weight) == self._state
        return is_same and torch.equal(_row_sums(layer.weight), self._row_sums)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  as `nn.Linear` calls it
        """The layer's outputs `[..., out_features]` of `[..., in_features]`."""
        pack_weights = getattr(_ACTIVE, "pack_weights", False)
        if pack_weights and self._can_read(input) and (pack_weights != AUTO or self._is_faster(input)):
            return self._read(input)
        return functional.linear(input, self.weight, self.bias)

    def _read(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self.bias, "none", [], "")
        return outputs

    def _can_read(self, inputs: Tensor) -> bool:
        is_same_type = inputs.dtype == self.weight.dtype and not torch.is_autocast_enabled("cpu")
        return is_same_type and 0 < inputs.numel() <= MOST_TOKENS * inputs.shape[-1]

    def _is_faster(self, inputs: Tensor) -> bool:
        """Whether the packed read is faster, which is measured once for each shape and doubling of the tokens."""
        doublings = (inputs.numel() // inputs.shape[-1]).bit_length()
        key = (inputs.dtype, torch.get_num_threads(), self.weight.shape, doublings)
        if key not in _IS_FASTER:
            stock = seconds(lambda: functional.linear(inputs, self.weight, self.bias))
            _IS_FASTER[key] = seconds(lambda: self._read(inputs)) < stock
        return _IS_FASTER[key]


class PackedReads:
    """The packed layers of one call of `generate`.

    Args:
        models (`Sequence[torch.nn.Module]`): Target and drafters.
        pack_weights (`bool` or `"auto"`):
            `True` packs every layer that can be packed. `"auto"` packs layers if their copies fit in half of the free
            memory, and reads them packed where that was measured to be faster.
    """

    def __init__(self, models: Sequence[Any], pack_weights: bool | str) -> None:
        modules = [model for model in models if isinstance(model, nn.Module)] if pack_weights else []
        layers = list(dict.fromkeys(layer for model in modules for layer in _layers_of(model)))
        if pack_weights == AUTO:
            layers = [layer for layer in layers if layer.weight.numel() >= LEAST_WEIGHTS]
            num_new = sum(layer.weight.nbytes for layer in layers if layer not in _KNOWN)
            layers = layers if num_new <= SHARE_OF_FREE * free_bytes() else []
        self._layers, self._pack_weights = layers, pack_weights

    @property
    def num_bytes(self) -> int:
        """Memory of the copies."""
        return sum(layer.weight.nbytes for layer in self._layers)

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Give the layers their copies for the time of a call; those of earlier calls serve if they are right."""
        with _LOCK:
            held = [(layer, _packed(layer)) for layer in self._layers]
            for layer, packed in held:
                packed.num_calls += 1
                layer.__dict__["forward"] = packed.forward
        try:
            yield
        finally:
            with _LOCK:
                for layer, packed in held:
                    packed.num_calls -= 1
                    if not packed.num_calls and layer.__dict__.get("forward") == packed.forward:
                        del layer.__dict__["forward"]

    @contextmanager
    def reading(self, is_packed: bool = True) -> Iterator[None]:
        """Let this thread read packed for the time of the block, unless `is_packed` says no."""
        _ACTIVE.pack_weights = is_packed and self._pack_weights
        try:
            yield
        finally:
            _ACTIVE.pack_weights = False


def release_packed_weights() -> None:
    """Drop the packed copies that no running call uses."""
    with _LOCK:
        for layer in [layer for layer, packed in _KNOWN.items() if not packed.num_calls]:
            del _KNOWN[layer]


def free_bytes() -> int:
    """The memory that processes may still take, as Linux and the limits of a container say; 0 where nobody says."""
    files = [Path("/proc/meminfo"), *(Path("/sys/fs/cgroup", f"memory.{name}") for name in ("max", "current"))]
    machine, limit, used = (path.read_text(encoding="utf-8") if path.exists() else "" for path in files)
    available = [1024 * int(line.split()[1]) for line in machine.splitlines() if line.startswith("MemAvailable")]
    if limit.strip().isdecimal() and used.strip().isdecimal():
        available.append(max(int(limit) - int(used), 0))
    return min(available, default=0)


def seconds(run: Callable[[], Tensor], clock: Callable[[], float] = time.perf_counter) -> float:
    """The seconds of the fastest of some runs, after one to warm up."""
    run()
    times = []
    for _ in range(REPEATS):
        start = clock()
        run()
        times.append(clock() - start)
    return min(times)


def _layers_of(model: nn.Module) -> Iterator[nn.Linear]:
    """The layers that can be packed: those with a stock forward and weights of their own, in models not compiled."""
    parts = list(model.modules())
    if any(part._compiled_call_impl is not None for part in parts):
        return
    for layer in parts:
        if not isinstance(layer, nn.Linear) or type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter:
            continue
        if ("forward" not in layer.__dict__ or layer in _KNOWN) and _can_pack(layer.weight):
            yield layer


def _can_pack(weight: Tensor) -> bool:
    """Whether the processor has packed kernels for the type of a weight, and changes of it can be noticed."""
    if weight.device.type != "cpu" or weight.is_inference() or not torch.backends.mkldnn.is_available():
        return False
    is_half = weight.dtype == torch.bfloat16
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() if is_half else weight.dtype == torch.float32


def _packed(layer: nn.Linear) -> PackedLinear:
    packed = _KNOWN.get(layer)
    if packed is None or not packed.is_of(layer):
        packed = _KNOWN[layer] = PackedLinear(layer.weight, layer.bias)
    return packed


def _state(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight._version


def _row_sums(weight: Tensor) -> Tensor:
    """The sum of the bits of each row: changes through `weight.data` leave no other trace."""
    bits = weight.detach().contiguous().view(torch.int16)
    return (bits.view(torch.int64) if bits.shape[-1] % 4 == 0 else bits).sum(dim=-1)
