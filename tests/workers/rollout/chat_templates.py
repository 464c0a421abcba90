"""Chat templates in the style of the known families, each with a small tokenizer of its kind, made on the spot."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "You are helpful. What is one plus two? It is three. The answer is three and the observation is a wall.",
    "user assistant system model tool\n\nuser\nassistant\n go up go down go left go right up up down observation",
]

CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# thinking is stripped from turns before the last question, and re-written in those after it
QWEN3 = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' and not m.content.startswith('<tool_response>') %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}"
    "{% set answer = m.content.split('</think>')[-1].lstrip('\\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n')"
    " if '</think>' in m.content else '' %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ answer }}<|im_end|>\n"
    "{% elif m.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}"
    "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{{ m.content | tojson if m.role == 'tool' else m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

GEMMA = (
    "<bos>{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

MISTRAL = (
    "<s>{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}"
    "{% endfor %}"
)

# the system message stands in the last question, so it moves as the conversation grows
MISTRAL_MOVING_SYSTEM = (
    "<s>{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {% if loop.last and system %}{{ system }}\n\n{% endif %}{{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}"
    "{% endfor %}"
)

# a call needs an id of nine characters, which stands next to its result
MISTRAL_TOOLS = (
    "<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' and m.tool_calls %}[TOOL_CALLS][{% for call in m.tool_calls %}"
    "{% if call.id is not defined or call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}, '
    '"id": "{{ call.id }}"}{{ ", " if not loop.last }}{% endfor %}]</s>'
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}{{ raise_exception('no id') }}{% endif %}"
    '[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %}{{ raise_exception('unknown role') }}{% endif %}"
    "{% endfor %}"
)

# no token ends a turn: the role of the next message does
GLM = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|assistant|>\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "\n<tool_call>{{ call.function.name }}{% for key, value in call.function.arguments.items() %}"
    "\n<arg_key>{{ key }}</arg_key>\n<arg_value>{{ value if value is string else value | tojson }}</arg_value>"
    "{% endfor %}\n</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|observation|>{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

# the name of the function stands next to its result
NAMED_RESULTS = (
    "{% if tools %}TOOLS {{ tools | tojson }}<e>{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<b>result of {{ m.name }} ({{ m.tool_call_id }}): {{ m.content }}<e>"
    "{% else %}<b>{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<e>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<b>assistant: {% endif %}"
)

LLAMA31_TOOLS = (
    "<|begin_of_text|>{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('single calls only') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eom_id|>'
    "{% else %}{{ m.content | tojson if m.role == 'tool' else m.content | trim }}<|eot_id|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

# gpt-oss writes calls in channels, which are not parsed
HARMONY = (
    "{% if tools %}namespace functions {{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.tool_calls %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}"
    "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@functools.cache
def byte_level(template: str, end: str, *special: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE with merges, as Qwen's and Llama-3's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=["<pad>", end, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token="<pad>", chat_template=template)


@functools.cache
def metaspace(template: str, *special: str) -> PreTrainedTokenizerFast:
    """A BPE over words with a leading mark, as Llama-2's and Mistral's."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<pad>", "<s>", "</s>", *special],
        initial_alphabet=[*"abcdefghijklmnopqrstuvwxyz0123456789[]/INSTq?.\n"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        chat_template=template,
    )


def chatml() -> PreTrainedTokenizerFast:
    return byte_level(CHATML, "<|im_end|>", "<|im_start|>", "<|endoftext|>")


def qwen3() -> PreTrainedTokenizerFast:
    return byte_level(QWEN3, "<|im_end|>", "<|im_start|>", "<|endoftext|>")


def llama3() -> PreTrainedTokenizerFast:
    special = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
    return byte_level(LLAMA3, "<|eot_id|>", *special)


def gemma() -> PreTrainedTokenizerFast:
    return byte_level(GEMMA, "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")


def mistral() -> PreTrainedTokenizerFast:
    return metaspace(MISTRAL)


def mistral_tools() -> PreTrainedTokenizerFast:
    return byte_level(MISTRAL_TOOLS, "</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]")


def glm() -> PreTrainedTokenizerFast:
    special = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<tool_call>")
    return byte_level(GLM, "<|endoftext|>", *special, "</tool_call>")


def named_results() -> PreTrainedTokenizerFast:
    return byte_level(NAMED_RESULTS, "<e>", "<b>")


def llama31_tools() -> PreTrainedTokenizerFast:
    special = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>")
    return byte_level(LLAMA31_TOOLS, "<|eot_id|>", *special)


def harmony() -> PreTrainedTokenizerFast:
    return byte_level(HARMONY, "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>")
