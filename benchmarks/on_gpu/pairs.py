"""A target at one shape, and the ways to write text with it: drafters are made when a way first needs them."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModel, PreTrainedModel, StaticCache

from benchmarks.inflation import SHAPES, Shape, inflate, inflate_drafter
from benchmarks.inflation.__main__ import load_small_drafter
from transformers_falcon_spec import Draft, LayerParallelDrafter, SpeculationConfig, TreeCandidateGenerator
from transformers_falcon_spec.commands.loading import load_target
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.methods import (
    Method,
    prompt_lookup,
    stock_assistant,
    stock_dflash,
    with_options,
)
from transformers_falcon_spec.generation.drafting import Committed, DraftBudget
from transformers_falcon_spec.transformers_versions import CACHE

from .cells import ASSISTED, DFLASH, EAGER, EMBEDDED, LOOKUP, RANDOM, ROOT, STATIC_CACHE, Way

LONGEST = 2**17  # positions of every target: rotary ones have no table, and the small pair's own limit is lower
OURS = {EMBEDDED: "falcon-reference", "lookahead": "lookahead", "DiffuSpec": "diffuspec-prefix"}  # in `models/`
TRAINED = {name: name for name in ("falcon3", "falcon5", "eagle1", "eagle3")}  # in the folder of `--trained`
TRAINED |= {"language model": "draft-model", "EasySpec": "draft-model", ASSISTED: "draft-model", DFLASH: "dflash"}


class RootGenerator(TreeCandidateGenerator):
    """Never drafts, and reads nothing of the target."""

    feature_layers = ()

    def commit(self, committed: Committed) -> None:
        """Keep nothing."""

    def propose(self, budget: DraftBudget) -> Draft | None:
        """No draft: every step reads the root alone."""


class RootDrafter:
    """A drafter that never drafts: the loop's own plain decoding, which is captured."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self, target: PreTrainedModel, options: SpeculationConfig) -> None:
        self.generation_config = options
        sizes = {"is_encoder_decoder": False, "vocab_size": target.config.vocab_size}
        self.config = SimpleNamespace(**sizes, get_text_config=lambda **_: self.config)

    def check_target(self, model: PreTrainedModel) -> None:
        """Any target will do."""

    def candidate_generator(self, target: Any, max_length: int, rng: torch.Generator) -> RootGenerator:
        """A generator for one call."""
        return RootGenerator(target, max_length, rng)


def captured_plain(target: PreTrainedModel, *, captures: bool, compiles: bool) -> RootDrafter:
    """What makes a call of `generate` captured plain decoding: the one place that knows how it is asked for."""
    return RootDrafter(target, SpeculationConfig(capture=captures, compile=compiles, tune=False))


def folder_of(who: str, models: Path, trained: Path | None) -> Path:
    """Where a drafter is.

    Raises:
        [`OptionError`]: it is not there.
    """
    folder = models / OURS[who] if who in OURS else trained / TRAINED[who] if trained is not None else None
    if folder is None or not folder.is_dir():
        name, option = (OURS[who], "models") if who in OURS else (TRAINED[who], "trained")
        raise OptionError(
            f"`--{option}` must name a folder that holds `{name}`, but it is `{folder and folder.parent}`."
        )
    return folder


def why_absent(way: Way, models: Path, trained: Path | None) -> str | None:
    """Why a way cannot be taken here, because its drafter is not at hand; None if it can."""
    if way.who not in OURS and way.who not in TRAINED:
        return None
    try:
        folder_of(way.who, models, trained)
    except OptionError as error:
        return str(error)
    return None


@dataclass
class Pair:
    """A target of one shape on a device, its tokenizer, and its drafters.

    Args:
        models (`Path`): The folder of the embedded pair.
        trained (`Path`, *optional*): The folder of other drafters for its target.
        shape (`str`): `small`, the pair as it is, or a name in `SHAPES`.
        vocab_size (`int`, *optional*): Tokens of the target, where they are not the shape's.
        dtype (`torch.dtype`): Of all weights.
        device (`torch.device`): Where all of them are.
    """

    models: Path
    trained: Path | None
    shape: str
    vocab_size: int | None
    dtype: torch.dtype
    device: torch.device
    _drafters: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.small, self.tokenizer = load_target(str(self.models / "reference-target"), "float32", "cpu")
        self.target: Any = self._sized(self.small, inflate)
        self.target.config.max_position_embeddings = LONGEST

    @property
    def _size(self) -> Shape | None:
        """The sizes to inflate to; None leaves the pair as it is."""
        if self.shape == "small":
            return None
        shape = SHAPES[self.shape]
        return shape if self.vocab_size is None else replace(shape, vocab_size=self.vocab_size)

    def _sized(self, model: Any, widen: Callable[..., Any]) -> Any:
        kind: Any = {"dtype": self.dtype, "device": self.device}
        return model.to(**kind) if self._size is None else widen(model, self._size, **kind)

    def method(self, way: Way, num_slots: int) -> Method:
        """The way as arguments of `generate`; `num_slots` is the longest text of the cell."""
        cache = {CACHE: StaticCache(config=self.target.config, max_cache_len=num_slots)}
        stock: dict[str, Callable[[], Method]] = {
            EAGER: lambda: Method(way.name, "target alone", num_nodes=1),
            STATIC_CACHE: lambda: Method(way.name, "target alone", options=cache, num_nodes=1),
            LOOKUP: lambda: prompt_lookup(way.name),
            ASSISTED: lambda: stock_assistant(way.name, self.drafter(ASSISTED)),
            DFLASH: lambda: stock_dflash(way.name, self.drafter(DFLASH)),
        }
        if way.is_stock:
            return stock[way.who]()
        assert way.captures is not None  # of this package's loop
        if way.who == ROOT:
            plain = captured_plain(self.target, captures=way.captures, compiles=way.compiles)
            return Method(way.name, "drafter", plain, num_nodes=1)
        drafter = self.drafter(way.who)
        options = copy.deepcopy(drafter.generation_config)
        options.capture, options.compile = way.captures, way.compiles
        return Method(way.name, "drafter", with_options(drafter, options), block_size=drafter.block_size)

    def drafter(self, who: str) -> Any:
        """The drafter of that name for this target."""
        if who not in self._drafters:
            self._drafters[who] = self._untrained() if who == RANDOM else self._loaded(who)
        return self._drafters[who]

    def _loaded(self, who: str) -> Any:
        folder = folder_of(who, self.models, self.trained)
        if who == DFLASH:
            if self._size is not None:
                raise OptionError("DFlash drafters cannot be inflated: they run at the shape `small`.")
            return AutoModel.from_pretrained(folder, dtype=self.dtype).eval().to(self.device)
        drafter = self._sized(load_small_drafter(str(folder), self.small), self._widened)
        if who in ("language model", "EasySpec"):
            groups = {"group_size": 1} if who == "language model" else {}
            return LayerParallelDrafter.wrap(drafter, self.target, **groups)
        return drafter

    def _widened(self, drafter: Any, shape: Shape, **kind: Any) -> Any:
        return inflate_drafter(drafter, self.small, shape, **kind)

    def _untrained(self) -> Any:
        """The embedded drafter with random weights, from a seed."""
        trained = self.drafter(EMBEDDED)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            drafter = type(trained)(copy.deepcopy(trained.config))
        drafter.generation_config = copy.deepcopy(trained.generation_config)
        return drafter.to(device=self.device, dtype=self.dtype).eval()
