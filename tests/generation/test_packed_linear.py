"""Packed weights: the numbers of the stock layer, the text of the target, memory within bounds, and never a copy that is out of date."""

import copy
import gc
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import runs
from tests.clock import HandClock
from tests.every_drafter import KINDS, every_drafter
from tests.pairs import in_turn
from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec import SpeculationConfig
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.generation import packed_linear
from transformers_falcon_spec.generation.packed_linear import PackedReads, release_packed_weights

pytestmark = pytest.mark.skipif(
    not packed_linear._can_pack(torch.zeros(4, 4)), reason="this build of torch has no packed kernels"
)
PACKED_TYPES = [
    dtype for dtype in (torch.float32, torch.bfloat16) if packed_linear._can_pack(torch.zeros(1, dtype=dtype))
]


def _num_bytes(reads: PackedReads) -> int:
    """Memory of the copies, once they are made."""
    return sum(layer.weight.nbytes for layer in reads.layers)


@pytest.fixture(autouse=True)
def packs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the inputs that are read packed, in a process that has packed nothing before."""
    release_packed_weights()
    packed_linear._TIMED.clear()
    read, shapes = packed_linear.PackedWeight.read, []

    def seen(self: Any, inputs: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        shapes.append(tuple(inputs.shape))
        return read(self, inputs, bias)

    monkeypatch.setattr(packed_linear.PackedWeight, "read", seen)
    return shapes


def held(*models: nn.Module) -> list[nn.Module]:
    """Parts of models that are of another class for the time of a call."""
    return [part for model in models for part in model.modules() if type(part) is packed_linear.PackedLinear]


@contextmanager
def packed_call(*models: nn.Module) -> Iterator[None]:
    """A call that has read packed, and holds its copies."""
    reads = PackedReads(models, True)
    with closing(reads), reads.reading():
        yield


def packing(target: Any, pack_weights: Any = True, **options: Any) -> Any:
    drafter = make_drafter(target, **options)
    drafter.generation_config.pack_weights = pack_weights
    return drafter


@pytest.mark.parametrize("dtype", PACKED_TYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 5), (2, 33), (8, 64), (130, 17)])
def test_a_packed_read_is_that_of_the_stock_layer(shape: tuple[int, int], has_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(shape[1], shape[0], bias=has_bias, dtype=dtype).eval()
    reads = PackedReads([layer], True)
    for num_tokens in (1, 2, 7, 64):
        inputs = torch.randn(3, num_tokens, shape[1], dtype=dtype)
        with torch.no_grad(), closing(reads):
            with reads.reading():
                packed = layer(inputs)
            stock = layer(inputs)
        twin = inputs.double() @ layer.weight.double().T + (layer.bias.double() if has_bias else 0.0)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        assert torch.allclose(packed.double(), twin, rtol=tolerance, atol=10 * tolerance)
        assert torch.allclose(stock.double(), twin, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize(("kind", "options"), in_turn(KINDS, ({}, {"do_sample": True, "temperature": 0.8})))
def test_every_drafter_writes_the_target_s_text_with_packed_weights(
    kind: str, options: dict[str, Any], packs: Any
) -> None:
    target = make_target()
    drafter = every_drafter(kind, target)
    drafter.generation_config.pack_weights = True
    pair = runs.informed(target, drafter, **options)
    pair.assert_equal()
    assert packs
    assert pair.stats.packed_bytes > 0
    assert not held(target, drafter)


def test_a_drafter_that_wraps_another_has_its_layers_packed() -> None:
    target = make_target()
    drafter = packing(target, block_size=2)

    stats = runs.informed(target, drafter).stats

    assert (
        stats.packed_bytes
        == _num_bytes(PackedReads([target, drafter], True))
        > _num_bytes(PackedReads([target], True))
    )


def test_only_reads_of_several_tokens_are_packed(packs: Any) -> None:
    target = make_target()
    drafter = packing(target, draft_tree={"parents": [-1, 0, 1], "ranks": [-1, 0, 0]}, block_size=2)
    runs.drafted(target, drafter, make_prompt(9), max_new_tokens=12)
    assert all(9 not in shape[:-1] or shape[-1] == drafter.config.hidden_size for shape in packs)
    widths = {shape[-2] for shape in packs if shape[-1] == target.config.intermediate_size}
    assert widths
    assert 1 not in widths


def test_a_call_without_a_packed_read_makes_no_copies() -> None:
    target = make_target()
    reads, drafter = PackedReads([target], True), packing(target)

    with closing(reads), reads.reading(is_packed=False):
        assert not held(target)
    one_token = runs.drafted(target, drafter, make_prompt(9), max_new_tokens=1)

    assert one_token.speculation.packed_bytes == 0
    assert not packed_linear._KNOWN
    assert runs.drafted(target, drafter, make_prompt(9), max_new_tokens=9).speculation.packed_bytes > 0


def test_plain_decoding_beside_a_call_reads_the_stock_layers() -> None:
    target = make_target()
    reads, prompt = PackedReads([target], True), make_prompt(7)
    expected, found = target(prompt).logits, []

    def read() -> None:
        with torch.no_grad():
            found.append(target(prompt).logits)

    with closing(reads), reads.reading(), torch.no_grad():
        other = threading.Thread(target=read)
        other.start()
        other.join()
        assert held(target)
    assert found[0].equal(expected)
    assert target(prompt).logits.equal(expected)
    assert not held(target)


def test_calls_that_overlap_share_copies_and_leave_nothing() -> None:
    target = make_target()
    with packed_call(target):
        with packed_call(target):
            copies = [packed_linear._KNOWN[layer] for layer in held(target)]
            assert {copy.num_calls for copy in copies} == {2}
        assert len(held(target)) == len(copies)
    assert not held(target)


def _optimised(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.add_(1.0)


def _through_data(layer: nn.Linear) -> None:
    layer.weight.data[0, 0] += 1.0


def _replaced(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach() + 1.0)


def _loaded(layer: nn.Linear) -> None:
    layer.load_state_dict({name: value + 1.0 for name, value in layer.state_dict().items()})


def _permuted(layer: nn.Linear) -> None:
    layer.weight.data.copy_(layer.weight.data.roll(8, dims=1))


def _moved(layer: nn.Linear) -> None:
    layer.double().float().weight.data += 1.0


@pytest.mark.parametrize("change", [_optimised, _through_data, _replaced, _loaded, _permuted, _moved])
def test_weights_that_change_between_calls_are_packed_anew(change: Any) -> None:
    layer, inputs = nn.Linear(32, 16), torch.randn(4, 32)
    for _ in range(2):
        reads = PackedReads([layer], True)
        with torch.no_grad(), closing(reads), reads.reading():
            assert torch.allclose(layer(inputs), nn.functional.linear(inputs, layer.weight, layer.bias), atol=1e-5)
        change(layer)


def test_copies_are_kept_between_calls_and_go_with_the_model() -> None:
    target = make_target()
    with packed_call(target):
        copies = [packed_linear._KNOWN[layer] for layer in held(target)]
    with packed_call(target):
        assert [packed_linear._KNOWN[layer] for layer in held(target)] == copies
    del target, copies
    gc.collect()
    assert not packed_linear._KNOWN


def test_released_copies_are_gone_and_those_in_use_stay() -> None:
    one, other = make_target(), make_target(seed=1)
    with packed_call(other):
        pass
    with packed_call(one):
        num_used = len(held(one))
        release_packed_weights()
        assert len(packed_linear._KNOWN) == num_used


def _large() -> nn.Linear:
    return nn.Linear(512, 512)


class Kernels:
    """Takes the seconds of stock and packed reads from lists, and gives the clock that shows them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stock: list[float], packed: list[float]) -> None:
        self.now, self.order, self.inputs = 0.0, "", []
        for place, name, sign, seconds in (
            (packed_linear.functional, "linear", "s", stock),
            (packed_linear.PackedWeight, "read", "p", packed),
        ):
            monkeypatch.setattr(place, name, self._timed(getattr(place, name), sign, iter(seconds)))

    def _timed(self, read: Any, sign: str, seconds: Iterator[float]) -> Any:
        def timed(*inputs: Any) -> torch.Tensor:
            self.order += sign
            self.now += next(seconds)
            return read(*inputs)

        return timed

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("stock", "packed", "order"),
    [
        ([9.0, 3.0, 2.0, 4.0, 9.0, 9.0], [1.0, 5.0, 6.0, 3.0], "spspspsp" + "ss"),
        ([1.0, 3.0, 5.0, 4.0], [9.0, 5.0, 2.0, 7.0, 9.0, 9.0], "spspspsp" + "pp"),
    ],
    ids=["stock", "packed"],
)
def test_kernels_take_turns_until_the_faster_one_is_known(
    stock: list[float], packed: list[float], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, inputs = _large(), torch.randn(4, 512)
    expected = layer(inputs)
    kernels = Kernels(monkeypatch, stock, packed)
    reads = PackedReads([layer], packed_linear.AUTO, clock=kernels.clock)

    with torch.no_grad(), closing(reads), reads.reading():
        for _ in order:
            assert torch.allclose(layer(inputs), expected, atol=1e-5)

    assert kernels.order == order


def test_reads_by_several_threads_at_once_leave_both_kernels_timed() -> None:
    timed = packed_linear.TimedReads()
    chosen = [False, *[True] * packed_linear.TURNS]  # by threads that did not know of each other

    for is_packed in chosen:
        timed.learn(is_packed, 1.0)

    assert [timed.is_next_packed, *map(len, timed.seconds)] == [False, 1, packed_linear.TURNS]


def test_reads_of_each_size_are_timed_for_themselves() -> None:
    layer, reads = _large(), PackedReads([_large()], packed_linear.AUTO)
    packed = packed_linear.PackedWeight(layer.weight)

    for num_tokens in (2, 3, 4, 7, 8):
        reads.read_faster(packed, torch.randn(1, num_tokens, 512), layer.bias)

    assert sorted(sum(map(len, timed.seconds)) for timed in packed_linear._TIMED.values()) == [1, 2, 2]


def test_layers_of_one_shape_take_turns_together(packs: Any) -> None:
    layers = nn.Sequential(*(_large() for _ in range(2 * packed_linear.TURNS)))
    reads = PackedReads([layers], packed_linear.AUTO)

    with torch.no_grad(), closing(reads), reads.reading():
        layers(torch.randn(4, 512))

    assert len(packs) == packed_linear.TURNS


def test_copies_that_would_fill_the_memory_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, free = _large(), [0]
    monkeypatch.setattr(packed_linear, "free_bytes", lambda: free[0])

    free[0] = 2 * layer.weight.nbytes
    assert _num_bytes(PackedReads([layer], packed_linear.AUTO)) == layer.weight.nbytes
    free[0] -= 1
    assert _num_bytes(PackedReads([layer], packed_linear.AUTO)) == 0
    assert _num_bytes(PackedReads([layer], True)) == layer.weight.nbytes


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 7 kB\n"}, 7168),
        ({"/proc/meminfo": "MemAvailable: 7 kB\n", "/sys/fs/cgroup/memory.max": "max\n"}, 7168),
        (
            {
                "/proc/meminfo": "MemAvailable: 7 kB\n",
                "/sys/fs/cgroup/memory.max": "900\n",
                "/sys/fs/cgroup/memory.current": "400\n",
            },
            500,
        ),
        ({}, 0),
    ],
    ids=["a machine", "a container without a limit", "a container", "another system"],
)
def test_free_memory_is_what_machine_and_container_leave(
    files: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: path.as_posix() in files)
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: files[path.as_posix()])

    assert packed_linear.free_bytes() == expected


def test_what_has_no_stock_forward_or_type_is_left_alone() -> None:
    replaced, compiled = nn.Linear(8, 8), nn.Linear(8, 8)
    replaced.forward = lambda inputs: inputs  # type: ignore[method-assign]
    compiled.compile()
    subclass = type("Own", (nn.Linear,), {})(8, 8)
    with torch.inference_mode():
        unnoticed = nn.Linear(8, 8)
    for layer in (
        replaced,
        compiled,
        subclass,
        unnoticed,
        nn.Linear(8, 8, dtype=torch.float64),
        nn.Linear(8, 8, device="meta"),
    ):
        assert _num_bytes(PackedReads([layer], True)) == 0
    assert _num_bytes(PackedReads([nn.Linear(8, 8)], False)) == 0


def test_small_layers_are_left_alone_unless_asked_for() -> None:
    target = make_target()
    assert _num_bytes(PackedReads([target], packed_linear.AUTO)) == 0
    assert _num_bytes(PackedReads([target], True)) > 0


def test_under_autocast_the_stock_layer_reads(packs: Any) -> None:
    layer = nn.Linear(8, 8)
    reads = PackedReads([layer], True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), closing(reads), reads.reading():
        assert layer(torch.randn(2, 8)).dtype == torch.bfloat16
    assert packs == []


def test_another_value_of_the_option_is_refused() -> None:
    with pytest.raises(OptionError, match=r"`pack_weights` must be one of \(True, False, 'auto'\), but it is"):
        SpeculationConfig(pack_weights="always")


def test_a_forward_that_is_put_on_a_packed_layer_is_never_passed_by() -> None:
    layer, calls = nn.Linear(8, 8), []
    with packed_call(layer):
        pass
    own = layer.forward
    layer.forward = lambda inputs: calls.append(1) or own(inputs)  # type: ignore[method-assign,func-returns-value]
    reads = PackedReads([layer], True)

    with torch.no_grad(), closing(reads), reads.reading():
        layer(torch.randn(2, 8))
    layer(torch.randn(2, 8))

    assert _num_bytes(reads) == 0
    assert len(calls) == 2
    assert layer not in packed_linear._KNOWN


def test_a_weight_that_is_replaced_during_a_call_is_read_as_it_is() -> None:
    layer, inputs = nn.Linear(8, 8), torch.randn(2, 8)
    reads = PackedReads([layer], True)
    with torch.no_grad(), closing(reads), reads.reading():
        layer.weight = nn.Parameter(layer.weight + 1.0)
        assert torch.equal(layer(inputs), nn.functional.linear(inputs, layer.weight, layer.bias))


def test_a_model_that_is_copied_or_saved_during_a_call_works(tmp_path: Path) -> None:
    layer, inputs = nn.Linear(8, 8), torch.randn(2, 8)
    with packed_call(layer):
        copied = copy.deepcopy(layer)
        torch.save(layer, tmp_path / "layer.pt")
    loaded = torch.load(tmp_path / "layer.pt", weights_only=False)
    assert torch.equal(copied(inputs), layer(inputs))
    assert torch.equal(loaded(inputs), layer(inputs))
    assert _num_bytes(PackedReads([copied], True)) == layer.weight.nbytes


def test_weights_at_odd_offsets_of_a_buffer_are_packed() -> None:
    layer, buffer = nn.Linear(8, 8), torch.randn(8 * 8 + 1)
    layer.weight = nn.Parameter(buffer[1:].view(8, 8))
    inputs, reads = torch.randn(3, 8), PackedReads([layer], True)
    with torch.no_grad(), closing(reads), reads.reading():
        assert torch.allclose(layer(inputs), nn.functional.linear(inputs, layer.weight, layer.bias), atol=1e-5)


def test_a_type_without_kernels_drops_the_copy() -> None:
    layer = nn.Linear(8, 8)
    with packed_call(layer):
        assert layer in packed_linear._KNOWN
    assert _num_bytes(PackedReads([layer.double()], True)) == 0
    assert layer not in packed_linear._KNOWN


def test_where_packing_fails_half_way_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, of_weight = _large(), _large(), packed_linear.PackedWeight

    def fail(weight: torch.Tensor) -> Any:
        if weight is other.weight:
            raise MemoryError("no memory left")
        return of_weight(weight)

    monkeypatch.setattr(packed_linear, "PackedWeight", fail)
    reads = PackedReads([one, other], packed_linear.AUTO)

    with closing(reads), reads.reading():
        assert not held(one, other)
        assert reads.num_held_bytes == 0
    assert reads.notes


def test_where_packing_fails_the_text_is_written_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(packed_linear, "PackedWeight", fail)
    monkeypatch.setattr(packed_linear, "LEAST_WEIGHTS", 1)
    target = make_target()

    pair = runs.informed(target, packing(target, packed_linear.AUTO, block_size=2))

    pair.assert_equal()
    assert pair.stats.packed_bytes == 0
    assert "Weights could not be packed, and were read as they are: no memory left." in pair.stats.notes
    with pytest.raises(RuntimeError, match="no memory left"):
        runs.drafted(target, packing(target, True, block_size=2))
    assert not held(target)


def test_reads_are_timed_by_the_clock_of_the_call(clock: HandClock, monkeypatch: pytest.MonkeyPatch) -> None:
    target, clocks = make_target(), []
    monkeypatch.setattr(packed_linear, "LEAST_WEIGHTS", 1)
    read_faster = PackedReads.read_faster

    def seen(self: Any, *inputs: Any) -> torch.Tensor:
        clocks.append(self._clock)
        return read_faster(self, *inputs)

    monkeypatch.setattr(PackedReads, "read_faster", seen)
    runs.drafted(target, packing(target, packed_linear.AUTO, block_size=2))

    assert set(clocks) == {clock}


def test_an_option_that_is_set_later_is_checked_in_the_call() -> None:
    target = make_target()
    with pytest.raises(OptionError, match=r"`pack_weights` must be one of \(True, False, 'auto'\), but it is"):
        runs.drafted(target, packing(target, "sometimes", block_size=2))
