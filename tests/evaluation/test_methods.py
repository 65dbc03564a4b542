"""Methods of a benchmark: stock ones run without this package, runs are independent, counts come from hooks."""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation import utils
from transformers.generation.candidate_generator import AssistedCandidateGenerator, PromptLookupCandidateGenerator
from transformers.generation.streamers import BaseStreamer

from tests.chat import make_tokenizer
from tests.drafters.dflash.test_stock import peaked_dflash
from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec import GenerationStats, attach, disable, enable
from transformers_falcon_spec.errors import PatchError
from transformers_falcon_spec.evaluation import methods as methods_module
from transformers_falcon_spec.evaluation.benchmark import Benchmark
from transformers_falcon_spec.evaluation.methods import (
    Method,
    decoding_options,
    prompt_lookup,
    stock_assistant,
    stock_dflash,
    target_alone,
    with_drafter,
)
from transformers_falcon_spec.evaluation.prompts import Prompt
from transformers_falcon_spec.generation import timed
from transformers_falcon_spec.generation.timed import ForwardWatch, _counts, timed_generate, watched_stats

LOOPING = torch.cat([make_prompt(6)] * 4, dim=1)  # something to look up
GREEDY = decoding_options("greedy")
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target()


def make_assistant(noise: float = 0.02) -> PreTrainedModel:
    """The target, slightly off: it is right often, but not always."""
    assistant = make_target()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(3)
        for weight in assistant.parameters():
            weight.add_(noise * weight.std() * torch.randn_like(weight))
    return assistant


def methods(target: PreTrainedModel) -> list[Method]:
    return [
        target_alone(),
        prompt_lookup("lookup", 4),
        stock_assistant("sps", make_assistant()),
        stock_dflash("dflash", peaked_dflash(target, target_layer_ids=[0])),
        with_drafter("falcon", make_drafter(target)),
    ]


@contextmanager
def files_called() -> Iterator[set[str]]:
    """The files of all Python functions that are called inside."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("index", range(5), ids=["alone", "lookup", "sps", "dflash", "falcon"])
def test_stock_methods_run_without_a_line_of_this_package(target: PreTrainedModel, index: int) -> None:
    method = methods(target)[index]
    arguments = method.arguments()

    with method.path(target), files_called() as files:
        target.generate(make_prompt(), max_new_tokens=8, do_sample=False, **arguments)

    ours = {name for name in files if "transformers_falcon_spec" in name and "tests" not in Path(name).parts}
    assert bool(ours) == (not method.is_stock)


@pytest.mark.parametrize("index", [1, 2], ids=["lookup", "sps"])
@pytest.mark.parametrize("decoding", ["greedy", "temperature-0.7"])
def test_a_stock_method_is_what_plain_generate_writes(target: PreTrainedModel, index: int, decoding: str) -> None:
    method, options = methods(target)[index], decoding_options(decoding)
    disable()
    torch.manual_seed(5)
    expected = target.generate(LOOPING, max_new_tokens=12, **options, **method.arguments())
    enable()

    with method.path(target):
        run = timed_generate(target, LOOPING, 12, options, 5, **method.arguments())

    assert run.new_ids == expected[0, LOOPING.shape[1] :].tolist()


def test_the_seam_is_as_it_was_after_a_stock_run_that_raises(target: PreTrainedModel) -> None:
    drafter = make_drafter(target)

    with pytest.raises(KeyError), target_alone().path(target):
        raise KeyError

    out = target.generate(make_prompt(), max_new_tokens=4, assistant_model=drafter, return_dict_in_generate=True)
    assert out.speculation.num_tokens == 4
    disable()
    try:
        with target_alone().path(target):
            pass
        assert not hasattr(utils.GenerationMixin._assisted_decoding, "_is_falcon_spec_patch")
    finally:
        enable()


def test_a_target_with_a_seam_of_its_own_is_refused_as_stock() -> None:
    model = attach(make_target())

    with pytest.raises(PatchError, match="must have Transformers' own functions here, but `attach` gave it others"):
        target_alone().path(model).__enter__()


def test_runs_with_an_assistant_that_remembers_do_not_depend_on_each_other(target: PreTrainedModel) -> None:
    assistant = make_target()  # always right: the heuristic drafts more in every step
    assistant.generation_config.num_assistant_tokens = 3
    assistant.generation_config.num_assistant_tokens_schedule = "heuristic"
    method = stock_assistant("sps", assistant)
    seen = []

    for _ in range(2):
        arguments = method.arguments()
        seen.append(assistant.generation_config.num_assistant_tokens)
        with method.path(target):
            target.generate(make_prompt(), max_new_tokens=16, do_sample=False, **arguments)

    assert seen == [3, 3]
    assert assistant.generation_config.num_assistant_tokens > 3  # it does remember, until it is reset
    assert method.settings["num_assistant_tokens_schedule"] == "heuristic"


def test_the_settings_of_stock_methods_are_the_ones_used(target: PreTrainedModel) -> None:
    assistant = make_assistant()
    settings = stock_assistant("sps", assistant).settings

    used = AssistedCandidateGenerator(make_prompt(), assistant, target.generation_config, {}).__dict__
    assert settings["num_assistant_tokens"] == used["num_assistant_tokens"]
    assert settings["assistant_confidence_threshold"] == used["assistant_confidence_threshold"]
    assert settings["num_assistant_tokens_schedule"] == "constant"


def test_methods_that_write_otherwise_have_another_identity(target: PreTrainedModel) -> None:
    drafter, other = make_drafter(target), make_drafter(target, seed=2)

    found = [
        with_drafter("a", drafter),
        with_drafter("a", other),
        prompt_lookup("a", 3),
        prompt_lookup("a", 4),
        target_alone(),
    ]

    assert len({method.identity() for method in found}) == len(found)
    assert with_drafter("a", drafter).identity() == with_drafter("b", drafter).identity()


class Chunks(BaseStreamer):
    """How many tokens each step of the stock loop committed."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.sizes.append(value.numel())

    def end(self) -> None:
        pass


def counted_by_hand(method: Method, target: PreTrainedModel, seed: int, options: Any, patch: Any) -> GenerationStats:
    """The naive twin: the loop's own streamer says what was committed, and its candidates are noted."""
    offered: list[int] = []
    for kind in (PromptLookupCandidateGenerator, AssistedCandidateGenerator):
        original = kind.get_candidates

        def noted(self: Any, input_ids: torch.Tensor, *rest: Any, _original: Any = original, **kwargs: Any) -> Any:
            candidates = _original(self, input_ids, *rest, **kwargs)
            offered.append(candidates[0].shape[1] - input_ids.shape[1])
            return candidates

        patch.setattr(kind, "get_candidates", noted)
    chunks = Chunks()
    torch.manual_seed(seed)
    with method.path(target):
        target.generate(LOOPING, max_new_tokens=NUM_TOKENS, streamer=chunks, **options, **method.arguments())
    patch.undo()
    stats = GenerationStats(num_tokens=sum(chunks.sizes[1:]))
    steps = list(zip(offered, chunks.sizes[1:], strict=True))[1:]
    for step, (num_candidates, num_committed) in enumerate(steps, start=1):
        depth = num_committed - 1 if step == len(steps) else num_candidates
        stats.record(num_nodes=num_candidates + 1, max_depth=depth, num_accepted=num_committed - 1)
    return stats


@pytest.mark.parametrize(
    ("index", "decoding"),
    [(1, "temperature-0.7"), (2, "greedy"), (2, "temperature-0.7")],
    ids=["lookup", "sps-greedy", "sps"],
)
def test_counts_from_outside_are_those_of_the_loop(
    target: PreTrainedModel, index: int, decoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, options = methods(target)[index], decoding_options(decoding)
    expected = counted_by_hand(method, target, 7, options, monkeypatch)

    with method.path(target):
        stats = watched_stats(target, LOOPING, NUM_TOKENS, options, 7, method.arguments())

    for name in ("num_tokens", "num_steps", "num_drafted", "num_accepted", "acceptance_histogram"):
        assert getattr(stats, name) == getattr(expected, name), name
    assert stats.acceptance_by_depth == expected.acceptance_by_depth
    assert stats.num_accepted > 0
    assert stats.prefill_seconds > 0
    assert stats.verify_seconds > 0
    assert (stats.draft_seconds > 0) == (method.assistant is not None)
    assert stats.prefill_seconds + stats.draft_seconds + stats.verify_seconds < stats.total_seconds


class Forwards:
    """A clock that only forwards advance: forward number i takes 2^i seconds, so that each sum shows its terms."""

    def __init__(self, patch: pytest.MonkeyPatch, **models: PreTrainedModel | None) -> None:
        self.now, self.who = 0.0, []
        for name, model in models.items():
            if model is not None:
                patch.setattr(model, "forward", self._counted(name, model.forward))
        patch.setattr(timed, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def _counted(self, name: str, forward: Any) -> Any:
        @functools.wraps(forward)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.now += 2.0 ** len(self.who)
            self.who.append(name)
            return forward(*args, **kwargs)

        return counted

    def seconds(self, who: str, part: slice = slice(None)) -> float:
        """Of the forwards of one model among some."""
        return sum(2.0**number for number, name in list(enumerate(self.who))[part] if name == who)


@pytest.mark.parametrize("index", [1, 2], ids=["lookup", "sps"])
def test_the_first_forward_of_a_stock_run_and_its_drafts_are_the_prefill_and_nothing_else_is(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target()
    method = methods(target)[index]
    clock = Forwards(monkeypatch, target=target, assistant=method.assistant)

    with method.path(target):
        stats = watched_stats(target, LOOPING, 8, GREEDY, 0, method.arguments())

    first = clock.who.index("target")
    before, after = slice(first + 1), slice(first + 1, None)
    assert stats.prefill_seconds == clock.seconds("target", before) + clock.seconds("assistant", before)
    assert stats.draft_seconds == clock.seconds("assistant", after)
    assert stats.num_passes == clock.who[after].count("assistant")
    assert stats.verify_seconds == clock.seconds("target", after) > 0
    assert stats.total_seconds == clock.now
    assert (first > 0) == (stats.draft_seconds > 0) == (method.assistant is not None)


@pytest.mark.parametrize("index", range(3), ids=["alone", "lookup", "sps"])
def test_the_prefill_of_a_stock_run_is_that_of_a_text_of_one_token(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target()
    method = methods(target)[index]
    prompts = [Prompt("sums", "a", (("user", "one plus two"),))]
    benchmark = Benchmark(target, make_tokenizer(), [], prompts, ["greedy"], 6)
    clock, calls = Forwards(monkeypatch, target=target, assistant=method.assistant), []
    run = timed_generate
    noted = lambda *args, **kwargs: calls.append((args[2], clock.now, run(*args, **kwargs), clock.now)) or calls[-1][2]  # noqa: E731
    monkeypatch.setattr(methods_module, "timed_generate", noted)

    record = benchmark._measure(method, "greedy", prompts[0])

    first, whole = calls
    assert (first[0], whole[0]) == (1, 6)
    assert record["prefill_seconds"] == first[3] - first[1] > 0
    assert record["seconds"] == whole[3] - whole[1] > record["prefill_seconds"]


def test_a_run_on_the_cpu_leaves_a_gpu_alone(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waited.append("started, and filled"))

    run = timed_generate(target, LOOPING, 2, GREEDY, 0)

    assert (len(run.new_ids), waited) == (2, [])


def test_watching_leaves_no_hooks(target: PreTrainedModel) -> None:
    method = prompt_lookup("lookup", 4)

    with pytest.raises(ValueError, match="max_new_tokens"):
        watched_stats(target, LOOPING, -1, GREEDY, 0, method.arguments())

    assert not target._forward_hooks
    assert not target._forward_pre_hooks


def test_what_lies_below_the_end_of_a_text_is_not_counted_as_offered() -> None:
    watch = ForwardWatch()
    watch.num_read, watch.num_cached, watch.seconds = (
        [10, 4, 5],
        [0, 10, 12],
        [0.1, 0.1, 0.1],
    )  # 9 + 1, root + 3, root + 4

    stats = _counts(
        watch, prompt_len=9, num_tokens=6
    )  # 2 of the first forward, 2 of the second, and 2 of 5 before the end

    assert (stats.num_steps, stats.num_drafted, stats.num_accepted, stats.num_tokens) == (2, 7, 2, 6)
    assert stats.offered_by_depth == [2, 1, 0]
    assert stats.acceptance_by_depth == [1.0, 0.0, 0.0]
