"""The text of one row while it is written, and the target's scores from which its next tokens are chosen."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..core.sampling import ForeseeableDraws, GeneratorDraws, choose
from ..core.verification import TokenTree
from ..errors import GenerationError
from .processors import read_scores_alone


class TokenScores(NamedTuple):
    """The target's scores of one next token, both `[1, vocab]`."""

    raw: Tensor  # as the target gave them, in float32
    processed: Tensor  # after the logits processors


class SequenceState:
    """The text of one row, with the processors and draws that plain decoding would use to write it."""

    def __init__(
        self,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        config: GenerationConfig,
        draws: ForeseeableDraws,
    ) -> None:
        self._input_ids = input_ids  # [1, tokens], padding of the prompt included
        self.host_ids = input_ids.cpu()  # the same, where a stopping criterion reads it without asking the device
        self.prompt_len = input_ids.shape[1]
        self.has_ended = False  # as its stopping criteria say
        is_dict = config.return_dict_in_generate
        self.scores: tuple[Tensor, ...] | None = () if is_dict and config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if is_dict and config.output_logits else None
        self.draws = draws
        self.do_sample = bool(config.do_sample)
        self._processors = processors

    def __len__(self) -> int:
        """The number of tokens, those of the prompt included."""
        return self.host_ids.shape[1]

    @property
    def input_ids(self) -> Tensor:
        """The text `[1, tokens]` on the device of the prompt, padding of the prompt included."""
        if self._input_ids.device.type == "cpu":
            return self.host_ids
        num_held = self._input_ids.shape[1]
        if num_held < len(self):  # new tokens are moved there when somebody asks for them
            new = self.host_ids[:, num_held:].to(self._input_ids.device)
            self._input_ids = torch.cat([self._input_ids, new], dim=-1)
        return self._input_ids

    @property
    def can_choose_ahead(self) -> bool:
        """Whether tokens can be chosen before those in front of them are text: no processor looks at it."""
        can_take_back = not self.do_sample or isinstance(self.draws, GeneratorDraws)
        return can_take_back and read_scores_alone(self._processors)

    def process(self, ids: Tensor, logits: Tensor) -> TokenScores:
        """The scores of the tokens that follow `ids` `[rows, tokens]`, from the target's logits `[rows, vocab]`."""
        raw = logits.to(dtype=torch.float32, copy=True, device=ids.device)
        kept = raw if self.logits is None else raw.clone()  # processors may write in place
        return TokenScores(kept, processed(self._processors, ids, raw, self.do_sample))

    @property
    def keeps_scores(self) -> bool:
        """Whether the call returns the scores or logits that tokens were chosen by."""
        return self.logits is not None or self.scores is not None

    def append(self, token_id: int, scores: TokenScores | None) -> None:
        """Add a token to the text, and the scores that it was chosen by to the outputs, where those are kept."""
        if scores is not None:
            self.logits = None if self.logits is None else (*self.logits, scores.raw)
            self.scores = None if self.scores is None else (*self.scores, scores.processed)
        self.host_ids = torch.cat([self.host_ids, self.host_ids.new_tensor([[token_id]])], dim=-1)


class NodeScores:
    """The target's scores and choices after the nodes of one row's tree, computed when a verifier asks for them.

    `logits` `[nodes, vocab]` are the target's, and drawn tokens are verified on `probs_device`.
    """

    def __init__(self, sequence: SequenceState, tree: TokenTree, logits: Tensor, probs_device: torch.device) -> None:
        self.sequence, self.tree, self.draws = sequence, tree, sequence.draws
        self.logits, self._probs_device = logits, probs_device
        self._text_ids = sequence.input_ids
        self.by_node: dict[int, TokenScores] = {}  # those that are computed
        self._chosen: list[int] = []  # the target's token after every node, where all were chosen at once
        self.keeps_draw_states = False  # for a rule that draws more tokens than may become text
        self._draw_states: dict[int, Any] = {}  # by node: of the draws once the token after it is drawn

    @property
    def is_on_accelerator(self) -> bool:
        """Whether the scores are, so that choosing after all nodes at once is faster than one by one."""
        return self.logits.device.type != "cpu"

    def after(self, node: int) -> TokenScores:
        """The scores after a node; the processors see the text up to it."""
        if node not in self.by_node:
            self.by_node[node] = self.sequence.process(self._ids_to(node), self.logits[node : node + 1])
        return self.by_node[node]

    def token_after(self, node: int) -> int:
        """The target's own token after a node: the best one or, when sampling, the next draw.

        When sampling each call draws: ask once for a node, the root first, and for accepted nodes only.
        """
        if self._chosen:
            return self._chosen[node]
        token = int(choose(self.after(node).processed, self.sequence.do_sample, self.draws))
        if self.keeps_draw_states:
            self._draw_states[node] = self.draws.get_state(self._text_ids.device)
        return token

    def probs_after(self, node: int) -> Tensor:
        """The target's distribution `[vocab]` after a node."""
        return torch.softmax(self.after(node).processed, dim=-1)[0].to(self._probs_device)

    def choose_all(self, start: int = 0) -> None:
        """Choose the token after every node at once, `start` being drawn for first; nothing may depend on the text."""
        raw, scores = self.sequence.process(self.sequence.input_ids, self.logits)
        if self.sequence.do_sample:
            assert isinstance(self.draws, GeneratorDraws)  # `can_choose_ahead` says so
            depths = [max(depth - self.tree.depths[start], 0) for depth in self.tree.depths]
            chosen, states = self.draws.categorical_by_depth(torch.softmax(scores, dim=-1), torch.tensor(depths))
            self._draw_states = {node: states[depth] for node, depth in enumerate(depths)}
        else:
            chosen = scores.argmax(dim=-1)

        self._chosen = chosen.tolist()  # waits for the device once
        pairs = zip(raw.split(1), scores.split(1), strict=True)
        self.by_node = {node: TokenScores(*pair) for node, pair in enumerate(pairs)}

    def settle_draws(self, node: int) -> None:
        """Put the draws where they are once the token after a node of the path is drawn, if more were drawn ahead."""
        if node in self._draw_states:
            self.draws.set_state(self._draw_states[node], self._text_ids.device)

    def is_settled(self, node: int) -> bool:
        """Whether the draws are still there, so that later tokens of the path are those that plain decoding draws."""
        return node not in self._draw_states or self.draws.is_at(self._draw_states[node], self._text_ids.device)

    def _ids_to(self, node: int) -> Tensor:
        """The text `[1, tokens]` that ends with a node; the root is part of the text already."""
        drafted = [self.tree.token_ids[above] for above in self.tree.path_to(node)[1:]]
        return torch.cat([self._text_ids, self._text_ids.new_tensor([drafted])], dim=-1)


def processed(processors: LogitsProcessorList, ids: Tensor, raw: Tensor, do_sample: bool) -> Tensor:
    """Let the processors score the tokens after `ids`, from `raw` logits `[rows, vocab]`, which they may overwrite."""
    scores: Tensor = processors(ids, raw)  # type: ignore[arg-type]  # `LongTensor` there means any ids
    if scores.shape != raw.shape:
        raise GenerationError(
            f"Logits processors must return scores of shape {tuple(raw.shape)}, but one returned "
            f"{tuple(scores.shape)}. Each must give back one score for each token of the vocabulary."
        )

    if do_sample and not scores.amax().isfinite():  # plain sampling fails there, too
        raise GenerationError(
            f"Sampling needs a finite best score, but after the logits processors it is {float(scores.amax())}. Look "
            "for a processor that divides by zero or forbids every token, or a target whose own logits overflow."
        )

    return scores


def answers(criteria: StoppingCriteriaList, ids: Tensor, scores: tuple[Tensor, ...] | None) -> Tensor:
    """Ask the stopping criteria which rows of `ids` `[rows, tokens]` have ended; a single answer is for all rows."""
    is_done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for criterion in criteria:
        answer = torch.as_tensor(criterion(ids, scores), dtype=torch.bool, device=ids.device)
        if answer.shape not in ((), (1,), (len(ids),)):
            raise GenerationError(
                f"A stopping criterion must give one answer for each of the {len(ids)} rows that it is shown, but "
                f"`{type(criterion).__qualname__}` gave answers of shape {tuple(answer.shape)}. Let it return a "
                f"tensor of shape `(len(input_ids),)`."
            )

        is_done = is_done | answer

    return is_done
