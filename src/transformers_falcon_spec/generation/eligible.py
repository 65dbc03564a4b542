"""Whether a target can be drafted for at all: by its kind, which costs nothing, and by reading with it."""

from transformers import PreTrainedModel

from ..errors import GenerationError, TargetError
from .adapters import check_target_adapter
from .model_parts import check_has_weights, check_takes_back, named
from .probe import Capability, probe


def check_target(model: PreTrainedModel) -> Capability:
    """How a target reads drafts, found by a few tiny forwards and kept; for commands, before work of hours.

    Raises:
        [`GenerationError`]: a target of its kind, or set up as it is, cannot take back rejected drafts.
        [`TargetError`]: it reads no drafts as it reads text, so that calls with a drafter draft nothing.
    """
    check_kind(model)
    capability = probe(model)
    if capability.form == "plain":
        culprit = "the target" if model._is_stateful else "a hook, or activations quantised together"
        raise TargetError(
            f"{named(model)} cannot verify drafts, so it reads one token at a time: {capability.reason}. Exchange "
            f"what makes it read several tokens otherwise: {culprit}."
        )
    return capability


def check_kind(model: PreTrainedModel) -> None:
    """Refuse a target that cannot be drafted for, by what is known without a forward: [`GenerationError`]."""
    check_takes_back(model)
    check_target_adapter(model)
    check_has_weights(model)

    parts = (model.config, model.config.get_text_config(decoder=True))
    if not all(part.return_dict for part in parts):
        raise GenerationError(
            "Speculative decoding reads the target's outputs by name, so `return_dict` of its config must be True, "
            "but it is False. Set `target.config.return_dict = target.config.get_text_config().return_dict = True`."
        )
