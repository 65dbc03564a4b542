"""What Transformers' own assisted decoding asks of an assistant first: where it gets as far as a drafter, the patch is off."""

from typing import Any, NoReturn

from ..errors import PatchError


class LoopOnly:
    """Base of what drafts in this package's loop alone: it says so where another loop asks it for text."""

    def generate(self, *_: Any, **__: Any) -> NoReturn:
        """Drafters write no text; `target.generate(..., assistant_model=drafter)` does.

        Raises:
            [`PatchError`]: always.
        """
        raise PatchError(
            f"A `{type(self).__name__}` must be asked for drafts by this package's decoding loop, but it was asked for text, as "
            "Transformers' own assisted decoding does after `disable()`. Call `transformers_falcon_spec.enable()`, or `attach(target)` "
            "for one target, and then `target.generate(..., assistant_model=drafter)`."
        )

    def _supports_logits_to_keep(self) -> NoReturn:
        self.generate()
