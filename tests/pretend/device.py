"""A device that pretends to be CUDA: tensors that say so around tensors of the CPU, and a mode that runs operations on what they hold.

Where tensors of both devices meet, an error is raised, as on CUDA. Where the host would wait, the graphs of `tests/fake_cuda.py` are told:
inside a capture that is an error, and while work warms up the detector hears of it.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.fake_cuda import FakeGraph
from tests.pretend import operations
from tests.pretend.guard import why_no_guard
from tests.tape import is_kernel

CUDA = torch.device("cuda:0")
# Operations whose result the host must know before it goes on.
READS = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "multinomial", "bincount"),
    *("_unique2", "unique_dim", "unique_consecutive"),
}
RANDOM = {"exponential_", "normal_", "uniform_", "bernoulli_", "random_", "rand", "randn", "randint", "native_dropout"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
PACKING = {"_pack_padded_sequence", "_pad_packed_sequence"}  # whose lengths belong on the host


class Pretend(Tensor):
    """A tensor that says it lies on CUDA."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Pretend":
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        made = Tensor._make_wrapper_subclass(cls, inner.size(), **layout, device=CUDA, requires_grad=False)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        device.graphs.wait()
        return self.inner.tolist()


class Device(TorchDispatchMode):
    """Inside, tensors may be made on CUDA and used there."""

    graphs: type[FakeGraph]  # which are told where the host waits
    launches: Counter[str]  # operations that the host ordered one by one, outside captures
    is_captured_elsewhere = (
        False  # by another thread, while which PyTorch 2.11 refuses draws from the default generator
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


device = Device()


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on what its tensors hold, if it is one of the device."""
    leaves = tree_leaves((args, kwargs))
    ours = {id(each.inner): each for each in leaves if isinstance(each, Pretend)}
    asked = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
    if not ours and asked != "cuda":
        return func(*args, **kwargs)

    name = func._schema.name.split("::")[1]
    check(name, args, kwargs, asked)
    if device.graphs.capturing is None and is_kernel(func):
        device.launches[name] += 1
    unwrapped = tree_map(lambda each: each.inner if isinstance(each, Pretend) else each, args)
    options = tree_map(lambda each: each.inner if isinstance(each, Pretend) else each, kwargs)
    if asked == "cuda":
        options["device"] = "cpu"
    if name == "histc":  # which CUDA has for whole numbers, too
        unwrapped = (unwrapped[0].float(), *unwrapped[1:])
    found = func(*unwrapped, **options)
    if asked == "cpu" or (name == "copy_" and not isinstance(args[0], Pretend)):
        return args[0] if name == "copy_" else found.clone()  # on the host
    if name in PACKING:
        return Pretend(found[0]), found[1]

    def wrapped(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        return ours[id(each)] if id(each) in ours else Pretend(each)

    return tree_map(wrapped, found)


def check(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], asked: str | None) -> None:
    """Tell of an operation for which the host waits, and refuse one that CUDA cannot do."""
    if name in RANDOM and device.graphs.capturing is not None:
        raise RuntimeError(f"A graph cannot draw anew, but `{name}` was captured.")
    generator = kwargs.get("generator")
    if name in {*RANDOM, "multinomial"} and generator is None and device.is_captured_elsewhere:
        raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
    if generator is not None and CpuGenerator.asked[generator._cdata] != "cuda":
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    is_nondeterministic = name in {"histc", "put_"} or (name == "median" and len(args) > 1)  # along a dimension
    if is_nondeterministic and torch.are_deterministic_algorithms_enabled():
        raise RuntimeError(f"`{name}` does not have a deterministic implementation")
    hosts = [
        each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and not isinstance(each, Pretend)
    ]
    if name in PACKING:
        return
    is_copy = (name in {"copy_", "_to_copy"} and bool(hosts)) or (name == "_to_copy" and asked == "cpu")
    if is_copy:
        may_go_on = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        is_read = asked == "cpu" or (name == "copy_" and not isinstance(args[0], Pretend))
        waits = is_read or not may_go_on or device.graphs.capturing is not None
    elif name in INDEXING:
        waits = bool(hosts) or any(index is not None and index.dtype == torch.bool for index in args[1])
    else:
        waits = name in READS
        if any(each.dim() for each in hosts):
            raise RuntimeError(f"Expected all tensors to be on the same device, but `{name}` got some on the CPU")
    if waits:
        device.graphs.wait()


class DefaultGenerator(torch.Generator):
    """The CPU's default generator in the place of CUDA's."""

    def get_state(self) -> Tensor:
        return torch.default_generator.get_state()

    def set_state(self, state: Tensor) -> Any:
        return torch.default_generator.set_state(state)

    clone_state, graphsafe_set_state = get_state, set_state


class CpuGenerator(torch.Generator):
    """A generator of any device that draws on the CPU."""

    asked: ClassVar[
        dict[int, str]
    ] = {}  # types of devices, by what lies behind a generator: operations get another object

    def __new__(cls, device: Any = "cpu") -> Any:
        made = super().__new__(cls, "cpu")
        cls.asked[made._cdata] = torch.device(device).type
        return made


@contextmanager
def pretended(graphs: type[FakeGraph], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, `to_device` moves models and tensors to a CUDA device that is none."""
    # after the shape checks
    from transformers_falcon_spec.generation.capture import graph  # noqa: PLC0415
    from transformers_falcon_spec.generation.slot_cache import SlotView  # noqa: PLC0415

    device.graphs, device.launches = graphs, Counter()

    @contextmanager
    def captured(graph: FakeGraph, **options: Any) -> Iterator[None]:
        with graphs.captured(graph, **options), Device():  # above the tape, which then holds operations of the CPU
            yield

    fakes = {"graph": captured}
    fakes |= {"_lazy_init": lambda: None, "default_generators": (DefaultGenerator(),)}
    fakes |= {"get_device_capability": lambda _device=None: (9, 0), "synchronize": lambda _device=None: None}
    fakes |= {"get_rng_state": lambda _device=None: torch.default_generator.get_state()}
    fakes |= {"set_rng_state": lambda state, _device=None: torch.default_generator.set_state(state)}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "Generator", CpuGenerator)
    monkeypatch.setattr(graph, "OFTEN", 1)  # so that every test has joined graphs
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _device=None: None)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", operations.attention)
    monkeypatch.setattr(torch.nn.functional, "rms_norm", operations.rms_norm)
    monkeypatch.setattr(torch._VF, "lstm", operations.lstm)
    monkeypatch.setattr(SlotView, "shown", lambda view, states: states[:, :, : view.num_shown])
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with device, torch.no_grad():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)


@pytest.fixture
def cuda(fake_cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeGraph]]:
    """The pretended device, by the graphs that are made on it."""
    reason = why_no_guard()
    if reason is not None:
        pytest.skip(reason)
    with pretended(fake_cuda, monkeypatch):
        yield fake_cuda


def to_device(thing: Any) -> Any:
    """A tensor as one of the device, or a model whose weights are moved there."""
    if isinstance(thing, Tensor):
        return Pretend(thing)
    moved: dict[int, nn.Parameter] = {}
    for part in thing.modules():
        for name, weight in part._parameters.items():
            if weight is not None and not isinstance(weight, Pretend):
                moved.setdefault(id(weight), weight_on_device(weight))
                part._parameters[name] = moved[id(weight)]
        for name, buffer in part._buffers.items():
            if buffer is not None and not isinstance(buffer, Pretend):
                part._buffers[name] = Pretend(buffer)
        if isinstance(part, nn.RNNBase):
            part._flat_weights = [getattr(part, name) for name in part._flat_weights_names]
            part._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in part._flat_weights]
    return thing


def weight_on_device(weight: Any) -> nn.Parameter:
    """A weight of the device; one that is quantised keeps its scales there, too."""
    if hasattr(weight, "__tensor_flatten__"):  # torchao's, which hold several tensors
        names, context = weight.__tensor_flatten__()
        parts = {name: Pretend(getattr(weight, name)) for name in names}
        return nn.Parameter(type(weight).__tensor_unflatten__(parts, context, None, None), requires_grad=False)

    found = nn.Parameter(Pretend(weight.data), requires_grad=False)
    if hasattr(weight, "quant_state"):  # bitsandbytes', whose scales may be quantised themselves
        found.quant_state = weight.quant_state
        for state in filter(None, (weight.quant_state, weight.quant_state.state2)):
            for name, value in vars(state).items():
                if isinstance(value, Tensor):
                    setattr(state, name, Pretend(value))

    return found
