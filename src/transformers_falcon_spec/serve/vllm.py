"""A Falcon that drafts in vLLM, as a proposer class that vLLM is told by name.

vLLM hands such a class the texts of its batch, but no hidden states and no names of requests. So a forward hook keeps
what the target computed last, and a request is found again by its text: of each text one generator is kept, the same
that drafts in `generate`. Rejected drafts are not in the text, and their hidden states are left out.

Nothing of vLLM is imported before it calls.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..core.tree import DraftTree
from ..drafters.falcon import FalconSpecDrafter
from ..drafters.registry import class_of
from ..errors import DrafterMismatchError, GenerationError, OptionError
from ..generation.drafting import Committed, DraftBudget, TreeCandidateGenerator
from ..generation.head import layer_of

DRAFTER = "falcon_drafter"  # the key of vLLM's `additional_config` that names the drafter


class EngineTarget:
    """The [`TargetView`] of a model of vLLM's."""

    def __init__(self, model: Any, vocab_size: int, feature_dim: int) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.feature_dim = feature_dim

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings `[..., tokens, embed_dim]` of `[..., tokens]`."""
        embeds: Tensor = self.model.embed_input_ids(token_ids.flatten())
        return embeds.unflatten(0, token_ids.shape)

    def head(self, features: Tensor, is_scaled: bool = True, rows: nn.Module | None = None) -> Tensor:  # noqa: ARG002
        """Logits `[..., vocab]` in float32 of `[..., hidden]`, scaled and capped as the target does."""
        states = features.flatten(0, -2).to(next(self.model.parameters()).dtype)
        logits: Tensor = self.model.compute_logits(states) if rows is None else self._scaled(rows(states))
        return logits.float().unflatten(0, features.shape[:-1])

    def _scaled(self, logits: Tensor) -> Tensor:
        """Logits of some tokens, capped and scaled as vLLM does it with those of all."""
        processor = self.model.logits_processor
        if processor.soft_cap is not None:
            logits = (logits / processor.soft_cap).tanh() * processor.soft_cap

        return logits * processor.scale

    def head_rows(self, token_ids: Tensor) -> nn.Linear:
        """The rows of the head for these tokens."""
        matrix = self.model.lm_head
        bias = getattr(matrix, "bias", None)
        return layer_of(matrix.weight[token_ids], None if bias is None else bias[token_ids])


class FalconProposer:
    """Drafts chains with a [`FalconSpecDrafter`], each request by itself; made and called by vLLM.

    `num_speculative_tokens` is how many tokens a chain has. The drafter is named by `falcon_drafter` of vLLM's
    `additional_config`, a folder or a repository.

    Raises:
        [`OptionError`]: no drafter is named, or vLLM is set up so that hidden states would be missing.
        [`DrafterMismatchError`]: the drafter was made for a target of other sizes.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.config = vllm_config
        extra = vllm_config.additional_config
        if DRAFTER not in extra:
            raise OptionError(f'Name the drafter: `--additional-config \'{{"{DRAFTER}": "FOLDER"}}\'`.')
        if vllm_config.cache_config.enable_prefix_caching:
            raise OptionError(
                "A Falcon reads the hidden states of the whole prompt, which vLLM does not compute where a prefix is "
                "cached. Switch that off: `--no-enable-prefix-caching`."
            )
        if vllm_config.parallel_config.world_size > 1:
            raise OptionError(
                "The drafter must lie beside the whole target, but `world_size` is "
                f"{vllm_config.parallel_config.world_size}. Serve without tensor and pipeline parallelism."
            )

        self.depth = int(vllm_config.speculative_config.num_speculative_tokens)
        self.max_length = int(vllm_config.model_config.max_model_len)
        self.most_texts = int(vllm_config.scheduler_config.max_num_seqs)
        self.name = extra[DRAFTER]
        # by the text and the tokens that are read of it, the newest last; equal texts are kept side by side
        self.texts: list[tuple[bytes, TreeCandidateGenerator]] = []
        # States `[tokens, hidden]` of the newest forward. Rows of request i are those from start i to start i + 1, and
        # the first of them stands at position i of its text.
        self.newest_read: tuple[Tensor, list[int], list[int]] | None = None

    def load_model(self, model: Any) -> None:
        """Load the drafter, and keep what the target computes from now on."""
        config = self.config.model_config
        dtype, device = config.dtype, next(model.parameters()).device
        kind = class_of(self.name)
        if not issubclass(kind, FalconSpecDrafter):
            raise DrafterMismatchError(
                f"`{DRAFTER}` must name a Falcon, but `{self.name}` is a `{kind.__name__}`. Eagle and DFlash drafters "
                "are exported for vLLM: `falcon-spec export`."
            )

        self.drafter = kind.from_pretrained(self.name, dtype=dtype).eval().to(device)
        self.drafter.generation_config.draft_tree = DraftTree.chain(self.depth).to_json()

        sizes = (config.get_vocab_size(), config.get_hidden_size())
        expected = (self.drafter.config.vocab_size, self.drafter.feature_size)
        if expected != sizes or self.drafter.feature_layers != (-1,):
            raise DrafterMismatchError(
                f"`{self.name}` must read the last hidden state of a target whose vocabulary and hidden size are "
                f"{sizes}, but it was made for {expected}, and reads the layers {self.drafter.feature_layers}. Load "
                "the target it was trained for."
            )
        self.target = EngineTarget(model, *sizes)
        model.register_forward_hook(self._see, with_kwargs=True)

    def _see(self, _model: Any, _args: Any, kwargs: dict[str, Any], output: Tensor) -> None:
        """Keep the hidden states of a forward, and where the rows of its requests and their positions begin."""
        from vllm.forward_context import get_forward_context  # noqa: PLC0415  only inside vLLM

        metadata = get_forward_context().attn_metadata
        if not metadata:  # a trial run
            return
        found = [each.query_start_loc for each in metadata.values() if hasattr(each, "query_start_loc")]
        if not found:
            raise GenerationError(
                "The attention backend must say where the rows of each request begin, but the metadata of "
                f"{sorted({type(each).__name__ for each in metadata.values()})} do not. Take another one, such as "
                "`--attention-backend FLASH_ATTN`."
            )
        starts = found[0]
        first = kwargs["positions"][starts[:-1].long().clamp(max=len(output) - 1)]
        self.newest_read = (output, starts.tolist(), first.tolist())

    @torch.inference_mode()
    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **_: Any
    ) -> list[list[int]]:
        """Drafted tokens of each request; none where it has sampled nothing, as within its prompt.

        `token_ids_cpu` `[requests, capacity]` holds the texts, of which `num_tokens_no_spec` tokens count.
        """
        if self.newest_read is None:
            raise GenerationError(
                "vLLM ran the target without its Python code, so that its hidden states are not known: full CUDA "
                "graphs do so. Start it with `--enforce-eager`."
            )
        states, starts, positions = self.newest_read
        self.newest_read = None
        drafts: list[list[int]] = []
        for row, sampled in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[row])
            first = positions[row]
            num_new = min(starts[row + 1] - starts[row], length - 1 - first)  # the others belong to rejected drafts
            text = token_ids_cpu[row, : first + num_new + 1]
            generator = self._generator_of(text[: first + 1].tobytes(), first)
            if generator is None:
                drafts.append([])
                continue

            features = states[None, starts[row] : starts[row] + num_new]
            ids = torch.tensor(text, dtype=torch.long, device=states.device)[None]
            generator.commit(Committed(ids, (len(text),), (num_new,), features))
            self.texts.append((text.tobytes(), generator))
            depth = min(self.depth, self.max_length - length - 1)
            draft = None
            if sampled and depth > 0:
                draft = generator.propose(DraftBudget((depth,), depth + 1, is_chain=True))
            drafts.append([] if draft is None else draft.token_ids[0, 1:].tolist())
        del self.texts[: -self.most_texts]
        return drafts

    def _generator_of(self, read: bytes, first: int) -> TreeCandidateGenerator | None:
        """The generator that has read this text, which is not kept any longer; a fresh one where a text begins."""
        if first == 0:
            return self.drafter.candidate_generator(self.target, self.max_length, torch.Generator())
        for index, (text, generator) in enumerate(self.texts):
            if text == read:
                del self.texts[index]
                return generator
        return None
