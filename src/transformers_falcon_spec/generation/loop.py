"""The decoding loop: prefill, then propose, read, accept, trim and record until all rows have ended."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel

from ..core.stats import GenerationStats
from ..core.tree import MAX_NODES, DraftTree
from ..core.verification import AcceptedPath
from ..errors import DraftTreeError, TargetError
from ..transformers_versions import CACHE
from .acceptors import (
    AcceptedStep,
    FollowingAcceptor,
    HostAcceptor,
    LockstepAcceptor,
    SpoiledReadError,
    trees_of,
)
from .audit import SLOTS, Audit, audited_lengths
from .capture.eligibility import NO_MEMORY, why_not_repeated
from .capture.graph import PhaseTimer
from .distributed import processes_of
from .drafting import (
    NO_DRAFTS,
    Committed,
    Draft,
    DraftBudget,
    Drafter,
    FixedGenerator,
    Kept,
    NoDrafts,
    TreeCandidateGenerator,
)
from .inputs import longest_text
from .model_parts import named, sliding_windows
from .output import (
    CHANGED,
    OBSERVERS,
    READ_ANEW,
    LayerStates,
    SpeculativeOutput,
    generated,
    reported,
)
from .packed_linear import PackedReads
from .plan import FORMS, notes_of_uncaptured, plan_of
from .probe import probe
from .sequence_batch import SequenceBatch
from .stock_cache import num_tokens
from .target import Form, Target, TargetOutput
from .target_look import look_at
from .text_limits import check_switches
from .tuning import TUNER, CostModel, known_costs
from .verifier import TOKEN_MATCHING

NUM_CHECKED = 4  # first steps of a call whose drafts are looked at on every device
LEAST_SHARE = 1 / 8  # of the rows that are read, which must have ended before the states of the others are copied


class SpeculativeDecoding:
    """One call of `generate` with a drafter; `run` returns what `generate` returns. `clock` gives all seconds."""

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter,
        batch: SequenceBatch,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafter = drafter
        self.batch = batch
        self.config = config
        self.model_kwargs = model_kwargs
        self.clock = clock

        self.processes = processes_of(drafter, model)
        self.look = look_at(model)
        capability = self.processes.broadcast(probe(model, batch.reader, self.look))
        if drafter.feature_layers and capability.head_fault:
            raise TargetError(
                f"A `{type(drafter).__name__}` drafts through the head of its target, but that of {named(model)} "
                f"cannot be used alone: {capability.head_fault}. Take a drafter that needs none, such as a "
                "`LookaheadDrafter`."
            )

        end = longest_text(batch.prompt_ids, model_kwargs, config)
        plan = plan_of(model, drafter, config, capability, len(batch), self.processes.num, end)
        self.target = Target(
            model,
            drafter.feature_layers,
            plan.form,
            plan.has_hooks,
            plan.captures,
            plan.backend,
            counts_padding=plan.counts_padding,
        )
        rows = [GenerationStats() for _ in batch.rows]
        self.stats = GenerationStats(notes=list(plan.notes), rows=rows if len(rows) > 1 else [])

        rng = self.processes.draft_rng(batch.texts[0], config)
        if plan.form == "plain":  # a drafter that is made may ask the target for what hooks would see
            self.generator: TreeCandidateGenerator = NoDrafts(drafter, self.target, config.max_length, rng)
        else:
            self.generator = drafter.candidate_generator(self.target, config.max_length, rng)

        temperature = (config.temperature or 1.0) if config.do_sample else None
        self._budget = DraftBudget((0,), 1, temperature=temperature)  # of each draft, but for its depths and nodes
        self._shows_noise = config.do_sample and not batch.verifier.needs_draft_probs  # of the coming draws
        self._kept: Kept | None = None  # by the newest step, in buffers: the generator gets it with the next draft
        self._num_allowed = MAX_NODES  # nodes of a draft

        kind = LockstepAcceptor if batch.is_lockstep else HostAcceptor
        acceptor = kind if self.processes.is_first else FollowingAcceptor
        self.acceptor = acceptor(batch, batch.verifier, self.processes)
        self.audit = Audit(audited_lengths(self.target.config, end), capability.error)
        self._overflowing: list[int] = []  # numbers of rows whose text overflows by itself
        self._why_rows_stay: str | None = None  # that have ended, where some could have left
        self.observers = OBSERVERS.get()
        self.states = LayerStates(config, sliding_windows(self.target.config), len(batch))

        self._timer: PhaseTimer | None = None
        self.tuner = TUNER.get()(self._cost_model(), self.target.device)
        is_packed = drafter.generation_config.pack_weights if plan.backend is None else False  # not compiled
        self.packed = PackedReads((model, drafter), is_packed, clock)

    def run(self) -> Tensor | SpeculativeOutput:
        """Write the whole text."""
        with (
            reported(self.stats),
            self._seconds("total"),
            self.target.feature_hooks.active(),
            closing(self.target),
            closing(self.packed),
        ):
            self.prefill()
            while any(self.batch.is_open):
                self.step()
            self.stats.packed_bytes = self.packed.num_held_bytes

        self.stats.notes += self.packed.notes
        if self._why_rows_stay is not None:
            self.stats.notes.append(f"Rows that had ended were read until the last one ended: {self._why_rows_stay}.")
        if look_at(self.target.model).guests != self.look.guests:
            self.stats.note(CHANGED)
        self.stats.notes += self.target.end_notes

        self.batch.end()
        self.stats.count_tokens([len(row) - row.prompt_len for row in self.batch.all_rows])
        self.stats.tuning = self.tuner.to_json()
        return generated(self.config, self.batch, self.states, self.target.cache, self.stats)

    def prefill(self) -> None:
        """Read the prompts, write the first token of each row, and give the drafter the prompts' features."""
        prompt_len = self.batch.prompt_len
        if self.look.foreign:  # a hook may tell the prompt from what follows by how many tokens are read
            num_new = prompt_len - num_tokens(self.model_kwargs[CACHE])
            self._num_allowed = min(max(num_new - 1, 1), MAX_NODES)

        with self._seconds("prefill"):
            check_switches(self.target.model, self.batch.prompt_ids, self.model_kwargs, self.config)
            output = self.target.prefill(self.batch.prompt_ids, self.config, self.model_kwargs)
            self.accept(self._draft_of_roots(), output.logits[:, -1:])
            self.states.add_prompt(output.outputs)
            if any(self.batch.is_open):
                self._move_text(output.logits.shape[-1])
            if len(self.batch) > 1 and self.target.form != "plain" and self.target.why_in_step is not None:
                self._take_form("plain", f"rows must keep in step, as {self.target.why_in_step}")

        if self.target.fixed is not None and self.target.fixed.state.device.type == "cuda":
            self._timer = PhaseTimer(self.target.fixed.state.device)
            self.tuner.waits_for = None

        num_read = prompt_len if output.features is None else output.features.shape[1]
        first = prompt_len - num_read
        columns = [columns[columns >= first] - first for columns in self.batch.prompt_columns]
        self._commit(columns, output.features)
        self._capture_drafts()

    def _move_text(self, num_logits: int) -> None:
        """Let the text go on in slots, captured where the plan says so and nothing stands against it."""
        reason = self.target.enter(self.batch, self.config, num_logits)
        self.stats.notes += notes_of_uncaptured(self.drafter, reason)
        if self.target.fixed is None:
            return

        reason = self.generator.why_not_fixed(self._next_budget((1,) * len(self.batch), MAX_NODES, self.target.form))
        if reason is None and isinstance(self.drafter, nn.Module):
            reason = why_not_repeated(self.drafter, "drafter")
        self.tuner.is_fixed = reason is None
        if reason is not None:
            self.stats.notes.append(f"Drafts are not captured: {reason}.")
        if self.target.fixed.choice_reason is not None:
            self.stats.notes.append(f"The host chooses tokens: {self.target.fixed.choice_reason}.")

    def step(self) -> None:
        """Write what one draft of each row brings.

        On a CPU `target.fixed` is None unless the option `capture` is True, so that its branches, here and in what is
        called here, can be passed over on a first reading.
        """
        if len(self.batch.rows) > 1:
            self.drop_ended_rows()

        form = self.target.form_of_step
        draft = self.propose(form)
        if self.audit.lengths and self.audit.is_due(self._counts, draft):
            self.read_twice(draft, form)
            return

        output = self.read(draft, form)
        try:
            step = self.accept(draft, output.logits)
        except SpoiledReadError:
            draft, output = self._read_roots(draft)
            step = self.accept(draft, output.logits)

        self.trim(step.paths, output)
        self.record(draft, step)

    def propose(self, form: Form) -> Draft:
        """A draft of what may follow each row, to be read in this form. In a plain step it holds the roots alone."""
        if form == "plain" or (self.audit.lengths and self.audit.rests()):
            return self._draft_of_roots()

        fixed = self.target.fixed
        num_nodes = self._num_allowed
        if fixed is not None:  # such a text has the same slots at all lengths
            num_nodes = fixed.most_nodes
        elif self.audit.lengths:  # a draft ends before a length at which the target may change its ways
            num_nodes = min(num_nodes, self.audit.num_nodes_before(self.target.num_slots))
        depths = self.batch.draft_depths(self.config.max_length, self.target.num_to_context)
        if not any(depths) or num_nodes == 1:
            return self._draft_of_roots()

        full = self._next_budget(depths, num_nodes, form)
        budget = self.tuner.limited(full)
        if self.processes.num > 1:
            budget = self.processes.limited(budget, full)
        if budget is None:
            return self._draft_of_roots()

        draft = None
        with self.packed.reading(), self._seconds("draft"):
            with self._may_end_drafting():
                if self.tuner.is_fixed:
                    self._capture_drafts()
                if self.generator.fixed is not None:  # the host would wait for a node's probability to price it
                    budget = replace(budget, prices=None)
                with self.target.together():
                    self._commit_kept()
                    proposed = self.generator.propose(budget)
                draft = self._checked(proposed)

            if self.processes.num > 1:
                draft = self.processes.broadcast_draft(draft, self.batch.prompt_ids.device)

        if draft is None or (fixed is not None and not fixed.limit_nodes(draft.token_ids.shape[1])):
            return self._draft_of_roots()
        return draft

    def _checked(self, draft: Any) -> Draft | None:
        """What a generator proposed, if it is a draft of the text: anything can come from one of the user's own.

        A device would be waited for, so that the first drafts of a call are looked at there, and all on a CPU.
        """
        if draft is None or self.generator.fixed is not None:
            return draft  # ours alone are in fixed shapes

        name = type(self.generator).__name__
        if not isinstance(draft, Draft):
            raise DraftTreeError(
                f"`propose` must return a `Draft` or None, but that of a `{name}` returned a `{type(draft).__name__}`."
            )

        if draft.token_ids.device.type == "cpu" or self.stats.num_steps < NUM_CHECKED:
            draft.check(self.batch.roots, name)
        return draft

    def _draft_of_roots(self) -> Draft:
        fixed = self.target.fixed
        if fixed is not None and fixed.acceptor is not None:
            return fixed.acceptor.draft_of_roots()
        roots = self.batch.roots
        return Draft(roots, torch.full_like(roots, -1), num_passes=0, max_depth=0)

    def _next_budget(self, depths: tuple[int, ...], num_nodes: int, form: Form) -> DraftBudget:
        noise = self.target.noise_ahead(self.batch) if self._shows_noise else None
        return replace(self._budget, depths=depths, num_nodes=num_nodes, is_chain=form == "chain", noise=noise)

    @contextmanager
    def _may_end_drafting(self) -> Iterator[None]:
        """Around a drafter's work: if it finds no memory, the target writes the rest alone."""
        try:
            yield
        except torch.OutOfMemoryError:
            if self.processes.num > 1:  # the others would wait for this one
                raise

            self.generator = NoDrafts(self.drafter, self.target, self.config.max_length, self.generator.rng)
            self.stats.note(NO_DRAFTS)

    def _capture_drafts(self) -> None:
        """Let the drafter go on in fixed shapes where the text does, as soon as it has something to read."""
        fixed, generator = self.target.fixed, self.generator
        if fixed is None or not self.tuner.is_fixed or not isinstance(generator, FixedGenerator):
            return
        if generator.fixed is not None or not generator.has_unread:
            return

        generator.num_cheap_nodes = fixed.num_cheap_nodes
        try:
            fixed.state.enter(generator, self.drafter, self.config.max_length, self.target.backend)
        except torch.OutOfMemoryError:
            self.tuner.is_fixed = False
            self.stats.notes.append(f"Drafts are not captured: {NO_MEMORY}.")

    def read(self, draft: Draft, form: Form, is_accepted: bool = True) -> TargetOutput:
        """Let the target read a draft in one forward; where it `is_accepted` the device may choose tokens, too."""
        with self._may_end_drafting():
            self._commit_kept()  # which the device overwrites now
        device = self.batch.prompt_ids.device
        token_ids = draft.token_ids.to(device)
        parents = draft.parents.to(device).expand_as(token_ids)
        tree = DraftTree(parents, parents)  # ranks are of no use here

        is_alone = token_ids.shape[1] == 1  # read as plain decoding reads it: faster, and the same rounding
        if is_alone and form != "plain" and not self.target.is_ragged:
            form = "chain"

        with self.packed.reading(token_ids.numel() > 1), self._seconds("verify"):
            return self.target.read(token_ids, tree, form, self.batch.is_open, draft if is_accepted else None)

    def accept(self, draft: Draft, logits: Tensor) -> AcceptedStep:
        """Let the part of a draft become text that the target agrees with."""
        may_be_spoiled = list(self.batch.is_open)
        for row, number in enumerate(self.batch.numbers):
            may_be_spoiled[row] &= number not in self._overflowing

        fixed = self.target.fixed
        if fixed is not None and fixed.acceptor is not None:
            step = fixed.acceptor.accept(draft, logits, may_be_spoiled)
            if step is not None:
                return step
            fixed.acceptor = None
            self.stats.note(f"The host chooses tokens: {NO_MEMORY}.")
        return self.acceptor.accept(draft, logits, may_be_spoiled)

    def trim(self, paths: Sequence[AcceptedPath], output: TargetOutput) -> None:
        """Trim the target's cache to each row's accepted path, and give the drafter the new text with its features."""
        nodes = [path.path for path in paths]
        if self.states.wanted:
            self.states.add_paths(output.outputs, nodes, self.target.columns, self.batch.numbers)
        self.target.keep(output.logits.shape[1], nodes)

        fixed = self.target.fixed
        if fixed is not None and fixed.acceptor is not None and self.generator.fixed is not None:
            self._kept = fixed.acceptor.kept(paths)
            return

        choices = output.logits.argmax(dim=-1) if self.generator.wants_node_choices else None
        self._commit(nodes, output.features, choices)

    def _commit_kept(self) -> None:
        """Give the drafter what the newest step kept on the device, if it has not got it yet."""
        kept, self._kept = self._kept, None
        if kept is not None and isinstance(self.generator, FixedGenerator):
            self.generator.commit_kept(kept)

    def _commit(self, columns: Sequence[Any], features: Tensor | None, choices: Tensor | None = None) -> None:
        """Give the drafter the newest tokens, and their features, which stand in these columns of each row."""
        kept = None
        if features is not None:
            rows = []
            for row, chosen in zip(features, columns, strict=True):
                rows.append(row[torch.as_tensor(chosen, dtype=torch.long, device=row.device)])
            kept = rows[0][None] if len(rows) == 1 else pad_sequence(rows, batch_first=True)

        token_ids, lengths = self.batch.texts
        num_new = tuple(map(len, columns))
        with self._may_end_drafting():
            self.generator.commit(Committed(token_ids, lengths, num_new, kept, choices))

    def record(self, draft: Draft, step: AcceptedStep, is_usual: bool = True) -> None:
        """Count the step of every row that took one; unless it `is_usual`, it teaches nothing of what steps cost."""
        rows = zip(self.batch.numbers, self.batch.is_open, step.paths, step.counts, strict=True)
        paths = []

        for row, is_open, path, counts in rows:
            if not path.path:
                continue

            paths.append(path)
            num = path.num_accepted
            max_depth = counts.max_depth
            if not is_open:  # what lies below the last token was never asked for
                max_depth = min(max_depth, num)
            self.stats.record(row=row, num_nodes=counts.num_nodes, max_depth=max_depth, num_accepted=num)

        for phase, seconds in self._timer.collect().items() if self._timer else ():
            self.stats.add_seconds(phase, seconds)
        read_price = None if self.target.fixed is None else self.target.fixed.read_price
        drafting, reading = self.stats.draft_seconds, self.stats.verify_seconds
        self.tuner.learn(draft, paths if is_usual else [], drafting, reading, read_price)
        self.stats.num_passes += draft.num_passes
        for observer in self.observers:
            observer(draft, step.paths)

    @contextmanager
    def _seconds(self, phase: str) -> Iterator[None]:
        """Add the seconds spent inside to those of the phase; work on a device counts where it is waited for."""
        if self._timer is not None and phase != "total":
            with self._timer.measured(phase):
                yield
            return

        start = self.clock()
        try:
            yield
            if self.tuner.waits_for is not None:  # so that its work is counted in the phase that caused it
                torch.accelerator.synchronize(self.tuner.waits_for)
        finally:
            self.stats.add_seconds(phase, self.clock() - start)

    def _cost_model(self) -> CostModel | None:
        """What the tuner knows of as many rows as are read; other processes than the first one tune nothing."""
        if not self.processes.is_first:
            return None
        form, num_rows = self.target.form, len(self.batch.rows)
        return known_costs(self.drafter, self.target.model, self.batch.verifier, self.config, form, num_rows)

    def drop_ended_rows(self) -> None:
        """Let rows that have ended leave where enough have: target and drafter then read the others alone.

        They stay where rows end together (the criteria know no end token), where work is captured, where nothing is
        in slots, where observers look, and for the reasons of `_obstacle_to_leaving`, which the statistics name. A
        row that stays is not written any more, and chains are read without it where all rows of its length ended.
        """
        is_open = self.batch.is_open
        if self.batch.pad is None or is_open.count(False) < max(LEAST_SHARE * len(is_open), 1):
            return
        if self.target.fixed is not None or self.generator.fixed is not None:  # captured work is of so many rows
            return
        if self.target.form == "plain":  # rows stay, as in plain decoding
            return
        if self.observers:  # they tell rows apart by their index
            return

        if self._why_rows_stay is None:  # what stood in the way once stays there
            self._why_rows_stay = self._obstacle_to_leaving()
        if self._why_rows_stay is not None:
            return

        rows = list(compress(range(len(is_open)), is_open))
        self.batch.select_rows(rows)
        self.generator.select_rows(rows)
        self.target.select_rows(rows)
        self.tuner.cost_model = self._cost_model()

    def _obstacle_to_leaving(self) -> str | None:
        """Why rows that have ended cannot leave, in words; None if they can."""
        if self.processes.num > 1:
            return "several processes write the text together"
        if self.target.row_adapters.is_needed:
            return "rows take different adapters"
        if not self.target.inputs.can_select(len(self.batch.rows)):
            return "the target takes more than its text"
        return self.generator.why_rows_stay

    def _read_roots(self, draft: Draft) -> tuple[Draft, TargetOutput]:
        """Drop a draft that was read, and read the roots alone."""
        self.stats.note(READ_ANEW)
        self.target.keep(draft.token_ids.shape[1], [()] * len(draft.token_ids))
        roots = self._draft_of_roots()
        output = self.read(roots, self.target.form_of_step)
        has_nan = output.logits[:, 0, 0].isnan().tolist()
        self._overflowing = list(compress(self.batch.numbers, has_nan))
        return roots, output

    @property
    def _counts(self) -> dict[int, int]:
        """What the target holds before a draft: tokens of each row by its number, and slots."""
        counts = dict(zip(self.batch.numbers, self.target.num_tokens, strict=True))
        if self.target.fixed is None:
            counts[SLOTS] = self.target.num_slots
        return counts

    def read_twice(self, draft: Draft, form: Form) -> None:
        """Write what a draft's path would add token by token, and go on more simply if the draft was read wrongly."""
        counts = self._counts
        is_open = self.batch.is_open
        self.stats.num_passes += draft.num_passes
        read = self.read(draft, form, is_accepted=False).logits.clone()  # a read in fixed shapes overwrites it
        trees = trees_of(draft, TOKEN_MATCHING, is_open, self.batch.probs_device)
        nodes = {row: 0 for row, is_read in enumerate(is_open) if is_read}
        is_right = True
        is_long = False
        self.target.keep(draft.token_ids.shape[1], [()] * len(draft.token_ids))

        while nodes and any(self.batch.is_open):
            roots = self._draft_of_roots()
            plain = self.read(roots, "plain")
            for row, node in nodes.items():
                is_right = is_right and self.audit.is_right(read[row, node], plain.logits[row, 0])
                is_long = is_long or node > 0

            step = self.accept(roots, plain.logits)
            self.trim(step.paths, plain)
            self.record(roots, step, is_usual=False)

            children = {}
            for row, node in nodes.items():
                emitted = step.paths[row].token_ids
                child = trees[row].child(node, emitted[0]) if emitted else None
                if child is not None and not self.batch.has_ended(row):
                    children[row] = child

            nodes = children

        if self.processes.broadcast(is_right):
            self.audit.settle(counts, is_long)
        else:  # from trees go on to chains, and from those to plain decoding
            is_plain = self.target.form == "chain" or self.target.fixed is not None
            length = max(self._counts.values())
            self._take_form("plain" if is_plain else "chain", f"a draft's scores were wrong near token {length}")

    def _take_form(self, form: Form, reason: str) -> None:
        """Let the rest of the call read drafts in another form."""
        self.target.form = form
        self.stats.note(f"{FORMS[form]} from token {max(self._counts.values())} on: {reason}.")
        if form == "plain":
            self.generator = NoDrafts(self.drafter, self.target, self.config.max_length, self.generator.rng)
        self.tuner.cost_model = self._cost_model()
