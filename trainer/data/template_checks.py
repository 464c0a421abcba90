"""Checks that a chat template shows what a row contains: its tools, the calls and contents of its messages.

A template says nothing about what it leaves out, and the model would be trained without it.
"""

from __future__ import annotations

from collections.abc import Collection

from transformers import PreTrainedTokenizerBase

from trainer.data.chat_tokens import Arguments, render, without_tools
from trainer.data.chats import REASONING, Chat, Message
from verl_lite.errors import UserError

_PROBE = " verlliteprobe"
"""A text that no template contains."""


def check_tools_shown(chat: Chat, tokenizer: PreTrainedTokenizerBase, where: str, arguments: Arguments) -> None:
    """Checks that the template shows the tools of a chat.

    Args:
        chat: the messages.
        tokenizer: the tokenizer, with its chat template.
        where: place of the row, for messages.
        arguments: arguments of the template, among them `tools`.

    Raises:
        UserError: if the text of the chat is the same without the tools.
    """
    whole = render(chat, tokenizer, where, is_question=False, arguments=arguments)
    text_without_tools = _text_if_accepted(chat, tokenizer, where, without_tools(arguments))
    if whole == text_without_tools:
        raise UserError(
            f"{where}: the chat template of {tokenizer.name_or_path!r} does not show tools: set another template with "
            "data.chat_template, or leave the tools out (data.tools_key=null, data.tools_path=null)"
        )


def check_calls_shown(chat: Chat, tokenizer: PreTrainedTokenizerBase, where: str, arguments: Arguments) -> None:
    """Checks that the template shows the tool calls and the results of tools of a chat.

    Otherwise, an answer that only calls a tool would be learnt as an empty answer.

    Args:
        chat: the messages.
        tokenizer: the tokenizer, with its chat template.
        where: place of the row, for messages.
        arguments: arguments of the template.

    Raises:
        UserError: if the text of the chat is the same without its tool calls, or without its messages of tools.
    """
    chats_without = {}
    if any("tool_calls" in message for message in chat):
        chats_without["tool_calls of a message"] = [_without_calls(message) for message in chat]
    without_results = [message for message in chat if message["role"] != "tool"]
    if len(without_results) < len(chat):
        chats_without["messages of the role tool"] = without_results

    for part, chat_without in chats_without.items():
        whole = render(chat, tokenizer, where, is_question=False, arguments=arguments)
        text_without = _text_if_accepted(chat_without, tokenizer, where, arguments)
        if whole == text_without:
            raise UserError(
                f"{where}: the chat template of {tokenizer.name_or_path!r} does not show the {part}: set another "
                "template with data.chat_template, or write them as text into the content of the messages"
            )


def check_messages_shown(
    chat: Chat,
    whole: str,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    arguments: Arguments,
    *,
    learnt: Collection[int] = (),
    is_question: bool = False,
) -> None:
    """Checks that the template shows the content of each message, and the reasoning of the answers that are learnt.

    A template says nothing about a message of a role that it does not know, about a system message after the first
    message, or about an entry of another name than the one that it reads.

    Args:
        chat: the messages.
        whole: the text of the chat.
        tokenizer: the tokenizer, with its chat template.
        where: place of the row, for messages.
        arguments: arguments of the template.
        learnt: indices of the answers that are learnt. The reasoning of others is context, which many templates drop.
        is_question: True if `whole` ends with the generation prompt.

    Raises:
        UserError: if the text of the chat stays the same with another text in one of these places.
    """
    for index, message in enumerate(chat):
        names = ("content", *REASONING) if index in learnt else ("content",)
        for name in names:
            text = message.get(name)
            # the content of a message with images is a list
            if not isinstance(text, str) or text.strip() in whole:
                continue
            # the template may write it in another form, in which another text is another one, too
            changed_chat = [*chat[:index], message | {name: text + _PROBE}, *chat[index + 1 :]]
            try:
                changed = render(changed_chat, tokenizer, where, is_question=is_question, arguments=arguments)
            except UserError:
                # only a template that reads a text can refuse it
                continue
            if changed == whole:
                raise _not_shown(name, index, message, tokenizer, where)


def _not_shown(name: str, index: int, message: Message, tokenizer: PreTrainedTokenizerBase, where: str) -> UserError:
    """Returns the error about an entry of a message that the template does not show."""
    template = f"the chat template of {tokenizer.name_or_path!r}"
    if name == "content":
        left_out = f"message {index} of the role {message['role']!r} ({message[name]!r:.80})"
        return UserError(
            f"{where}: {template} does not show {left_out}: "
            "set another template with data.chat_template, or write the text into a message that the template shows"
        )
    return UserError(
        f"{where}: {template} does not show the {name} of message {index}, so the answer would be learnt without it. "
        f"A template reads one of {', '.join(REASONING)}: rename the entry, set data.chat_template or "
        "data.apply_chat_template_kwargs, or leave the entry out"
    )


def _text_if_accepted(chat: Chat, tokenizer: PreTrainedTokenizerBase, where: str, arguments: Arguments) -> str | None:
    """Returns the text of a chat from which a part was removed, or None if the template requires that part."""
    # a template cannot render a chat without messages
    if not chat:
        return ""
    try:
        return render(chat, tokenizer, where, is_question=False, arguments=arguments)
    except UserError:
        return None


def _without_calls(message: Message) -> Message:
    """Returns a message without its tool calls."""
    message_without_calls = dict(message)
    message_without_calls.pop("tool_calls", None)
    # a template may refuse a null without tool calls
    message_without_calls["content"] = message["content"] or ""
    return message_without_calls
