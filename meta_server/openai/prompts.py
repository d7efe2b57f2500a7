"""The prompts of a completion: a string, token ids, or a list of either."""

from __future__ import annotations

from meta_server.errors import RequestFailed, invalid, shown
from meta_server.openai.schema import ChatMessage

MAX_PROMPTS = 1024
Prompt = str | list[int]


def prompts_of(value: object) -> list[Prompt]:
    """The prompts in `value`; a flat list of token ids is one prompt. Raises RequestFailed naming `prompt`."""
    if value is None:
        raise invalid("prompt", "is required")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _wrong_type(value)
    if not value:
        raise invalid("prompt", "is empty; at least one token is needed")
    if all(_is_token(item) for item in value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise invalid("prompt", f"has {len(value)} prompts; legal: at most {MAX_PROMPTS}")
    if all(isinstance(item, str) for item in value):
        return value
    if _is_token(value[0]):
        raise _wrong_type(next(item for item in value if not _is_token(item)))
    for item in value:
        if not isinstance(item, list) or not all(_is_token(token) for token in item):
            raise _wrong_type(item)
    return value


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, object]]:
    """Messages as chat templates expect them: the content is one string. Raises RequestFailed naming `messages`."""
    if not messages:
        raise invalid("messages", "is empty; at least one message is needed")
    return [
        {**message.model_dump(exclude={"content"}), "content": _text_of(message, index)}
        for index, message in enumerate(messages)
    ]


def _text_of(message: ChatMessage, index: int) -> str:
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise invalid("messages", f"[{index}].content is required; only an assistant's message may be without")
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        text = part.get("text")
        if part.get("type") != "text" or not isinstance(text, str):
            raise invalid(
                "messages",
                f'[{index}].content: {shown(part)} is not supported; legal: {{"type": "text", "text": "..."}}',
            )
        texts.append(text)
    return "\n".join(texts)


def _is_token(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _wrong_type(value: object) -> RequestFailed:
    return invalid(
        "prompt", f"holds {shown(value)}; legal: a string, a list of token ids, a list of strings or of token id lists"
    )
