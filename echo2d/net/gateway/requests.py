"""Validates the fields of gateway requests, and turns the requests of all endpoints into one type, Ask.

A field that the engines cannot serve is refused by name (400), unless it is null or has its neutral
value. Fields without an effect on the output (user, metadata, ...) are ignored; unknown fields are
refused. Not here: turning text into tokens.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echo2d.core.base.codec import INT_MAX
from echo2d.core.protocol.sampling import TEMPERATURE_MAX, TEMPERATURE_MIN, Sampling
from echo2d.core.work.calls.open_calls import CHOICES_MAX
from echo2d.net.gateway.errors import unusable

# OpenAI's limit.
STOPS_MAX = 4
# A stream also holds back at most this much text, because it may be the beginning of a stop text.
STOP_CHARS_MAX = 256
STOP_IDS_MAX = 64
# This leaves room for the seeds of further choices, which count up from the given seed.
SEED_MAX = (1 << 62) - 1
TOP_K_MAX = 1 << 24
MIN_P_MAX = 0.999
MESSAGES_MAX = 4096
TOOLS_MAX = 256
# Fields of a message that are texts, besides its content.
_MESSAGE_TEXTS = ("role", "name", "tool_call_id", "reasoning_content")

# Fields that the engines do not support, with the values under which they would have no effect.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,), "echo": (False,), "frequency_penalty": (0,), "function_call": ("none",),
    "functions": ([],), "ignore_eos": (False,), "logit_bias": ({},), "length_penalty": (1,),
    "min_tokens": (0,), "modalities": (["text"],), "presence_penalty": (0,),
    "repetition_penalty": (1,), "response_format": ({"type": "text"},), "suffix": ("",),
    "tool_choice": ("none", "auto"), "tools": ([],), "top_logprobs": (0,),
    "use_beam_search": (False,), "prompt_logprobs": (0,), "features": (None,),
    "return_routed_experts": (False,),
}  # fmt: skip
# Why some of these fields are refused, where "is not supported" would not explain it.
_REASONS: Mapping[str, str] = {
    "response_format": "expected type text; a grammar masks tokens, so that the logprobs of what is "
    "sampled are no longer those of the policy",
    "return_routed_experts": "engines report no routed experts",
}
# Fields without an effect on the output.
IGNORED = frozenset({
    "cache_salt", "metadata", "parallel_tool_calls", "priority", "prompt_cache_key", "request_id",
    "safety_identifier", "service_tier", "store", "user", "model",
})  # fmt: skip
# Fields that `read_ask` reads for every endpoint.
COMMON = frozenset({
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "n", "stop", "stop_token_ids", "seed",
    "logprobs", "skip_special_tokens",
})  # fmt: skip
STREAMED = frozenset({"stream", "stream_options"})


@dataclass(frozen=True, slots=True)
class Ask:
    """The sampling fields of one request."""

    choices: int
    max_new_tokens: int | None  # per choice; None: as many as are allowed
    sampling: Sampling
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    rng_seed: int | None  # of the first choice
    logprobs: bool
    special: bool  # whether special tokens are part of the text
    stream: bool = False
    include_usage: bool = False


def read_ask(body: Mapping[str, Any], own: frozenset[str], *, logprobs: bool) -> Ask:
    """Validate a request's fields.

    own: fields that the endpoint's handler reads itself. logprobs: whether the caller wants logprobs;
    each endpoint has its own field for that. CallRefusal: a field cannot be served.
    """
    _refuse_others(body, COMMON | STREAMED | own)
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or options.keys() - {"include_usage"}:
        raise unusable("stream_options", "expected {include_usage}")
    name = (
        "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    )
    seed = body.get("seed")
    return Ask(
        choices=_integer(body, "n", 1, 1, CHOICES_MAX),
        max_new_tokens=None if body.get(name) is None else _integer(body, name, 1, 1, 1 << 31),
        sampling=Sampling(
            _temperature(body),
            _number(body, "top_p", 1.0, 0.0, 1.0, above=True),
            _top_k(body),
            _number(body, "min_p", 0.0, 0.0, MIN_P_MAX),
        ),
        stops=_stops(body.get("stop")),
        stop_token_ids=_token_ids(body, "stop_token_ids", STOP_IDS_MAX),
        # OpenAI's seeds may be negative.
        rng_seed=None
        if seed is None
        else _integer(body, "seed", 0, -INT_MAX - 1, INT_MAX) % (SEED_MAX + 1),
        logprobs=logprobs,
        special=not _boolean(body, "skip_special_tokens", default=True),
        stream=_boolean(body, "stream"),
        include_usage=_boolean(options, "include_usage"),
    )


def check_routed_experts(body: Mapping[str, Any]) -> None:
    """Check `routed_experts_prompt_start`. It only affects routed experts, which are refused, so it is ignored."""
    _integer(body, "routed_experts_prompt_start", 0, 0, 1 << 31)


def wants_logprobs(body: Mapping[str, Any]) -> bool:
    """Whether a chat request wants logprobs: true or false."""
    return _boolean(body, "logprobs")


def wants_legacy_logprobs(body: Mapping[str, Any]) -> bool:
    """Whether a completion request wants logprobs.

    The field is a number of alternative tokens, and engines report none: only 0, the logprobs of
    the sampled tokens, can be served.
    """
    found = body.get("logprobs")
    if found is None or found is False:
        return False
    if type(found) is not int or found != 0:
        raise unusable(
            "logprobs",
            "expected 0 or null; engines report the sampled tokens only",
            "unsupported_value",
        )
    return True


def read_tokens(value: Any, name: str, most: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not 0 < len(value) <= most:
        raise unusable(name, f"expected a list of 1 to {most} token ids")
    if not all(type(token) is int and 0 <= token < 1 << 31 for token in value):
        raise unusable(name, "expected token ids")
    return tuple(value)


def read_tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools that the model may call: none if `tool_choice` is "none".

    CallRefusal: a call is required, which no engine can enforce.
    """
    tools = [] if body.get("tools") is None else body["tools"]
    if not isinstance(tools, list) or len(tools) > TOOLS_MAX or not all(map(_is_tool, tools)):
        raise unusable(
            "tools",
            f"expected a list of at most {TOOLS_MAX} {{type: function, function: {{name}}}}",
        )
    _check_json(tools, "tools")
    choice = body.get("tool_choice") or "auto"
    if choice not in ("none", "auto"):
        raise unusable(
            "tool_choice",
            'expected "none" or "auto"; no engine can force a call',
            "unsupported_value",
        )
    if tools and body.get("parallel_tool_calls") is False:
        raise unusable(
            "parallel_tool_calls", "no engine can keep a model to one call", "unsupported_value"
        )
    return [] if choice == "none" else tools


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return (
        isinstance(function, dict)
        and tool.get("type") == "function"
        and isinstance(function.get("name"), str)
    )


def read_messages(value: Any) -> list[dict[str, Any]]:
    """The messages as chat templates take them; the text parts of a content are joined.

    Besides role and content: name, an assistant's tool_calls and reasoning_content, and the
    tool_call_id of a tool's output.
    """
    if not isinstance(value, list) or not 0 < len(value) <= MESSAGES_MAX:
        raise unusable("messages", f"expected a list of 1 to {MESSAGES_MAX} messages")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(value)]


def _message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise unusable(name, "expected {role, content}")
    for extra in sorted(message.keys() - {"content", "refusal", "tool_calls", *_MESSAGE_TEXTS}):
        if message[extra] not in (None, [], ""):
            raise unusable(name, f"{extra[:64]} is not supported", "unsupported_value")
    kept = {
        key: checked_text(message[key], f"{name}.{key}")
        for key in _MESSAGE_TEXTS
        if isinstance(message.get(key), str)
    }
    calls = _tool_calls(message.get("tool_calls") or [], f"{name}.tool_calls")
    # A tool may return nothing, and an assistant may call tools or refuse without any content.
    silent = message.get("content") is None and message["role"] in ("assistant", "tool")
    said = {**kept, "content": "" if silent else _content(message.get("content"), name)}
    return {**said, "tool_calls": calls} if calls else said


def _tool_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    """The calls that an assistant made: id, type and function, which has a name and arguments."""
    if not isinstance(calls, list) or not all(map(_is_tool, calls)):
        raise unusable(name, "expected a list of {id, type: function, function}")
    for call in calls:
        if not isinstance(call["function"].get("arguments"), str):
            raise unusable(name, "expected arguments as a text of JSON")
        _check_json(call, name)
    return calls


def _content(content: Any, name: str) -> str:
    parts = content if isinstance(content, list) else [{"text": content}]
    # A part that has no text, such as an image, is refused below.
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise unusable(
            f"{name}.content", "expected text, or a list of text parts", "unsupported_value"
        )
    return checked_text("".join(map(str, texts)), f"{name}.content")


def checked_text(text: str, name: str) -> str:
    """The text, if it is valid Unicode: JSON can also contain half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise unusable(name, "is not valid Unicode text") from error
    return text


def _check_json(value: Any, name: str) -> None:
    """Check that it is valid Unicode, and not nested too deeply for a template to write it."""
    try:
        checked_text(json.dumps(value, ensure_ascii=False), name)
    except RecursionError as error:
        raise unusable(name, "is nested too deeply") from error


def _refuse_others(body: Mapping[str, Any], known: frozenset[str]) -> None:
    for name, value in body.items():
        if name in known or name in IGNORED or value is None:
            continue
        if name not in NEUTRAL:
            raise unusable(name[:64], "unknown field", "unknown_field")
        # In Python True == 1 and False == 0, so a boolean is neutral only if the neutral value is that boolean.
        if not any(
            (type(value) is not bool and value == neutral) or value is neutral
            for neutral in NEUTRAL[name]
        ):
            raise unusable(name, _REASONS.get(name, "is not supported"), "unsupported_value")


def _stops(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > STOPS_MAX:
        raise unusable("stop", f"expected a text, or a list of at most {STOPS_MAX} texts")
    if not all(isinstance(stop, str) and 0 < len(stop) <= STOP_CHARS_MAX for stop in stops):
        raise unusable("stop", f"expected texts of 1 to {STOP_CHARS_MAX} characters")
    return tuple(checked_text(stop, "stop") for stop in stops)


def _token_ids(body: Mapping[str, Any], name: str, most: int) -> tuple[int, ...]:
    found = body.get(name)
    return () if found in (None, []) else read_tokens(found, name, most)


def _temperature(body: Mapping[str, Any]) -> float:
    """A temperature below TEMPERATURE_MIN becomes 0, which is greedy."""
    found = _number(body, "temperature", 1.0, 0.0, TEMPERATURE_MAX)
    return found if found >= TEMPERATURE_MIN else 0.0


def _top_k(body: Mapping[str, Any]) -> int:
    """0: all tokens. Callers may also send -1 for that, as with vLLM."""
    return max(0, _integer(body, "top_k", 0, -1, TOP_K_MAX))


def _number(
    body: Mapping[str, Any],
    name: str,
    default: float,
    low: float,
    high: float,
    *,
    above: bool = False,
) -> float:
    found = body.get(name)
    if found is None:
        return default
    # Compare with `type`, because isinstance takes booleans for integers. NaN fails the comparison.
    if type(found) not in (int, float) or not low <= found <= high:
        raise unusable(name, f"expected a number from {low:g} to {high:g}")
    if above and found == low:
        raise unusable(name, f"expected more than {low:g}")
    return float(found)


def _integer(body: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    found = body.get(name)
    if found is None:
        return default
    if type(found) is not int or not low <= found <= high:
        raise unusable(name, f"expected an integer from {low} to {high}")
    return found


def _boolean(body: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    found = body.get(name)
    if found is None:
        return default
    if type(found) is not bool:
        raise unusable(name, "expected true or false")
    return found
