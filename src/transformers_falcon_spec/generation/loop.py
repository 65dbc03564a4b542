"""The decoding loop: prefill, then propose, verify, commit, record until the text is complete. There is no other one."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel

from ..core.sampling import private_generator
from ..core.stats import GenerationStats
from ..core.tree import DraftTree
from ..core.verification import AcceptedPath, coverage
from .distributed import named_options, processes_of
from .drafting import Committed, Draft, DraftBudget, TargetView, TreeCandidateGenerator
from .layers import sliding_windows
from .options import SpeculationConfig
from .output import LayerStates, SpeculativeOutput, is_observed, report, show
from .probe import probe
from .sequence_batch import SequenceBatch
from .sparse_index import longest_draftable, note_of
from .target import Form, Target, TargetOutput
from .tuning.tuner import Tuner, tuner_of
from .verifier import REJECTION_RULES, Judge

MAX_NODES = 512  # per row; more would cost any target more than it can bring


class Drafter(Protocol):
    """What the loop needs of a drafter model."""

    feature_layers: tuple[int, ...]
    generation_config: SpeculationConfig
    members: Sequence["Drafter"]  # of which each step asks one; itself alone unless it is a pool

    def check_target(self, model: PreTrainedModel) -> None:
        """Refuse a target that the drafter was not made for."""
        ...

    def candidate_generator(self, target: TargetView, max_length: int, rng: torch.Generator) -> TreeCandidateGenerator:
        """A generator for one call."""
        ...


class SpeculativeDecoding:
    """One call of `generate` with a drafter; `run` returns what `generate` returns.

    Args:
        model ([`~transformers.PreTrainedModel`]): The target.
        drafter (`Drafter`): The drafter.
        batch ([`SequenceBatch`]): The texts, with processors, criteria and streamer.
        config ([`~transformers.GenerationConfig`]): As `generate` resolved it.
        model_kwargs (`dict`): As `generate` prepared them, cache and mask included.
        clock (`Callable[[], float]`, *optional*): Where all seconds of the call come from, those that the tuner learns from included.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter,
        batch: SequenceBatch,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.batch, self.config, self.model_kwargs, self.clock = batch, config, model_kwargs, clock
        self.ranks = processes_of(drafter, model)
        self.capability = self.ranks.broadcast(probe(model))
        self.target = Target(model, drafter.feature_layers, self.capability.has_hooks)
        self.max_length: int = config.max_length
        self.generator = drafter.candidate_generator(self.target, self.max_length, self._draft_draws())
        self.generator.clock = clock
        self.judge = Judge(batch, verifier_of(drafter, config), self.ranks)
        self.stats = GenerationStats.of_rows(len(batch))
        self.states = LayerStates(config, sliding_windows(self.target.config), len(batch))
        self.form: Form = self.capability.form
        if self.form == "paths" and (len(batch) > 1 or config.output_attentions):
            self.form = "chain"  # rows are taken, and weights stand in other slots
        where = (model.device, model.dtype, torch.get_num_threads())
        how = (self.form, self.judge.verifier, config.do_sample, config.temperature)
        circumstances = (*where, len(batch), *how)
        self.tuner = (
            tuner_of(drafter, model, self.judge.verifier, circumstances)
            if self.ranks.is_first
            else Tuner((), model.device)
        )
        if self.ranks.num > 1:
            self.stats.notes.append(
                f"{self.ranks.num} ranks write this text together: the first one decides for all of them."
            )
        if self.form != "tree":
            what = "chains only" if self.form == "chain" else "one row for each path of a draft"
            self.stats.notes.append(f"The target verifies {what}: {self.capability.reason}.")
        if self.max_length > longest_draftable(self.target.config):
            self.stats.notes.append(note_of(self.target.config))
        if not self.capability.has_hooks:
            self.stats.notes.append("Hooks may not fire in this target: features come from `output_hidden_states`.")

    def _draft_draws(self) -> torch.Generator:
        """What drafts are drawn from, the same on all ranks, which must write the same texts."""
        rng = private_generator()
        if self.ranks.num > 1:
            self.ranks.check_same({"prompts": self.batch.token_ids.tolist(), **named_options(self.config)})
            rng.set_state(self.ranks.broadcast(rng.get_state()))
        return rng

    def run(self) -> Tensor | SpeculativeOutput:
        """Write the whole text."""
        with self._seconds("total"), self.target.feature_hooks.active(), self.target.released():
            self.prefill()
            while not self.batch.is_complete:
                draft = self.propose()
                tree, verdicts, reading = self.verify(draft)
                self.commit(verdicts, reading)
                self.record(draft, tree, verdicts)
        self.batch.end()
        self.stats.count_tokens([len(row) - row.prompt_len for row in self.batch.rows])
        self.stats.tuning = self.tuner.to_json()
        report(self.stats)
        return self._output()

    def prefill(self) -> None:
        """Read the prompts; the logits of each one's last token give its first new token."""
        prompt_len = self.batch.prompt_len
        with self._seconds("prefill"):
            reading = self.target.prefill(self.batch.prompt_ids, self.config, self.model_kwargs)
            self.judge.begin(reading.logits[:, -1:])
            self.states.add_prompt(reading.outputs)
        num_read = prompt_len if reading.features is None else reading.features.shape[1]
        columns = [held[held >= prompt_len - num_read] - (prompt_len - num_read) for held in self.batch.held_columns]
        self._hand_over(columns, reading.features)

    def propose(self) -> Draft:
        """Drafts within what fits, or the roots alone: a plain step."""
        rooms = self._rooms()
        budget = None
        if any(rooms):
            full = self._budget(rooms)
            budget = self.ranks.limited(self.tuner.limited(full), full)
        draft = None
        if budget is not None:
            with self._seconds("draft"):
                draft = self.ranks.broadcast_draft(self.generator.propose(budget), self.batch.prompt_ids.device)
                self.stats.search_seconds += 0.0 if draft is None else draft.search_seconds
                self.tuner.wait()
        roots = self.batch.roots
        return Draft(roots, torch.full_like(roots, -1), num_passes=0) if draft is None else draft

    def _rooms(self) -> tuple[int, ...]:
        """How deep each row's draft may be: to the end of text, context, or of what the other rows still ask for."""
        rooms = []
        for row, context in enumerate(self.target.room_to_context):
            room = self.batch.end_of(row, self.max_length) - len(self.batch.rows[row]) - 1
            rooms.append(0 if self.batch.is_closed(row) else max(min(room, context), 0))
        return tuple(rooms)

    def _budget(self, rooms: tuple[int, ...]) -> DraftBudget:
        temperature = (self.config.temperature or 1.0) if self.config.do_sample else None
        is_foreseen = self.config.do_sample and self.judge.verifier not in REJECTION_RULES
        noise, is_chain = self._noise_ahead() if is_foreseen else None, self.form == "chain"
        return DraftBudget(rooms, MAX_NODES, None, is_chain, temperature, noise, wants_node_probs=is_observed())

    def _noise_ahead(self) -> Callable[[int, int], Tensor]:
        """The noise of each row's coming draws: a guess that shares it meets the target's token more often."""
        device, ahead = self.batch.prompt_ids.device, dict[int, Callable[[int], Tensor]]()

        def noise(row: int, depth: int) -> Tensor:
            if row not in ahead:  # not before it is asked for: most drafts of a pause never are
                ahead[row] = self.batch.rows[row].draws.noise_ahead(self.target.vocab_size, device)
            return ahead[row](depth)

        return noise

    def verify(self, draft: Draft) -> tuple[DraftTree, list[AcceptedPath], TargetOutput]:
        """Read the trees, then judge each row's: its tokens become text one by one."""
        device = self.batch.prompt_ids.device
        token_ids = draft.token_ids.to(device)
        parents = draft.parents.to(device).expand_as(token_ids)
        tree = DraftTree(parents, torch.zeros_like(parents))
        with self._seconds("verify"):
            is_alone = token_ids.shape[1] == 1  # read as plain decoding reads it: faster, and the same rounding
            form = "chain" if is_alone and not self.target.slots.is_ragged else self.form
            is_open = [not self.batch.is_closed(row) for row in range(len(self.batch))]
            with self._seconds("read"):
                reading = self.target.read(token_ids, tree, form, is_open)
                self.tuner.wait()
            trees = list(zip(parents.tolist(), token_ids.tolist(), strict=True))  # waits for the device once
        return tree, self.judge(draft, trees, tree.depths, reading), reading

    def commit(self, verdicts: list[AcceptedPath], reading: TargetOutput) -> None:
        """Keep each row's path in the target's cache and tell the drafter what became text."""
        paths = [verdict.path for verdict in verdicts]
        self.states.add_paths(reading.outputs, paths, self.target.slots.places)
        self.target.keep(reading.logits.shape[1], paths)
        choices = reading.logits.argmax(dim=-1) if self.generator.wants_node_choices else None
        self._hand_over([torch.tensor(path, dtype=torch.long) for path in paths], reading.features, choices)

    def record(self, draft: Draft, tree: DraftTree, verdicts: list[AcceptedPath]) -> None:
        """Count the step of every row that took one."""
        parents, depths = tree.parents, tree.depths
        parent_lists = parents.tolist()
        num_drafted = [len(row) - row.count(-1) for row in parent_lists]
        if draft.is_lookahead is not None:  # nobody offers them
            is_lookahead = draft.is_lookahead.to(parents.device)
            parents, depths = parents.masked_fill(is_lookahead, -1), depths.masked_fill(is_lookahead, 0)
            parent_lists = parents.tolist()
        depth_lists = depths.tolist()
        for row, verdict in enumerate(verdicts):
            if not verdict.path:
                continue
            max_depth = max(depth_lists[row])
            if self.batch.is_closed(row):  # what lies below the last token was never asked for
                max_depth = min(max_depth, verdict.num_accepted)
            self.stats.record(
                row=row,
                num_nodes=num_drafted[row] + 1,
                max_depth=max_depth,
                num_accepted=verdict.num_accepted,
                coverage=self._coverage(row, parent_lists[row], draft, verdict) if num_drafted[row] else (),
            )
        num_kept = [verdict.num_accepted for verdict in verdicts if verdict.path]
        self.tuner.learn(draft, num_kept, self.stats.draft_seconds, self.stats.read_seconds)
        self.stats.num_passes += draft.num_passes
        show(draft, verdicts)

    def _coverage(self, row: int, parents: list[int], draft: Draft, verdict: AcceptedPath) -> list[float]:
        probs = torch.softmax(torch.cat(self.batch.rows[row].step_scores), dim=-1)
        return coverage(probs, parents, draft.token_ids[row].tolist(), verdict.path)

    def _hand_over(self, columns: list[Tensor], features: Tensor | None, choices: Tensor | None = None) -> None:
        """Tell the drafter the newest tokens; their features stand in these columns of each row."""
        ids, lengths = self.batch.token_ids, self.batch.num_token_ids
        if features is not None:
            kept = [row[chosen.to(row.device)] for row, chosen in zip(features, columns, strict=True)]
            features = kept[0][None] if len(kept) == 1 else pad_sequence(kept, batch_first=True)
        self.generator.commit(Committed(ids, lengths, tuple(map(len, columns)), features, choices))

    @contextmanager
    def _seconds(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to `<phase>_seconds`; on a device, work queued earlier counts where it is awaited."""
        start = self.clock()
        try:
            yield
        finally:
            name = f"{phase}_seconds"
            setattr(self.stats, name, getattr(self.stats, name) + self.clock() - start)

    def _output(self) -> Tensor | SpeculativeOutput:
        if not self.config.return_dict_in_generate:
            return self.batch.sequences
        return SpeculativeOutput(
            sequences=self.batch.sequences,  # type: ignore[arg-type]  # `LongTensor` there means any ids
            scores=self.batch.outputs("scores"),  # type: ignore[arg-type]  # `tuple[X]` there means any number of them
            logits=self.batch.outputs("logits"),  # type: ignore[arg-type]
            hidden_states=self.states.hidden_states,  # type: ignore[arg-type]
            attentions=self.states.attentions,  # type: ignore[arg-type]
            past_key_values=self.target.cache,
            speculation=self.stats,
        )


def verifier_of(drafter: Drafter, config: GenerationConfig) -> str:
    """The rule that decides what of a draft becomes text; greedy decoding has one right answer, so it always walks."""
    return drafter.generation_config.verifier if config.do_sample else "lazy_walk"
