"""Naive twins of clever code, and a `Draws` that takes every branch: slow, short, and right at first sight."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.growing import grown_paths
from transformers_falcon_spec.core.verification import AcceptedPath

Path = tuple[int, ...]


def path_to(parents: Sequence[int], node: int) -> Path:
    """Nodes from the root to `node`, by walking up."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return tuple(path)


def leaf_paths(parents: Sequence[int]) -> list[Path]:
    """Every root-to-leaf path, in order of the leaves."""
    return [path_to(parents, node) for node in range(len(parents)) if node not in parents]


def ancestor_mask(parents: Sequence[int]) -> list[list[bool]]:
    """`mask[i][j]`: whether `j` lies on the path from the root to `i`."""
    return [[other in path_to(parents, node) for other in range(len(parents))] for node in range(len(parents))]


def tree_mask(
    parents: Sequence[int],
    node_positions: Sequence[int],
    cached_positions: Sequence[int],
    is_cached: Sequence[bool],
    sliding_window: int | None = None,
    chunk_size: int | None = None,
) -> list[list[bool]]:
    """`mask[node][slot]` over cached slots, then nodes, one pair at a time."""
    positions = [*cached_positions, *node_positions]

    def sees(node: int, slot: int) -> bool:
        is_there = (
            is_cached[slot] if slot < len(cached_positions) else slot - len(cached_positions) in path_to(parents, node)
        )
        here, there = node_positions[node], positions[slot]
        is_near = sliding_window is None or here - there < sliding_window
        is_same_chunk = chunk_size is None or here // chunk_size == there // chunk_size
        return is_there and is_near and is_same_chunk

    return [[sees(node, slot) for slot in range(len(positions))] for node in range(len(parents))]


def block_causal_mask(positions: Sequence[int], keys: Sequence[int], block_size: int, phase: int) -> list[list[bool]]:
    """A row sees the blocks up to its own; block 0 starts at `phase`."""

    def block(position: int) -> int:
        return math.floor((position - phase) / block_size)

    return [[block(key) <= block(row) for key in keys] for row in positions]


def walk(
    parents: Sequence[int], token_ids: Sequence[int], choices: Sequence[int], is_last: Callable[[int], bool]
) -> tuple[Path, list[int]]:
    """The kept path and the committed tokens: of all paths, the one that agrees longest with the target's `choices`.

    `choices[node]` is the target's token after `node`; `is_last(n)` says whether the n-th committed token ends the text.
    """
    kept: Path = (0,)
    for path in leaf_paths(parents):
        agrees = [choices[parent] == token_ids[node] for parent, node in itertools.pairwise(path)]
        num_agreeing = len(list(itertools.takewhile(bool, agrees)))
        kept = max(kept, path[: num_agreeing + 1], key=len)
    num_tokens = next((n for n in range(1, len(kept)) if is_last(n)), len(kept))
    return kept[:num_tokens], [choices[node] for node in kept[:num_tokens]]


def best_first(acceptance: Sequence[Sequence[float]], num_nodes: int) -> list[float]:
    """Probabilities of the `num_nodes` likeliest nodes, root included, of the complete tree."""
    probs = [1.0]
    for depth in range(1, len(acceptance) + 1):
        probs += [math.prod(ranks) for ranks in itertools.product(*acceptance[:depth])]
    return sorted(probs, reverse=True)[:num_nodes]


def keep_path(slots: Sequence[Any], num_nodes: int, path: Path) -> list[Any]:
    """Of the last `num_nodes` of `slots` those of `path`, after all earlier ones."""
    start = len(slots) - num_nodes
    return [*slots[:start], *(slots[start + node] for node in path)]


@torch.no_grad()
def greedy(model: PreTrainedModel, input_ids: Tensor, num_tokens: int) -> Tensor:
    """The text with its next tokens, each the likeliest one, everything read anew each time."""
    for _ in range(num_tokens):
        logits = model(input_ids=input_ids, use_cache=False).logits[:, -1].float()
        input_ids = torch.cat([input_ids, logits.argmax(-1, keepdim=True)], dim=-1)
    return input_ids


@torch.no_grad()
def tree_logits(model: PreTrainedModel, prefix: Tensor, token_ids: Sequence[int], parents: Sequence[int]) -> Tensor:
    """Logits `[nodes, vocab]` after each node, one plain forward for each path."""
    rows = []
    for node in range(len(parents)):
        path = torch.tensor([[token_ids[index] for index in path_to(parents, node)]])
        rows.append(model(input_ids=torch.cat([prefix, path], dim=-1), use_cache=False).logits[0, -1])
    return torch.stack(rows)


def lstm_of(recurrence: nn.LSTM) -> nn.LSTM:
    """PyTorch's own LSTM with a drafter's weights, and any where it has none, since no state comes in there."""
    sizes = recurrence.input_size, recurrence.hidden_size, recurrence.num_layers
    with torch.random.fork_rng(devices=[]):
        own = nn.LSTM(*sizes, batch_first=True, dtype=recurrence.weight_ih_l0.dtype)
    own.load_state_dict(recurrence.state_dict(), strict=False)
    return own.eval().requires_grad_(False)


class ScriptedDraws:
    """Takes the choices it was given, then the first possible one; remembers what it took and how likely that was."""

    def __init__(self, script: Sequence[int] = ()) -> None:
        self.script = list(script)
        self.taken: list[int] = []
        self.options: list[list[int]] = []
        self.prob = 1.0

    def categorical(self, probs: Tensor) -> Tensor:
        """One index for the only row of `probs`."""
        (row,) = probs.tolist()
        self.options.append([index for index, prob in enumerate(row) if prob > 0])
        index = len(self.taken)
        self.taken.append(self.script[index] if index < len(self.script) else self.options[-1][0])
        self.prob *= row[self.taken[-1]]
        return torch.tensor([self.taken[-1]])


def every_branch(run: Callable[[ScriptedDraws], Any]) -> Iterator[tuple[Any, float]]:
    """Every outcome of `run` with its probability: each choice that it asks for is taken in each possible way."""
    script: list[int] | None = []
    while script is not None:
        draws = ScriptedDraws(script)
        yield run(draws), draws.prob
        script = None
        for index in reversed(range(len(draws.taken))):
            later = [option for option in draws.options[index] if option > draws.taken[index]]
            if later:
                script = [*draws.taken[:index], later[0]]
                break


def distribution(run: Callable[[ScriptedDraws], Any]) -> Mapping[Any, float]:
    """The probability of each outcome of `run`, by taking every branch."""
    probs: dict[Any, float] = {}
    for outcome, prob in every_branch(run):
        probs[outcome] = probs.get(outcome, 0.0) + prob
    return probs


def block_verification(tree: Any, target_probs: Callable[[int], Tensor], draws: Any) -> AcceptedPath:
    """Block verification of a chain as it is published: how far the block is kept is settled by one test for each length.

    Source: arXiv 2403.10444, algorithm 2.
    """
    num_draft, weight, kept = len(tree.parents) - 1, 1.0, 0
    residuals = [target_probs(0)]
    for depth in range(num_draft + 1):
        target = target_probs(depth)
        if depth:
            token = tree.token_ids[depth]
            weight = min(
                1.0,
                weight * float(target_probs(depth - 1)[token] / tree.draft_probs[tree.dist_index[depth - 1]][token]),
            )
        if depth == num_draft:
            prob, residual = weight, target
        else:
            left = (weight * target - tree.draft_probs[tree.dist_index[depth]]).clamp(min=0)
            mass = float(left.sum())
            prob = mass / (mass + 1 - weight) if mass + 1 - weight > 0 else 1.0
            residual = left / mass if mass > 0 else target
        residuals.append(residual)
        is_kept = depth == 0 or int(draws.categorical(torch.tensor([[prob, 1 - prob]], dtype=torch.double))) == 0
        kept = depth if is_kept else kept
    bonus = int(draws.categorical(residuals[kept + 1][None]))
    return AcceptedPath(tuple(range(kept + 1)), (*tree.token_ids[1 : kept + 1], bonus))


class NaiveFalcon:
    """Drafts as Falcon does, but reads the whole history anew, row by row, for every block of every pass.

    All that it remembers is the text and, for each true row, where its block ended when it was last read.

    Args:
        drafter (`Any`): Whose weights it drafts with.
        target (`Any`): What embeds tokens and reads features.
    """

    def __init__(self, drafter: Any, target: Any) -> None:
        self.drafter, self.target = drafter, target
        self.lstm = lstm_of(drafter.recurrence)
        self.block_size: int = drafter.config.block_size
        self.rows: list[Tensor] = []  # row p: embedding of token p + 1, then feature p
        self.ends: list[int] = []
        self.root = 0  # the newest token

    def commit(self, token_ids: Sequence[int], features: Tensor) -> None:
        """New pairs of feature and next token."""
        self.root = token_ids[-1] if token_ids else self.root
        self.rows += [self._row(token, feature) for token, feature in zip(token_ids, features, strict=True)]

    @torch.no_grad()
    def propose(self, parents: Sequence[int], ranks: Sequence[int]) -> dict[int, int] | None:
        """The token of every node but the root; None where there are fewer rows than a block has."""
        size = self.block_size
        if not self._is_ready():
            return None
        tokens: dict[int, int] = {}
        blocks: dict[Path, Tensor] = {}  # what follows each path of whole blocks: features of its next `size` tokens
        for node in sorted(range(1, len(parents)), key=lambda node: len(path_to(parents, node))):
            path = path_to(parents, node)[1:]
            whole = (len(path) - 1) // size * size
            if path[:whole] not in blocks:
                blocks[path[:whole]] = self.read(path[:whole], tokens, blocks)
            text = [self.root, *(tokens[above] for above in path[:-1])]
            scores = self._scores(blocks[path[:whole]][len(path) - 1 - whole], text[whole:])
            tokens[node] = int(scores.argsort(descending=True)[ranks[node]])
        return tokens

    @torch.no_grad()
    def grown(self, depth: int, top_k: int, num_nodes: int) -> list[Path] | None:
        """Tokens from the root to each node of a tree that grows; None where there are fewer rows than a block has."""
        if not self._is_ready():
            return None
        blocks: dict[Path, Tensor] = {}
        tokens = dict(enumerate(range(self.target.vocab_size)))  # a node is called by its token

        def probs(path: Path, offset: int) -> list[float]:
            whole = path[: len(path) - offset]
            if whole not in blocks:
                blocks[whole] = self.read(whole, tokens, blocks)
            seen = [self.root, *path][len(whole) :]
            return torch.softmax(self._scores(blocks[whole][offset], seen), dim=-1).tolist()

        return grown_paths(probs, depth, top_k, num_nodes, self.block_size)

    def _scores(self, feature: Tensor, seen: Sequence[int]) -> Tensor:
        """Logits of the token after `seen`, those of its block and the one before that."""
        scores = self.target.head(feature)
        if self.drafter.config.transition_rank is None:
            return scores
        before, embeds = torch.tensor(seen[-1]), None
        if self.drafter.config.transition_size is not None:
            embeds = self.target.embed(torch.tensor(seen[-self.drafter.config.transition_tokens :]))
        return scores + self.drafter.transition(before, feature, embeds)

    def _is_ready(self) -> bool:
        """Note where blocks of the rows read now end; whether there are as many rows as a block has."""
        size, num_rows = self.block_size, len(self.rows)
        num_fed = max(num_rows - len(self.ends), size)  # the new rows, and old ones where a block is not full
        for row in range(max(num_rows - num_fed, 0), num_rows):
            num_behind = num_rows - 1 - row
            self.ends[row:] = [num_rows - 1 - num_behind // size * size]  # blocks are cut from the last row backwards
        return num_rows >= size

    def read(self, path: Path, tokens: Mapping[int, int], blocks: Mapping[Path, Tensor]) -> Tensor:
        """Features `[size, hidden]` of the last block, true rows and the blocks of `path` read in one sequence."""
        size, num_true = self.block_size, len(self.rows)
        rows = list(self.rows)
        for depth, node in enumerate(path):
            rows.append(self._row(tokens[node], blocks[path[: depth // size * size]][depth % size]))
        states, window = self._recur(rows), self.drafter.sliding_window
        positions = torch.arange(len(rows))[None]
        bias = torch.full((1, 1, len(rows), len(rows)), torch.finfo(states.dtype).min, dtype=states.dtype)
        offsets = torch.zeros(1, len(rows), dtype=torch.long)
        for row in range(len(rows)):
            end = self.ends[row] if row < num_true else num_true + (row - num_true) // size * size + size - 1
            bias[..., row, : end + 1] = 0
            if window is not None:  # which ends in the text: a draft sees all of itself
                bias[..., row, : min(max(row - window + 1, 0), num_true)] = torch.finfo(states.dtype).min
            offsets[0, row] = size - 1 - (end - row)
        rotary = self.drafter.rotary_emb(states, positions)
        block_positions = {"block_positions": offsets} if self.drafter.config.block_position_embedding else {}
        for layer in self.drafter.layers:
            states = layer(states, attention_mask=bias, position_embeddings=rotary, **block_positions)
        return states[0, -size:]

    def _recur(self, rows: Sequence[Tensor]) -> Tensor:
        """The LSTM's output for each row `[1, rows, hidden]`, one row at a time."""
        state, outputs = None, []
        for row in rows:
            output, state = self.lstm(row[None, None], state)
            outputs.append(output + self.drafter.shortcut(row) if self.drafter.config.shortcut else output)
            state = state if self.drafter.config.recurrence == "sequence" else None
        return torch.cat(outputs, dim=1)

    def _row(self, token: int, feature: Tensor) -> Tensor:
        parts = [self.target.embed(torch.tensor([token]))[0], feature]
        if self.drafter.config.norm_inputs:
            eps = self.drafter.config.rms_norm_eps
            parts = [part / (part.pow(2).mean() + eps).sqrt() for part in parts]
        return torch.cat(parts)


class NaiveLookahead:
    """One row of Lookahead that forgets nothing. A guess has a step of birth and a column; column 0 is the root of step 0."""

    def __init__(self, window_size: int, ngram_len: int, first_tokens: Sequence[int]) -> None:
        self.window_size, self.ngram_len = window_size, ngram_len
        self.text: list[int] = []
        self.seen: list[Path] = []  # in order, again and again
        self.step = 0
        self.guesses = {(0, column): token for column, token in enumerate(first_tokens, start=1)}

    def columns(self) -> list[tuple[Path, Path]]:
        """Of each column what its newest node sees, root first, and the part of it that its n-gram begins with."""
        oldest, *later = range(max(self.step - self.ngram_len + 2, 0), self.step + 1)
        columns = []
        for number in range(self.window_size + self.ngram_len - 2 - len(later)):
            ahead = [self.guesses[oldest, self.step + column] for column in range(1, number + 1)]
            below = [self.guesses[birth, self.step + number + up] for up, birth in enumerate(later, start=1)]
            path = (self.text[-1], *ahead, *below)
            columns.append((path, path[number:]))
        return columns

    def advance(self, choose: Callable[[Path], int]) -> None:
        """One step; `choose` is the target's choice after a path from the root on."""
        for number, (path, ngram) in enumerate(self.columns()):
            self.guesses[self.step + 1, self.step + number + len(ngram)] = choose(path)
            if len(ngram) == self.ngram_len - 1:
                self.seen.append((*ngram, choose(path)))
        self.step += 1

    def read(self, token_ids: Sequence[int]) -> None:
        """New text."""
        for token in token_ids:
            self.text.append(token)
            self.seen += [tuple(self.text[-self.ngram_len :])] if len(self.text) >= self.ngram_len else []

    def guessed(self, num_guesses: int, pool_size: int) -> list[Path]:
        """Continuations of the root, newest first, of the n-grams seen last."""
        kept = list(dict.fromkeys(reversed(self.seen)))[:pool_size]
        return [ngram[1:] for ngram in kept if ngram[0] == self.text[-1]][:num_guesses]
