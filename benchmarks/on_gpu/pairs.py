"""A target at one shape, and the ways to write text with it: drafters are made when a way first needs them."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel, StaticCache

from benchmarks.inflation import SHAPES, Shape, inflate, inflate_drafter
from transformers_falcon_spec import Draft, SpeculationConfig, TreeCandidateGenerator
from transformers_falcon_spec.commands.loading import load_drafter, load_target
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.methods import Method, with_options
from transformers_falcon_spec.generation.drafting import Committed, DraftBudget, NoDrafts
from transformers_falcon_spec.transformers_versions import CACHE

from .cells import EAGER, EMBEDDED, FALCON5, ORACLES, RANDOM, ROOT, Way

LONGEST = 2**17  # positions of every target: rotary ones have no table, and the small pair's own limit is lower
ORACLE_NODES = 16  # read in each step, however many are kept
FOLDERS = {EMBEDDED: "falcon-reference", FALCON5: "falcon5"}  # the first in `--models`, the second in `--trained`


class RootDrafter:
    """A drafter that never drafts: the loop's own plain decoding, which is captured."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self, target: PreTrainedModel, options: SpeculationConfig) -> None:
        self.generation_config = options
        sizes = {"is_encoder_decoder": False, "vocab_size": target.config.vocab_size}
        self.config = SimpleNamespace(**sizes, get_text_config=lambda **_: self.config)

    def check_target(self, model: PreTrainedModel) -> None:
        """Any target will do."""

    def candidate_generator(self, target: Any, max_length: int, rng: torch.Generator) -> TreeCandidateGenerator:
        """A generator for one call."""
        return NoDrafts(self, target, max_length, rng)


class OracleGenerator(TreeCandidateGenerator):
    """Drafts a chain of the coming text, in which the token behind those that are to be kept is wrong."""

    def __init__(self, drafter: "OracleDrafter", target: Any, max_length: int, rng: torch.Generator) -> None:
        super().__init__(drafter, target, max_length, rng)
        self._committed: Committed | None = None

    def commit(self, committed: Committed) -> None:
        """Keep the text."""
        self._committed = committed

    def propose(self, budget: DraftBudget) -> Draft | None:
        """A chain for each row, as deep as the budget allows."""
        assert self._committed is not None  # a prompt was committed
        lengths, num_kept = self._committed.lengths, self.drafter.num_tokens - 1
        depth = min(ORACLE_NODES, budget.num_nodes, max(budget.depths) + 1) - 1
        coming = torch.zeros(len(lengths), depth, dtype=torch.long)
        parents = torch.full((len(lengths), depth + 1), -1)

        for row, length in enumerate(lengths):
            known = self.drafter.texts[row][length : length + depth]
            coming[row, : len(known)] = known
            num_nodes = min(depth, budget.depths[row]) + 1
            parents[row, :num_nodes] = torch.arange(-1, num_nodes - 1)

        if num_kept < depth:
            coming[:, num_kept] = (coming[:, num_kept] + 1) % self.target.vocab_size
        roots = torch.stack(
            [ids[length - 1] for ids, length in zip(self._committed.sequence_ids, lengths, strict=True)]
        )
        return Draft(torch.cat([roots[:, None], coming.to(roots.device)], dim=1), parents, max_depth=depth)


class OracleDrafter(RootDrafter):
    """A drafter that knows the text: how fast steps are that write so many tokens, whatever drafts them.

    `texts` must be set before a call: of each row the ids of the prompt and of what plain decoding writes behind it.
    """

    def __init__(self, target: PreTrainedModel, options: SpeculationConfig, num_tokens: int) -> None:
        super().__init__(target, options)
        self.num_tokens = num_tokens  # of a step, the one behind the draft included
        self.texts: list[torch.Tensor] = []

    def candidate_generator(self, target: Any, max_length: int, rng: torch.Generator) -> TreeCandidateGenerator:
        """A generator for one call."""
        return OracleGenerator(self, target, max_length, rng)


def captured_plain(target: PreTrainedModel, *, captures: bool, compiles: bool) -> RootDrafter:
    """What makes a call of `generate` captured plain decoding: the one place that knows how it is asked for."""
    return RootDrafter(target, SpeculationConfig(capture=captures, compile=compiles, tune=False))


def folder_of(who: str, models: Path, trained: Path | None) -> Path:
    """Where a drafter is.

    Raises:
        [`OptionError`]: it is not there.
    """
    option, parent = ("models", models) if who == EMBEDDED else ("trained", trained)
    folder = None if parent is None else parent / FOLDERS[who]
    if folder is None or not folder.is_dir():
        raise OptionError(f"`--{option}` must name a folder that holds `{FOLDERS[who]}`, but it is `{parent}`.")
    return folder


def why_absent(way: Way, models: Path, trained: Path | None) -> str | None:
    """Why a way cannot be taken here, because its drafter is not at hand; None if it can."""
    if way.who not in FOLDERS:
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
        dtype (`torch.dtype`): Of all weights.
        device (`torch.device`): Where all of them are.
    """

    models: Path
    trained: Path | None
    shape: str
    dtype: torch.dtype
    device: torch.device
    _drafters: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.small, self.tokenizer = load_target(str(self.models / "reference-target"), "float32", "cpu")
        self.target: Any = self._sized(self.small, inflate)
        self.target.config.max_position_embeddings = LONGEST

    def _sized(self, model: Any, widen: Callable[..., Any]) -> Any:
        kind: Any = {"dtype": self.dtype, "device": self.device}
        return model.to(**kind) if self.shape == "small" else widen(model, SHAPES[self.shape], **kind)

    def method(self, way: Way, num_slots: int) -> Method:
        """The way as arguments of `generate`; `num_slots` is the longest text of the cell."""
        if way.who == EAGER:
            return Method(way.name, "target alone", num_nodes=1)
        if way.is_stock:
            cache = {CACHE: StaticCache(config=self.target.config, max_cache_len=num_slots)}
            return Method(way.name, "target alone", options=cache, num_nodes=1)

        assert way.captures is not None  # of this package's loop
        if way.who == ROOT:
            plain = captured_plain(self.target, captures=way.captures, compiles=way.compiles)
            return Method(way.name, "drafter", plain, num_nodes=1)
        if way.who in ORACLES:
            known = SpeculationConfig(capture=way.captures, compile=way.compiles, tune=False)
            drafter = OracleDrafter(self.target, known, ORACLES[way.who])
            return Method(way.name, "drafter", drafter, num_nodes=ORACLE_NODES)

        drafter = self.drafter(way.who)
        options = copy.deepcopy(drafter.generation_config)
        options.capture, options.compile = way.captures, way.compiles
        return Method(way.name, "drafter", with_options(drafter, options))

    def drafter(self, who: str) -> Any:
        """The drafter of that name for this target."""
        if who not in self._drafters:
            self._drafters[who] = self._untrained() if who == RANDOM else self._loaded(who)
        return self._drafters[who]

    def _loaded(self, who: str) -> Any:
        folder = folder_of(who, self.models, self.trained)
        return self._sized(load_drafter(str(folder), self.small), self._widened)

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
