"""The chat template of a target's tokenizer, with arguments for it such as the switch for thinking."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from jinja2 import TemplateError
from transformers import BatchEncoding, PreTrainedTokenizerBase

from ..errors import ConversationError, OptionError, TrainingError, quoted

logger = logging.getLogger(__name__)

Message = dict[str, str]  # `role`, `content`, and `reasoning_content` where a thought is kept apart
THINKING_SWITCHES = ("enable_thinking", "thinking")  # of which true and false are the settings
SWITCHES = (*THINKING_SWITCHES, "reasoning_effort")
_CODE = re.compile(r"\{[{%](.*?)[}%]\}", re.DOTALL)
_STRING = re.compile(r"'[^']*'|\"[^\"]*\"")
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
_MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_THOUGHTS = re.compile(r"<think>|<\|channel\|>|reasoning_content")  # what templates of targets that think mention


class RefusedByTemplateError(ConversationError, TemplateError):
    """A chat template refuses a conversation, in its own words or by an error of its code."""

    reason = "refused by the chat template"


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer, with `kwargs` for it.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The target's tokenizer.
        kwargs (`dict`, *optional*): Arguments for the template, such as `{"enable_thinking": False}`.

    Raises:
        [`TrainingError`]: the tokenizer has no chat template.
        [`OptionError`]: the template does not know one of the arguments.
    """

    tokenizer: PreTrainedTokenizerBase
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tokenizer.chat_template is None:
            raise TrainingError(
                f"The tokenizer `{self.tokenizer.name_or_path}` needs a chat template to show what the assistant "
                "said, but it has none. Set `tokenizer.chat_template` and save it with the target."
            )

        check_template_kwargs(self.tokenizer, self.kwargs)

    def text(self, messages: Sequence[Message], **options: Any) -> str:
        """The text of a conversation; `options` are those of `apply_chat_template`."""
        return cast(str, self._apply(messages, tokenize=False, **options))

    def encoded(self, messages: Sequence[Message], **options: Any) -> BatchEncoding:
        """The token ids of a conversation."""
        return cast(BatchEncoding, self._apply(messages, return_dict=True, **options))

    def ids(self, text: str) -> list[int]:
        """The token ids of a text that the template gave."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @property
    def has_marks(self) -> bool:
        """Whether `{% generation %}` stands around what the assistant says."""
        return _MARKS.search(_source(self.tokenizer)) is not None

    @property
    def thinks(self) -> bool:
        """Whether answers may begin with a thought: the template mentions thoughts, and no switch for them is off."""
        is_off = any(self.kwargs.get(name) is False for name in THINKING_SWITCHES)
        return not is_off and _THOUGHTS.search(_source(self.tokenizer)) is not None

    @property
    def hides_thoughts(self) -> bool:
        """Whether special tokens part the thoughts of answers from their words."""
        return "<|channel|>" in _source(self.tokenizer)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens."""
        added = self.tokenizer.added_tokens_decoder.items()
        return frozenset(self.tokenizer.all_special_ids) | {number for number, token in added if token.special}

    @cached_property
    def special_words(self) -> tuple[str, ...]:
        """The special tokens as they are written, the longest first."""
        words = (str(self.tokenizer.convert_ids_to_tokens(number)) for number in self.special_ids)
        return tuple(sorted(words, key=len, reverse=True))

    def _apply(self, messages: Sequence[Message], **options: Any) -> Any:
        rows = []
        for message in messages:
            row = dict(message)
            if "reasoning_content" in row:
                row["thinking"] = row["reasoning_content"]  # so gpt-oss calls it

            rows.append(row)

        try:
            return self.tokenizer.apply_chat_template(rows, **self.kwargs, **options)
        except Exception as error:  # templates raise what Python raises
            raise RefusedByTemplateError(f"{type(error).__name__}: {error}") from error


def names_in(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The names that the code of a chat template reads, arguments among them."""
    if tokenizer.chat_template is None:
        return set()

    code = " ".join(_CODE.findall(_source(tokenizer)))
    return set(_NAME.findall(_STRING.sub("''", code)))


def check_template_kwargs(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]) -> None:
    """Check that the chat template reads all of `kwargs`: [`OptionError`]."""
    unknown = kwargs.keys() - names_in(tokenizer)
    if unknown:
        raise OptionError(
            f"`chat_template_kwargs` must be arguments that the chat template of `{tokenizer.name_or_path}` knows, "
            f"but it does not read {quoted(sorted(unknown))}. Correct the name, or leave it out."
        )


def ask_for_switch(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]) -> None:
    """Check that the template knows `kwargs`, and log a sentence if they leave out a switch for thinking."""
    check_template_kwargs(tokenizer, kwargs)
    switch = next((name for name in SWITCHES if name in names_in(tokenizer)), None)
    if switch is not None and not kwargs.keys() & set(SWITCHES):
        value = "false" if switch in THINKING_SWITCHES else '"low"'
        logger.warning(
            "The chat template has a switch `%s`, which was not given, so its default holds. Say how the target is to "
            "be used, in every command alike: `--chat_template_kwargs '{\"%s\": %s}'`, for example.",
            switch, switch, value,
        )  # fmt: skip


def tokenizer_facts(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """What decides which token ids a tokenizer gives to conversations."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    return [type(tokenizer).__name__, words, str(tokenizer.special_tokens_map), _source(tokenizer)]


def _source(tokenizer: PreTrainedTokenizerBase) -> str:
    """The default template, for a tokenizer may have several."""
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        names = sorted(tokenizer.chat_template)
        raise TrainingError(
            f"One of the chat templates of `{tokenizer.name_or_path}` must be called `default`, but they are {names}. "
            "Set `tokenizer.chat_template` to one of them, and save it with the target."
        ) from error
