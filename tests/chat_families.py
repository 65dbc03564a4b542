"""Chat templates of ten families of targets, and rows for them: written by us after what the families' templates are known to do.

Each is short and does what matters for training: role marks, what ends a turn, system turns, thoughts, tools. None is a copy.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

Row = list[dict[str, str]]

# What Qwen3 and others do: a thought is shown in answers behind the last question alone. It may stand in `content` or beside it.
_SPLIT = (
    "{% set thought = m.reasoning_content | default('') %}{% set said = m.content %}"
    "{% if '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1] %}"
    "{% set said = said.split('</think>')[-1] %}{% endif %}"
)
_LAST = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
_CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
_CHATML_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@dataclass(frozen=True)
class Family:
    """A chat template, and what it makes of an answer."""

    template: str
    special: tuple[str, ...]  # special tokens
    end: str  # of an answer, as the target writes it
    opening: str  # of an answer, in the prompt
    takes_system: bool = True
    thought: tuple[str, str] | None = (
        None  # what stands around thoughts, None where the template shows them as they are
    )
    treatment: str = "whole"  # of a row of several turns without thoughts
    thinking_treatment: str = "whole"  # of a row of several turns with thoughts
    kwargs: dict[str, Any] = field(default_factory=dict)
    vocabulary: tuple[str, ...] = ("<think>", "</think>")  # added tokens that are not special


FAMILIES = {
    "chatml": Family(_CHATML + _CHATML_PROMPT, ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "assistant\n"),
    "qwen2.5": Family(  # a system turn of its own, and tools
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Qwen.<|im_end|>\n{% endif %}"
        "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}" + _CHATML + _CHATML_PROMPT,
        ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "assistant\n",
    ),
    "qwen3": Family(
        _LAST + "{% for m in messages %}" + _SPLIT + "<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or thought) %}"
        "<think>\n{{ thought.strip('\n') }}\n</think>\n\n{{ said.lstrip('\n') }}"
        "{% else %}{{ said.lstrip('\n') if m.role == 'assistant' else said }}{% endif %}<|im_end|>\n{% endfor %}"
        + _CHATML_PROMPT[: -len("{% endif %}")]
        + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
        ("<|im_start|>", "<|im_end|>"), "<|im_end|>", "assistant\n",
        thought=("<think>\n", "\n</think>\n\n"), treatment="turn by turn", thinking_treatment="turn by turn",
    ),
    "llama3": Family(  # trims, knows tools, and begins with a day
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
        "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
        "<|start_header_id|>system<|end_header_id|>\n\nToday: {{ date_string | default('26 Jul 2024') }}\n\n"
        "{% if tools is not none and tools %}Tools: {{ tools | tojson }}\n\n{% endif %}{{ system }}<|eot_id|>"
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
        "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>", "assistant<|end_header_id|>\n\n",
    ),
    "gemma": Family(
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate') }}{% endif %}<start_of_turn>"
        "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", "model\n", takes_system=False,
    ),
    "mistral": Family(  # the system turn stands in the question; no prompt for answers
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content ~ '\n\n' %}"
        "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{% for m in messages %}"
        "{% if m.role == 'user' %}[INST] {{ system if loop.first }}{{ m.content }} [/INST]"
        "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}",
        ("[INST]", "[/INST]"), "</s>", " [/INST]",
    ),
    "phi": Family(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|end|>", "<|assistant|>\n",
    ),
    "deepseek-r1": Family(  # the prompt begins the thought, and no answer is ever shown with its thought
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
        "<|User|>{{ m.content }}{% else %}<|Assistant|>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}",
        ("<|User|>", "<|Assistant|>"), "</s>", "<|Assistant|><think>\n",
        thought=("", "\n</think>\n\n"), treatment="left out", thinking_treatment="as written",
    ),
    "gpt-oss": Family(  # channels; thoughts of earlier turns go, and the last answer ends otherwise
        _LAST + "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% if m.thinking and loop.index0 > ns.last %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
        "{% endif %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
        "{% else %}<|start|>{{ 'developer' if m.role == 'system' else m.role }}<|message|>"
        "{% if loop.first %}Reasoning: {{ reasoning_effort | default('medium') }}\n\n{% endif %}{{ m.content }}<|end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"), "<|return|>", "<|start|>assistant",
        thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        treatment="turn by turn", thinking_treatment="turn by turn",
    ),
    "glm": Family(  # nothing ends a turn but the beginning of the next
        "[gMASK]<sop>" + _LAST + "{% for m in messages %}" + _SPLIT + "<|{{ m.role }}|>\n{% if m.role == 'assistant' %}"
        "{% if loop.index0 > ns.last and thought %}<think>{{ thought.strip() }}</think>{% else %}<think></think>{% endif %}"
        "{{ '\n' + said.strip() }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>\n{% endif %}{% endif %}",
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"), "<|user|>", "<|assistant|>\n",
        thought=("<think>", "</think>\n"), thinking_treatment="turn by turn",
    ),
}  # fmt: skip


@cache
def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of one token a byte, besides the family's own tokens, with its chat template."""
    family, alphabet = FAMILIES[name], sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>", *family.special])
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in family.vocabulary])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = family.template
    return fast


def family_rows(num_rows: int, family: Family, share_thinking: float = 0.5, seed: int = 0) -> list[Row]:
    """Conversations of one to four turns, some with a system turn, and so many of them with thoughts in all answers."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> int:
        return int(torch.randint(count, (1,), generator=generator))

    rows = []
    for number in range(num_rows):
        row: Row = [{"role": "system", "content": f"Be brief, {number}."}] if draw(3) == 0 else []
        thinks = draw(1000) < 1000 * share_thinking
        for turn in range(1 + draw(4)):
            row.append({"role": "user", "content": f"What is {number} plus {turn}?"})
            answer = {"role": "assistant", "content": f"It is {number + turn}."}
            thought = f"Add {number} and {turn}."
            if thinks and family.thought is not None and draw(2):
                answer["reasoning_content"] = thought
            elif thinks and "<|channel|>" not in family.template:
                answer["content"] = f"<think>\n{thought}\n</think>\n\n{answer['content']}"
            row.append(answer)
        rows.append(row)
    return rows
