"""Which logits processors may be asked about texts that are not written: those that are functions of the text alone."""

from transformers import (
    LogitsProcessorList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from ..errors import OptionError

_WITH_MEMORY = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)


def check_memoryless(processors: LogitsProcessorList) -> None:
    """Refuse processors that remember their calls, or may: traversal calls them for tokens that it then refuses.

    Raises:
        [`OptionError`]: a processor that keeps a state, or comes from outside Transformers, so that it may keep one.
    """
    for processor in processors:
        kind = type(processor)
        if isinstance(processor, _WITH_MEMORY) or kind.__module__.split(".")[0] != "transformers":
            raise OptionError(
                '`verifier="traversal"` asks for scores after tokens that may not become text, so every logits processor '
                f"must be a function of the text alone, but `{kind.__module__}.{kind.__qualname__}` "
                f"{'remembers' if isinstance(processor, _WITH_MEMORY) else 'may remember'} its calls. "
                'Set `drafter.generation_config.verifier = "lazy_walk"`.'
            )
