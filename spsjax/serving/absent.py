"""Fields of a request that have no effect, which are ignored.

Clients send many fields with values that mean "nothing". A value with an effect that is not
implemented is refused, with the name of its field.
"""

import json
from collections.abc import Mapping

from spsjax.errors import InputError, short_repr

# Values without an effect, by field. Other values are refused.
COMMON = {
    "presence_penalty": [0],
    "frequency_penalty": [0],
    "repetition_penalty": [1],
    "length_penalty": [1],
    "no_repeat_ngram_size": [0],
    "min_tokens": [0],
    "logit_bias": [{}, []],
    "use_beam_search": [False],
    "ignore_eos": [False],
    "skip_special_tokens": [True],
    "spaces_between_special_tokens": [True],
    "include_stop_str_in_output": [False],
    "return_token_ids": [False],
    "priority": [0],
    "echo": [False],
}
COMPLETION = COMMON | {"suffix": [""]}
CHAT = COMMON | {
    "response_format": [{"type": "text"}],
    "modalities": [["text"], []],
    "web_search_options": [{}],
    "tools": [[]],
    "functions": [[]],
    "tool_choice": ["none", "auto"],
    "function_call": ["none", "auto"],
    "add_generation_prompt": [True],
    "continue_final_message": [False],
    "documents": [[]],
}
MESSAGE = {
    "refusal": [""],
    "annotations": [[]],
    "tool_calls": [[]],
    "name": [""],
    "reasoning_content": [""],
}
# Fields without an effect on the answer, whatever their value.
_NEVER = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
)
# Fields whose content is passed on: a null in it may have a meaning.
_OPAQUE = ("chat_template_kwargs",)


def without(body: Mapping, known: Mapping[str, list]) -> dict:
    """Returns a request's body without fields that have no effect.

    `known` has the values without an effect by field. Another value of these fields is an
    InputError.
    """
    body = {key: value for key, value in _without_nulls(body).items() if key not in _NEVER}
    biases = body.get("logit_bias")
    if isinstance(biases, dict):
        body["logit_bias"] = {token: bias for token, bias in biases.items() if not _is(bias, [0])}
    options = body.get("stream_options")
    if isinstance(options, dict):
        body["stream_options"] = {
            key: value for key, value in options.items() if not _is(value, [False])
        }
        if not body["stream_options"]:
            del body["stream_options"]
    messages = body.get("messages")
    if isinstance(messages, list):
        body["messages"] = [_plain(message) for message in messages]
    for key in sorted(known.keys() & body.keys()):
        if not _is(body[key], known[key]):
            wanted = " or ".join(map(json.dumps, known[key]))
            raise InputError(
                f"{key}: expected {wanted}, as others are not implemented, "
                f"found {short_repr(body[key])}"
            )
    return {key: value for key, value in body.items() if key not in known}


def _plain(message):
    """Returns a message without the fields that mean nothing."""
    if not isinstance(message, dict):
        return message
    return {key: value for key, value in message.items() if not _is(value, MESSAGE.get(key, []))}


def _is(value, others: list) -> bool:
    """Returns whether a value equals one of others; true does not equal 1."""
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in others
    )


def _without_nulls(value, key: str = ""):
    """Returns a JSON value without the fields that are null, on every level."""
    if isinstance(value, dict) and key not in _OPAQUE:
        return {name: _without_nulls(x, name) for name, x in value.items() if x is not None}
    return [_without_nulls(x) for x in value] if isinstance(value, list) else value
