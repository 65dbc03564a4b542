"""One text of an answer as OpenAI's clients read it: words, thoughts and tool calls, apart, whole or piece by piece.

How a target marks thoughts and calls says its tokenizer's `response_template`, or the table of `transformers serve`,
whose functions read them here.
"""

import codecs
import inspect
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serving.utils import (
    ReasoningText,
    ToolCall,
    build_response_parser,
    response_events_to_chunks,
)

from .engine import TokenLogprob, Written

Content = dict[str, Any]
Tools = list[dict[str, Any]]


def reply_parser(
    tokenizer: PreTrainedTokenizerBase, target: PreTrainedModel, prompt_ids: list[int], tools: Tools | None
) -> Any:
    """A parser of the text that follows a prompt; None where the target's marks are not known."""
    has_types = "tools" in inspect.signature(build_response_parser).parameters  # from Transformers 5.24 on
    given: Any = {"tools": tools} if has_types else {}
    return build_response_parser(tokenizer, target, prompt_ids, **given)


class Choice:
    """One text of an answer.

    Args:
        index (`int`): Its number in the answer.
        call_id (`str`): What the ids of its tool calls begin with.
        is_chat (`bool`): Whether it is a turn of a conversation, and not a text that goes on.
        parser (`ResponseParser`, *optional*): Reads thoughts and tool calls in it.
        end_tokens (`Sequence[str]`): Tokens that end a text. Their words stand in one that is parsed.
    """

    def __init__(
        self, index: int, call_id: str, is_chat: bool, parser: Any = None, end_tokens: Sequence[str] = ()
    ) -> None:
        self.index = index
        self.is_chat = is_chat
        self._call_id = call_id
        self._parser = parser
        self._end_tokens = () if parser is None else end_tokens
        self._num_calls = 0
        self._has_role = False
        self._unread = ""  # what follows the words that have come: a tool call that is not complete

    def chunks(self, piece: str) -> list[Content]:
        """What of a stream a new piece of the text is."""
        if not self.is_chat:
            return [self._body({"text": piece})]
        return [self._delta(content) for content in self._contents(piece)]

    def last_chunks(self, written: Written) -> list[Content]:
        """The end of a stream: what was held back, then why the text ended."""
        held = [self._delta(content) for content in self._contents(None)] if self.is_chat else []
        ending: Content = {"delta": {}} if self.is_chat else {"text": ""}
        return [*held, self._body(ending, written, self._reason(written))]

    def whole(self, written: Written) -> Content:
        """The text at once."""
        if not self.is_chat:
            return self._body({"text": written.text}, written, written.finish_reason)

        was_read = self._parser is not None
        contents = [*self._contents(written.text), *self._contents(None)]
        if was_read and self._parser is None:
            contents = self._words(written.text)
            self._num_calls = 0

        message: Content = {"role": "assistant", "content": ""}
        for content in contents:
            for name, value in content.items():
                message[name] = message[name] + value if name in message else value
        if "tool_calls" in message:
            message["content"] = message["content"] or None
            for call in message["tool_calls"]:
                del call["index"]  # of streams alone
        return self._body({"message": message}, written, self._reason(written))

    def _contents(self, piece: str | None) -> list[Content]:
        """The fields of a message that a piece of text adds to; None is its end."""
        if self._parser is None:
            return self._words(piece or "")
        try:
            events = self._parser.finalize()[1] if piece is None else self._parser.feed(piece)
        except ValueError:  # what looked like a tool call is none, or was cut short: words, then
            self._parser = None
            return self._contents(self._unread + (piece or ""))

        items = response_events_to_chunks(events)
        self._unread += piece or ""
        if items:
            last = items[-1]
            self._unread = "" if isinstance(last, ToolCall) else self._unread.rpartition(last)[2]
        return [self._content(item) for item in items]

    def _words(self, piece: str) -> list[Content]:
        """A piece that no parser reads, without the token that ends the text."""
        for token in self._end_tokens:
            piece = piece.removesuffix(token)
        return [{"content": piece}] if piece else []

    def _content(self, item: Any) -> Content:
        if isinstance(item, ReasoningText):
            return {"reasoning_content": str(item)}
        if not isinstance(item, ToolCall):
            return {"content": item}

        number = self._num_calls
        self._num_calls += 1
        function = {"name": item.name, "arguments": item.arguments}
        call = {"index": number, "id": f"{self._call_id}_{number}", "type": "function", "function": function}
        return {"tool_calls": [call]}

    def _delta(self, content: Content) -> Content:
        role = {} if self._has_role else {"role": "assistant"}
        self._has_role = True
        return self._body({"delta": {**role, **content}})

    def _reason(self, written: Written) -> str:
        return "tool_calls" if self._num_calls else written.finish_reason

    def _body(self, content: Content, written: Written | None = None, finish_reason: str | None = None) -> Content:
        form = _chat_logprobs if self.is_chat else _completion_logprobs
        logprobs = form(written.logprobs) if written is not None and written.logprobs else None
        return {"index": self.index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


def _chat_logprobs(logprobs: Sequence[TokenLogprob]) -> Content:
    """The probabilities of tokens as chats have them."""
    content = []
    for each in logprobs:
        content.append({**_token(each), "top_logprobs": [*map(_token, each.top)]})
    return {"content": content}


def _token(each: TokenLogprob) -> Content:
    token_bytes = None if each.token_bytes is None else [*each.token_bytes]
    return {"token": each.token, "logprob": each.logprob, "bytes": token_bytes}


def _completion_logprobs(logprobs: Sequence[TokenLogprob]) -> Content:
    """The probabilities of tokens as completions have them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may come in several tokens
    pieces = [each.token if each.token_bytes is None else decoder.decode(each.token_bytes) for each in logprobs]
    return {
        "tokens": [each.token for each in logprobs],
        "token_logprobs": [each.logprob for each in logprobs],
        "top_logprobs": [{top.token: top.logprob for top in each.top} for each in logprobs],
        "text_offset": [*accumulate(map(len, pieces[:-1]), initial=0)],
    }
