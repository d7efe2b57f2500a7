"""Bodies of the OpenAI requests. Unknown fields are ignored; known ones of a wrong type or value are refused."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from meta_server.errors import invalid, shown
from meta_server.validation import SamplingFields

MAX_CHOICES = 128
_SIGNED_64 = 1 << 63


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class GenerationBody(BaseModel):
    """What completions and chats have in common, vLLM's extensions included.

    The fields after `unsupported` change what is generated and are not served: only their neutral value is legal.
    """

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    request_id: str | None = None

    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "min_p": (0,),
        "logit_bias": ({},),
        "prompt_logprobs": (),
        "best_of": (1,),
        "use_beam_search": (False,),
        "include_stop_str_in_output": (False,),
        "skip_special_tokens": (True,),
        "response_format": ({"type": "text"},),
    }

    def check_supported(self) -> None:
        """Raises RequestFailed naming the first field whose value asks for something that is not served."""
        for name, legal in self.neutral.items():
            value = getattr(self, name)
            if value is not None and value not in legal:
                allowed = " or ".join(["null", *(repr(one) for one in legal)])
                raise invalid(name, f"{shown(value)} is not supported; legal: {allowed}")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "needs stream = true")

    @property
    def choices(self) -> int:
        """Answers wanted per prompt."""
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(
        self, *, max_tokens: int | None, default_max_tokens: int | None, length_param: str, logprobs: int | None
    ) -> SamplingFields:
        """The sampling fields with OpenAI's defaults; `logprobs` alternatives per token, None for none at all.

        `seed` may be negative, as in vLLM; it is taken modulo 2^64. `top_k` -1 means off, like 0.
        """
        if self.seed is not None and not -_SIGNED_64 <= self.seed < 2 * _SIGNED_64:
            raise invalid("seed", f"{self.seed}; legal: {-_SIGNED_64} to {2 * _SIGNED_64 - 1}")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingFields(
            max_tokens=max_tokens,
            default_max_tokens=default_max_tokens,
            length_param=length_param,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=0 if self.top_k is None or self.top_k == -1 else self.top_k,
            seed=None if self.seed is None else self.seed % (2 * _SIGNED_64),
            stop=tuple(stops),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            min_tokens=self.min_tokens or 0,
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
        )


class CompletionBody(GenerationBody):
    """`POST /v1/completions`. `prompt` is checked by `prompts_of`, whose errors are clearer than a union's."""

    prompt: Any = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {**GenerationBody.neutral, "echo": (False,), "suffix": ("",)}


class ChatMessage(BaseModel):
    """One message; fields other than role and content reach the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(min_length=1)]
    content: str | list[dict[str, Any]] | None = None


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {
        **GenerationBody.neutral,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
    }
