"""The decoding loop: prefill, then propose, verify, commit, record until the text is complete. There is no other one."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from ..core.rejection import DrawnTree, recursive_rejection, traversal_verification
from ..core.sampling import CoupledDraws, GeneratorDraws, private_generator
from ..core.stats import GenerationStats
from ..core.tree import DraftTree
from ..core.verification import Verdict, lazy_walk
from ..errors import GenerationError, OptionError
from .candidates import Committed, Draft, DraftBudget, TargetView, TreeCandidateGenerator
from .options import SpeculationConfig
from .output import LayerStates, SpeculativeOutput, report
from .probe import probe
from .processors import check_memoryless
from .target import Reading, Target, sliding_windows
from .transcript import Transcript

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

REJECTION_RULES = {"recursive_rejection": recursive_rejection, "traversal": traversal_verification}
MAX_NODES = 512  # per row; more would cost any target more than it can bring


class Drafter(Protocol):
    """What the loop needs of a drafter model."""

    feature_layers: tuple[int, ...]
    generation_config: SpeculationConfig

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
        transcript ([`Transcript`]): The text, with processors, criteria and streamer.
        config ([`~transformers.GenerationConfig`]): As `generate` resolved it.
        model_kwargs (`dict`): As `generate` prepared them, cache and mask included.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter,
        transcript: Transcript,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.transcript, self.config, self.model_kwargs = transcript, config, model_kwargs
        self.capability = probe(model)
        self.target = Target(model, drafter.feature_layers, self.capability.has_hooks)
        self.max_length: int = config.max_length
        self.generator = drafter.candidate_generator(self.target, self.max_length, private_generator())
        self.verifier = verifier_of(drafter, config)
        self.stats = GenerationStats()
        self.states = LayerStates(config, sliding_windows(self.target.config))
        if not self.capability.can_tree:
            self.stats.notes.append(f"The target verifies chains only: {self.capability.reason}.")
        if not self.capability.has_hooks:
            self.stats.notes.append("Hooks may not fire in this target: features come from `output_hidden_states`.")

    def run(self) -> Tensor | SpeculativeOutput:
        """Write the whole text."""
        with self._seconds("total"), self.target.taps.active(), self.target.released():
            self.prefill()
            while not self.transcript.is_complete:
                draft = self.propose()
                tree, verdict, reading = self.verify(draft)
                self.commit(verdict, reading)
                self.record(draft, tree, verdict)
        self.transcript.end()
        self.stats.num_tokens = self.transcript.input_ids.shape[1] - self.transcript.prompt_len
        report(self.stats)
        return self._output()

    def prefill(self) -> None:
        """Read the prompt; its last token's logits give the first new token."""
        prompt = self.transcript.input_ids
        with self._seconds("prefill"):
            reading = self.target.prefill(prompt, self.config, self.model_kwargs)
            self.transcript.commit_token(reading.logits[:, -1])
            self.states.add_prompt(reading.outputs)
        num_read = prompt.shape[1] if reading.features is None else reading.features.shape[1]
        self._hand_over(num_read, reading.features)

    def propose(self) -> Draft:
        """A draft within what fits, or the root alone: a plain step."""
        length = self.transcript.input_ids.shape[1]
        room = max(min(self.max_length - length - 1, self.target.room_to_context), 0)
        draft = None
        if room:
            with self._seconds("draft"):
                draft = self.generator.propose(self._budget(room))
        root = self.transcript.input_ids[:, -1:]
        return Draft(root, torch.full_like(root, -1), num_passes=0) if draft is None else draft

    def _budget(self, room: int) -> DraftBudget:
        draws = self.transcript.draws
        return DraftBudget(
            (room,),
            MAX_NODES,
            is_chain=not self.capability.can_tree,
            temperature=(self.config.temperature or 1.0) if self.verifier != "lazy_walk" else None,
            noise=partial(draws.noise_ahead, self.target.vocab_size) if isinstance(draws, CoupledDraws) else None,
        )

    def verify(self, draft: Draft) -> tuple[DraftTree, Verdict, Reading]:
        """Read the tree, then walk it: tokens become text one by one."""
        device = self.transcript.input_ids.device
        token_ids, parents = draft.token_ids.to(device), draft.parents.to(device)
        tree = DraftTree(parents, torch.zeros_like(parents))
        with self._seconds("verify"):
            reading = self.target.read(token_ids, tree, is_chain=not self.capability.can_tree)
            parents_list, tokens_list = parents[0].tolist(), token_ids[0].tolist()  # waits for the device once
        guests = None if draft.is_guest is None else draft.is_guest[0].tolist()

        def commit(node: int) -> tuple[int, bool]:
            return self.transcript.commit_token(reading.logits[:, node]), self.transcript.is_complete

        if self.verifier in REJECTION_RULES and len(tree) > 1:
            verdict = self._judge(draft, parents_list, tokens_list, reading)
        else:
            verdict = lazy_walk(parents_list, tokens_list, commit, guests)
        return tree, verdict, reading

    def _judge(self, draft: Draft, parents: list[int], token_ids: list[int], reading: Reading) -> Verdict:
        """What a rejection rule keeps of drawn tokens; it becomes text afterwards."""
        if draft.draft_probs is None or draft.dist_index is None or draft.is_guest is not None:
            raise OptionError(
                f'`verifier="{self.verifier}"` needs a draft that was drawn, with its distributions and without guests, but this '
                'drafter gives none. Set `drafter.generation_config.verifier = "lazy_walk"`.'
            )
        tree = DrawnTree(parents, token_ids, draft.draft_probs[0].to("cpu"), draft.dist_index[0].tolist())

        def target_probs(node: int) -> Tensor:
            drafted = tuple(token_ids[above] for above in tree.path_to(node)[1:])
            return self.transcript.probs_after(drafted, reading.logits[:, node]).to("cpu")

        verdict = REJECTION_RULES[self.verifier](tree, target_probs, self.transcript.draws)
        num_committed = self.transcript.commit_foreseen(verdict.token_ids)
        return Verdict(verdict.path[:num_committed], verdict.token_ids[:num_committed])

    def commit(self, verdict: Verdict, reading: Reading) -> None:
        """Keep the path in the target's cache and tell the drafter what became text."""
        num_nodes = reading.logits.shape[1]
        self.target.keep(num_nodes, verdict.path)
        self.states.add_path(reading.outputs, verdict.path)
        path = torch.tensor(verdict.path, device=reading.logits.device)
        features = None if reading.features is None else reading.features.index_select(1, path)
        self._hand_over(len(verdict.path), features)

    def record(self, draft: Draft, tree: DraftTree, verdict: Verdict) -> None:
        """Count the step."""
        max_depth = int(tree.depths.max())
        if self.transcript.is_complete:  # what lies below the last token was never asked for
            max_depth = min(max_depth, verdict.num_accepted)
        self.stats.record(
            num_nodes=len(tree), max_depth=max_depth, num_accepted=verdict.num_accepted, num_passes=draft.num_passes
        )

    def _hand_over(self, num_new: int, features: Tensor | None) -> None:
        ids = self.transcript.input_ids
        self.generator.commit(Committed(ids, (ids.shape[1],), (num_new,), features))

    @contextmanager
    def _seconds(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to `<phase>_seconds`; on a device, work queued earlier counts where it is awaited."""
        start = time.perf_counter()
        try:
            yield
        finally:
            name = f"{phase}_seconds"
            setattr(self.stats, name, getattr(self.stats, name) + time.perf_counter() - start)

    def _output(self) -> Tensor | SpeculativeOutput:
        if not self.config.return_dict_in_generate:
            return self.transcript.input_ids
        return SpeculativeOutput(
            sequences=self.transcript.input_ids,  # type: ignore[arg-type]  # `LongTensor` there means any ids
            scores=self.transcript.scores,
            logits=self.transcript.logits,
            hidden_states=self.states.hidden_states,
            attentions=self.states.attentions,
            past_key_values=self.target.cache,
            speculation=self.stats,
        )


@torch.no_grad()
def speculative_decoding(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    drafter: Drafter,
    streamer: "BaseStreamer | None" = None,
    **model_kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """What the seam calls in place of `_assisted_decoding`; the arguments are those of that method."""
    for name in ("inputs_tensor", "tokenizer", "assistant_tokenizer", "synced_gpus"):
        model_kwargs.pop(name, None)
    _check_call(input_ids, model_kwargs)
    _check_context(input_ids.shape[1], model)
    verifier = verifier_of(drafter, generation_config)
    if verifier == "traversal":  # the others ask once for each committed token, in order
        check_memoryless(logits_processor)
    is_coupled = verifier == "gumbel"
    draws = CoupledDraws.from_global_stream() if is_coupled else GeneratorDraws()  # as plain decoding
    transcript = Transcript(input_ids, logits_processor, stopping_criteria, generation_config, draws, streamer)
    return SpeculativeDecoding(model, drafter, transcript, generation_config, model_kwargs).run()


def verifier_of(drafter: Drafter, config: GenerationConfig) -> str:
    """The rule that decides what of a draft becomes text; greedy decoding has one right answer, so it always walks."""
    return drafter.generation_config.verifier if config.do_sample else "lazy_walk"


def _check_call(input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    """Refuse, with the way out, what the loop cannot serve."""
    if input_ids.shape[0] != 1:
        raise GenerationError(
            f"Speculative decoding reads one row at a time for now, but the batch has {input_ids.shape[0]}. "
            "Call `generate` once for each prompt."
        )
    if input_ids.shape[1] == 0 or model_kwargs.get("inputs_embeds") is not None:
        raise GenerationError(
            "The drafter needs the prompt's token ids, but there are none. "
            "Pass `input_ids` with at least one token, not `inputs_embeds` alone."
        )
    if model_kwargs.get("past_key_values") is None or not model_kwargs.get("use_cache", True):
        raise GenerationError("Speculative decoding needs the target's cache. Leave `use_cache` at True.")


def _check_context(prompt_len: int, model: PreTrainedModel) -> None:
    """Refuse a prompt that the target has no positions for."""
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if context is not None and prompt_len > context:
        raise GenerationError(
            f"The prompt must fit the target's context of {context} tokens, but it has {prompt_len}. "
            "Shorten it, or load a target with a longer context."
        )
