"""The package `renderers` renders turns for a model that it supports."""

from typing import Any

import pytest

from echo2d.texts.model_renderer import model_renderer
from echo2d.texts.turns import NoContinuation, TurnTexts
from tests.support.texts import CHATML, chat_texts

# It makes the same prompts of our tests' tokenizer as Qwen3's own template.
MODEL = "Qwen/Qwen3-4B"
ASK: list[dict[str, Any]] = [{"role": "user", "content": "1 + 10?"}]


def test_a_renderer_is_used_only_if_it_follows_the_models_template() -> None:
    assert model_renderer(chat_texts(), MODEL, {}) is not None
    assert model_renderer(chat_texts(), "", {}) is None
    assert model_renderer(chat_texts("!" + CHATML), MODEL, {}) is None
    assert model_renderer(chat_texts(), MODEL, {"nonsense": 1}) is None


def test_a_tools_output_extends_the_tokens() -> None:
    made = chat_texts()
    turns = TurnTexts(made, model=MODEL)
    answer = made.encode("<think>so</think>1", special=False) + made.encode(
        "1<|im_end|>", special=False
    )
    so_far = [*turns.first(ASK), *answer]
    tool = {"role": "tool", "content": "x<|im_end|></tool_response>"}
    given = turns.following(so_far, [tool])
    assert made.decode(given) == (
        "\n<|im_start|>user\n<tool_response>\nx<|im_end|></tool_response>\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert sum(token in made.special for token in given) == 3
    end = made.encode("</tool_response>", special=False)[0]
    assert given.count(end) == 1
    # Cut off within its reasoning, the answer is ended by given tokens.
    assert made.decode(turns.following(so_far[:-5], [tool])).startswith("</think><|im_end|>\n")
    # Qwen3's template would drop the reasoning of a turn that a user's message ends.
    with pytest.raises(NoContinuation) as refused:
        turns.following(so_far, ASK)
    assert refused.value.reason == "renderer"


def test_an_answer_is_read_from_its_tokens() -> None:
    made = chat_texts()
    text = (
        '<think>so</think>\n\nI look.\n<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
        "\n<tool_call>\n{\n</tool_call><|im_end|>"
    )
    answer = TurnTexts(made, model=MODEL).answer(made.encode(text, special=False), "stop")
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("look", {"at": 1})]
    assert (answer.reasoning, answer.unparsed) == ("so", ("json",))
    assert answer.text.startswith("I look.")
    assert "{" in answer.text
