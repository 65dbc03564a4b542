"""Falcon drafts in vLLM: [`FalconProposer`] is the class that vLLM loads by its name (`docs/serving.md`).

vLLM tells a proposer the texts of its requests, and nothing of what the target computed. So a hook on the target keeps
the last hidden states of a step, and the metadata of attention say whose they are. Each request has a generator of its
own, the same that drafts in `generate`, and gets a chain of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.tree import DraftTree
from ..drafters.falcon import FalconSpecDrafter
from ..drafters.registry import class_of
from ..errors import DrafterMismatchError, OptionError
from ..generation.drafting import Committed, DraftBudget, TreeCandidateGenerator

DRAFTER = "falcon_drafter"  # its key in `additional_config`


class FalconProposer:
    """Drafts for the requests of a vLLM engine, one request after the other.

    ```python
    LLM(
        model="models/reference-target",
        speculative_config={
            "method": "custom_class",
            "model": "transformers_falcon_spec.serve.vllm.FalconProposer",
            "num_speculative_tokens": 3,
        },
        additional_config={"falcon_drafter": "models/falcon-reference"},
    )
    ```

    Steps whose forward is replayed whole, as full CUDA graphs do, run no hook and get no drafts.

    Args:
        vllm_config (`vllm.config.VllmConfig`): The configuration of the engine.

    Raises:
        [`OptionError`]: `additional_config` names no drafter, or the target is spread over several processes.
    """

    def __init__(self, vllm_config: Any) -> None:
        given = vllm_config.additional_config
        if not isinstance(given, dict) or not isinstance(given.get(DRAFTER), str):
            raise OptionError(
                f"`additional_config` must name the drafter, as in {{{DRAFTER!r}: FOLDER}}, but it is {given!r}."
            )

        parallel = vllm_config.parallel_config
        if parallel.world_size > 1:
            raise OptionError(
                "A Falcon drafts for a target in one process, but this one is spread over "
                f"{parallel.world_size}. Leave out `tensor_parallel_size` and `pipeline_parallel_size`."
            )

        self.name: str = given[DRAFTER]
        self.depth: int = vllm_config.speculative_config.num_speculative_tokens
        self.max_length: int = vllm_config.model_config.max_model_len
        self.most_requests: int = vllm_config.scheduler_config.max_num_seqs
        self.dtype: torch.dtype = vllm_config.model_config.dtype
        self.requests: list[_Request] = []  # those that were read last stand last
        self.step: _Step | None = None

    def load_model(self, target: nn.Module) -> None:
        """Load the drafter, and hook the target: vLLM calls it once.

        Raises:
            [`DrafterMismatchError`]: the drafter is no Falcon, or was made for another target.
        """
        self.target = EngineTarget(target)
        device = next(target.parameters()).device
        drafter: Any = class_of(self.name).from_pretrained(self.name, dtype=self.dtype).eval().to(device)
        if not isinstance(drafter, FalconSpecDrafter) or drafter.feature_layers != (-1,):
            raise DrafterMismatchError(
                "The drafter must be a Falcon that reads the target's last hidden state alone, but "
                f"`{self.name}` is a `{type(drafter).__name__}` that reads {drafter.feature_layers}."
            )

        needed = (drafter.feature_size, drafter.config.vocab_size)
        has = (self.target.feature_dim, self.target.vocab_size)
        if needed != has:
            raise DrafterMismatchError(
                f"The drafter `{self.name}` expects a target of width and tokens {needed}, but this one has {has}. "
                "Take the target that it was trained for."
            )

        drafter.generation_config.draft_tree = DraftTree.chain(self.depth).to_json()
        self.drafter = drafter
        target.register_forward_hook(self._keep, with_kwargs=True)

    def _keep(self, _target: nn.Module, _args: Any, kwargs: dict[str, Any], output: Tensor) -> None:
        """Keep the hidden states of a step until its requests draft."""
        from vllm.forward_context import get_forward_context  # noqa: PLC0415  vLLM is there when this runs

        metadata = get_forward_context().attn_metadata
        if metadata:  # there is none where vLLM tries how much memory a step takes
            ends = next(iter(metadata.values())).query_start_loc.tolist()
            self.step = _Step(output, kwargs["positions"].tolist(), ends)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        **_: Any,
    ) -> list[list[int]]:
        """Chains behind the texts of all requests of a step.

        Args:
            sampled_token_ids: The new tokens of each request; none where its prompt is not read to its end.
            num_tokens_no_spec (`numpy.ndarray`): The length of each text, new tokens included.
            token_ids_cpu (`numpy.ndarray`): The texts `[requests, length]`.

        Returns:
            `list[list[int]]`: the drafted tokens of each request, at most `num_speculative_tokens`.
        """
        step, self.step = self.step, None
        drafts = []
        for row, sampled in enumerate(sampled_token_ids):
            draft: list[int] = []
            if step is not None and row < len(step.ends) - 1:
                text = torch.from_numpy(token_ids_cpu[row, : num_tokens_no_spec[row]]).long()
                request = self._read(text, *step.of_row(row))
                if sampled and request.length == len(text):
                    draft = self._draft(request)

            drafts.append(draft)

        del self.requests[: -self.most_requests]
        return drafts

    def _read(self, text: Tensor, start: int, features: Tensor) -> "_Request":
        """Hand the pairs of a step to the request whose text it is; the first of `features` is that at `start`."""
        num = min(len(features), len(text) - 1 - start)  # what follows was drafted, and rejected
        length = start + num + 1
        request = self._request_of(text[: start + 1])
        request.token_ids = text[:length].clone()
        if num:
            ids = request.token_ids[None].to(features.device)
            request.generator.commit(Committed(ids, (length,), (num,), features[None, :num].clone()))

        self.requests.append(request)
        return request

    def _request_of(self, read: Tensor) -> "_Request":
        """The request that has read this text, taken from the list; a new one where none has."""
        for index, request in enumerate(self.requests):
            if torch.equal(request.token_ids, read):
                return self.requests.pop(index)

        rng = torch.Generator()
        return _Request(read, self.drafter.candidate_generator(self.target, self.max_length, rng))

    def _draft(self, request: "_Request") -> list[int]:
        """The chain behind a text, no longer than the target's context."""
        depth = min(self.depth, self.max_length - request.length - 1)
        if depth < 1:
            return []

        draft = request.generator.propose(DraftBudget((depth,), depth + 1, is_chain=True))
        if draft is None:
            return []

        is_node = draft.parents[0] >= 0
        found: list[int] = draft.token_ids[0, is_node].tolist()
        return found


class EngineTarget:
    """A model of vLLM, as a drafter sees its target ([`~generation.drafting.TargetView`])."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.vocab_size = int(model.config.vocab_size)
        self.feature_dim = int(model.config.hidden_size)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings `[..., tokens, embed_dim]` of `[..., tokens]`."""
        found: Tensor = self.model.embed_input_ids(token_ids)
        return found

    def head(self, features: Tensor, is_scaled: bool = True, rows: nn.Module | None = None) -> Tensor:  # noqa: ARG002
        """Logits `[..., vocab]` in float32 of `[..., hidden]`, of all tokens or of some rows of the head."""
        if rows is not None:
            return self._as_the_target_does(rows(features).float())

        logits = self.model.compute_logits(features.flatten(0, -2))
        return logits.float().unflatten(0, features.shape[:-1])

    def _as_the_target_does(self, logits: Tensor) -> Tensor:
        """Logits capped and scaled."""
        done = self.model.logits_processor
        if done.soft_cap is not None:
            logits = (logits / done.soft_cap).tanh() * done.soft_cap
        return logits * done.scale

    def head_rows(self, token_ids: Tensor) -> nn.Linear:
        """The rows of the head for these tokens."""
        weight = self.model.lm_head.weight[token_ids]
        rows = nn.Linear(weight.shape[1], len(weight), bias=False, device="meta")
        rows.weight = nn.Parameter(weight, requires_grad=False)
        return rows


@dataclass
class _Request:
    """A request: the text whose pairs its generator has."""

    token_ids: Tensor
    generator: TreeCandidateGenerator

    @property
    def length(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class _Step:
    """What the target computed in a step: rows of all requests, one behind the other."""

    features: Tensor  # [tokens, hidden], and maybe more, which belong to nobody
    positions: list[int]
    ends: list[int]  # where the rows of each request begin, and where the last ones end

    def of_row(self, row: int) -> tuple[int, Tensor]:
        """The position of the first token that a request read, and the features of all of them."""
        first, end = self.ends[row], self.ends[row + 1]
        return self.positions[first], self.features[first:end]
