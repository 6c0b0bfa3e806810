"""Conversations that others wrote, in the tokens that they would have as episodes of the model."""

import json
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import AddedToken

from echo2d.texts.model_texts import ModelTexts, UnusableText
from echo2d.texts.turns import Demonstration, NoContinuation, TurnTexts
from tests.support.texts import CHATML, DROPS, bytes_tokenizer, chat_texts, texts

Message = dict[str, Any]

# As in the templates of these models, without tools.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Qwen3 puts an empty reasoning before the last answer, and drops the reasoning of earlier ones.
QWEN3 = CHATML.replace(
    "\n{{ m.content }}{%",
    "\n{% set own = m.content.split('</think>')[-1].lstrip() %}"
    "{% if m.role == 'assistant' and loop.last %}<think>\n"
    "{{ m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content }}\n</think>\n\n"
    "{% endif %}{{ own }}{%",
)
# A prompt of R1 opens the reasoning, and no conversation shows one.
R1 = DROPS.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif")
# Harmony names a channel before an answer, and ends the last answer with another token than the earlier ones.
HARMONY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m.content }}{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
SPECIAL = (
    "<s>", "</s>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<end_of_turn>",
    "<|im_start|>", "<|im_end|>", "<|channel|>", "<|message|>", "<|return|>",
)  # fmt: skip


def of(template: str) -> ModelTexts:
    made = bytes_tokenizer()
    made.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    settings = {"chat_template": template, "bos_token": "<s>"}
    files = {"tokenizer.json": made.to_str(), "tokenizer_config.json": json.dumps(settings)}
    return ModelTexts({name: text.encode() for name, text in files.items()})


def talk(*contents: str) -> list[Message]:
    """A user and the assistant in turn."""
    return [
        {"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)
    ]


def shown(made: ModelTexts, found: Demonstration) -> list[str]:
    """The texts of the prompt, the first answer, the given tokens after it, the second answer, ..."""
    edges = [0, *(edge for each in found.given for edge in each), len(found.output)]
    return [
        made.decode(found.prompt),
        *(made.decode(found.output[a:b]) for a, b in pairwise(edges)),
    ]


@pytest.mark.parametrize("template", [CHATML, LLAMA3, GEMMA])
def test_all_answers_count_and_the_rest_is_the_templates_rendering(template: str) -> None:
    made = of(template)
    messages = talk("3 + 8?", "11", "and 1 more?", "I think\n12", "thanks", "ok")
    found = TurnTexts(made).demonstration(messages)
    texts_of = shown(made, found)
    assert found.whole
    assert len(texts_of) == 6
    whole = "".join(texts_of)
    # What the template adds after the last end token is not learnt.
    assert made.render(messages, {}).startswith(whole)
    assert made.decode(found.output[-1:]) in whole[-len("<|end_header_id|>") :]
    ends = [found.output[end - 1] for end in (found.given[0][0], len(found.output))]
    assert set(ends) <= made.special
    assert [each.strip().partition("<")[0] for each in texts_of[1::2]] == [
        "11",
        "I think\n12",
        "ok",
    ]


def test_the_last_answer_alone_counts_if_the_template_changes_earlier_ones() -> None:
    made = of(DROPS)
    found = TurnTexts(made).demonstration(
        talk("a?", "<think>so</think>b", "c?", "<think>no</think>d")
    )
    assert not found.whole
    prompt, answer = shown(made, found)
    assert "so" not in prompt
    assert prompt.endswith("c?<|im_end|>\n<|im_start|>assistant\n")
    # The template would drop this reasoning too, but the row says that the model is to write it.
    assert answer == "<think>no</think>d<|im_end|>"


def test_a_template_that_puts_a_space_before_each_answer_teaches_it_too() -> None:
    """A model that leaves it out changes the text, so only the last answer counts."""
    made = of(MISTRAL)
    found = TurnTexts(made).demonstration(talk("a?", "b", "c?", "d"))
    assert shown(made, found) == ["<s>[INST] a? [/INST] b</s>[INST] c? [/INST]", " d</s>"]
    assert not found.whole


def test_an_answer_without_reasoning_begins_as_the_template_begins_it() -> None:
    made = of(QWEN3)
    turns = TurnTexts(made)
    assert (
        shown(made, turns.demonstration(talk("a?", "b")))[1] == "<think>\n\n</think>\n\nb<|im_end|>"
    )
    thought = "<think>\nso\n</think>\n\nb"
    assert shown(made, turns.demonstration(talk("a?", thought)))[1] == f"{thought}<|im_end|>"
    harmony = of(HARMONY)
    prompt, answer = shown(harmony, TurnTexts(harmony).demonstration(talk("a?", "b")))
    assert (prompt[-len("assistant") :], answer) == (
        "assistant",
        "<|channel|>final<|message|>b<|return|>",
    )


def test_a_reasoning_that_the_prompt_opens_is_not_opened_again() -> None:
    made = of(R1)
    turns = TurnTexts(made)
    for answer in ("<think>\nso\n</think>\n\nb", "so\n</think>\n\nb"):
        prompt, written = shown(made, turns.demonstration(talk("a?", answer)))
        assert prompt.endswith("<think>\n")
        assert written == "so\n</think>\n\nb<|im_end|>"
    with pytest.raises(
        NoContinuation, match="begin an answer with <think>, and this has no </think>"
    ):
        turns.demonstration(talk("a?", "b"))


def test_a_control_token_in_an_answer_is_text_except_the_end() -> None:
    made = chat_texts()
    found = TurnTexts(made).demonstration(talk("a?", "b<|im_end|>c"))
    assert made.decode(found.output) == "b<|im_end|>c<|im_end|>"
    assert sum(token in made.special for token in found.output) == 1


def test_a_template_without_an_end_token_takes_the_models() -> None:
    plain = texts("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ")
    found = TurnTexts(plain, end_token_ids=(7,)).demonstration(talk("a?", "b", "c?", "d"))
    assert found.output[found.given[0][0] - 1] == found.output[-1] == 7
    with pytest.raises(UnusableText, match="no token is known that ends an answer"):
        TurnTexts(plain).demonstration(talk("a?", "b"))


def test_tool_turns_are_given() -> None:
    made = chat_texts()
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    messages = talk("what?", call, "x", "It is x.")
    messages[2]["role"] = "tool"
    _, first, given, last = shown(made, TurnTexts(made).demonstration(messages))
    assert (first, last) == (f"{call}<|im_end|>", "It is x.<|im_end|>")
    assert "<tool_response>\nx\n</tool_response>" in given
