"""One call of a trial: plain values alone, so that it prints as the code that makes it."""

from dataclasses import dataclass, field, fields
from typing import Any

from transformers_falcon_spec.generation.verifier import TOKEN_MATCHING, Verifier, verifier_named


@dataclass(frozen=True)
class Call:
    """Everything that a trial needs to know; a field that is left out is as in the simplest call.

    Args:
        seed (`int`): Of the prompts, of the random state, and of what the tuner chooses.
        family (`str`): A row of `tests/families.py`.
        attention (`str`): Implementation of the target's attention.
        dtype (`str`): Of the target and the drafter.
        drafter (`str`): A kind of `parts.DRAFTERS`.
        speculation (`dict`): Options of the drafter's `SpeculationConfig`.
        hit_rate (`float`): How often a drafter is given the true token of a depth; 0 leaves it as it is.
        is_training (`bool`): Whether the drafter is in train mode.
        is_tuned (`bool`): Whether a tuner chooses how much to draft; its choices are drawn from the seed.
        lengths (`tuple`): Tokens of each prompt; shorter ones are padded.
        padding (`str`): `"left"`, or `"holes"` for prompts that are masked in between, too.
        cache (`str`, *optional*): What is passed as `past_key_values`: `"empty"`, `"bare"` (made without a configuration), or one that
            holds the first `num_cached` tokens of every prompt, beside the `"whole"` prompts or the `"new"` tokens alone.
        decoding (`dict`): Options of `generate`.
        extras (`tuple`): Names of processors, criteria and model arguments in `extras.py`.
        outputs (`tuple`): What is asked for beside the text, `"scores"` and so on.
        has_dict (`bool`): Whether a dict is returned, or the text alone.
        streams (`bool`): Whether a streamer listens.
        threshold (`str`, *optional*): What the target changes at a length that its config names, a name of `thresholds`.
        threshold_length (`int`): That length.
        change (`str`, *optional*): What is changed in the target for this call, a name in `changes.py`.
        fault (`str`, *optional*): What is broken on purpose, a name in `faults.py`: the trials are tried by it.
    """

    seed: int = 0
    family: str = "llama"
    attention: str = "sdpa"
    dtype: str = "float32"
    drafter: str = "random"
    speculation: dict[str, Any] = field(default_factory=dict)
    hit_rate: float = 0.8
    is_training: bool = False
    is_tuned: bool = False
    lengths: tuple[int, ...] = (12,)
    padding: str = "left"
    cache: str | None = None
    num_cached: int = 0
    decoding: dict[str, Any] = field(default_factory=lambda: {"max_new_tokens": 16, "do_sample": False})
    extras: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    has_dict: bool = True
    streams: bool = False
    threshold: str | None = None
    threshold_length: int = 0
    change: str | None = None
    fault: str | None = None

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are drawn."""
        return bool(self.decoding.get("do_sample"))

    @property
    def rule(self) -> Verifier:
        """The rule that decides what becomes text."""
        name = self.speculation.get("verifier") if self.is_sampled else None
        return TOKEN_MATCHING if name is None else verifier_named(name)

    @property
    def verifier(self) -> str:
        """Its name."""
        return self.rule.name

    @property
    def is_padded(self) -> bool:
        """Whether some of the prompts' tokens are masked."""
        return self.padding == "holes" or len(set(self.lengths)) > 1

    @property
    def reference(self) -> str:
        """What the text is compared with.

        `"plain"` decoding; `"rows"`, each written alone, for in a batch each draws from a seed of its own; the same call with a drafter
        that is `"silent"`, where any drafter must give one text; or, where only the distribution is promised, the call once `"again"`.
        """
        if self.rule.needs_draft_probs:
            return "again"
        if self.rule.couples_draws:
            return "silent"
        return "rows" if self.is_sampled and len(self.lengths) > 1 else "plain"

    def __repr__(self) -> str:
        """The code that makes it, without the fields that are as usual."""
        usual = Call()
        lines = [
            f"    {each.name}={getattr(self, each.name)!r},\n"
            for each in fields(self)
            if getattr(self, each.name) != getattr(usual, each.name)
        ]
        return f"Call(\n{''.join(lines)})"
