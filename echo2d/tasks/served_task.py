"""A task as its process serves it: numbers of prompts in, packed tokens and rewards out.

    prompt index --> the task's prompt --a text task--> chat template --> tokenizer --> tokens
    output tokens --a text task--> text --> the task's reward --> value and parts

The last prompts are kept, because their answers come soon. An older prompt is made again: a task
gives the same prompt for the same index.
"""

import json
from array import array
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.model_config import end_token_ids
from echo2d.errors import OperatorFault
from echo2d.tasks.base import (
    ATTACHMENTS_BYTES_MAX,
    ATTACHMENTS_MAX,
    REWARD_PARTS_MAX,
    TASK_NAME_CHARS_MAX,
    Answer,
    Prompt,
    Reward,
    Task,
    TextPrompt,
    TextTask,
)
from echo2d.texts.files import read_text_files

if TYPE_CHECKING:
    from echo2d.core.protocol.control_messages import Finish
    from echo2d.texts.turns import TurnTexts

# The learner refuses larger rewards, because their squares would not be finite in float32.
_REWARD_MAX = 1e15
TAGS_MAX = 16  # facts of one prompt
TURN_TEXTS = "echo2d.tasks.served_task:make_turn_texts"  # texts of environments in text
NEEDS_MODEL = "a task in text needs a model with tokenizer.json and a chat template"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What turns text into tokens: a model's files, and the settings of its chat template."""

    directory: str
    files: Mapping[str, bytes]
    template: str | None  # replaces the model's chat template
    system: str  # the first message of every prompt; empty: none
    options: Mapping[str, Any]  # further variables of the template
    stops: Sequence[str] = ()  # texts that end an answer
    # These are as in `TextSettings`.
    turns: str = TURN_TEXTS
    day: str = ""

    @staticmethod
    def read(facts: Mapping[str, Any]) -> "ModelFiles":
        """Read the files. facts: all other fields. Blocking. OperatorFault: a file cannot be read."""
        return ModelFiles(files=read_text_files(Path(facts["directory"])), **facts)


class TaskTexts:
    """Turns the prompts of a text task into tokens, and answers into text.

    OperatorFault: the model's tokenizer cannot be read.
    """

    def __init__(self, model: ModelFiles) -> None:
        # Imported here because a task of tokens starts faster without it.
        from echo2d.texts.model_texts import ModelTexts

        if "tokenizer.json" not in model.files:
            raise OperatorFault(f"{model.directory} has no tokenizer.json; {NEEDS_MODEL}")
        self._texts = ModelTexts(model.files, model.template, day=model.day)
        self._system, self._options, self._stops = model.system, model.options, model.stops
        self._directory = model.directory

    def tokens(self, prompt: TextPrompt) -> list[int]:
        """The tokens of a prompt.

        UnusableText: the chat template refuses these messages; the fault says where they are from. OperatorFault: the
        model has no chat template.
        """
        from echo2d.texts.model_texts import UnusableText
        from echo2d.texts.plain_contents import encode_prompt

        messages = list(prompt.messages)
        if self._system and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": self._system})
        try:
            return encode_prompt(self._texts, messages, self._options)
        except UnusableText as fault:
            if fault.code == "no_chat_template":
                raise OperatorFault(
                    f"{self._directory} has no chat template; take an -Instruct model, or put a "
                    "chat_template.jinja into that directory"
                ) from fault
            raise UnusableText(prompt.where or fault.part, fault.detail, fault.code) from fault

    def turn_end(self) -> int | None:
        """The special token that the chat template puts after an answer; None: there is none."""
        from echo2d.texts.template_probe import turn_end

        return turn_end(self._texts, self._options)

    def answer(self, tokens: Sequence[int], finish: "Finish") -> Answer:
        """The text of the tokens, up to the first stop string.

        ValueError: by `finish` the text ends at a stop string, but it has none.
        """
        text = self._texts.decode(tokens[:-1] if finish == "stop" else tokens)
        ends = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if finish == "stop_string" and not ends:
            raise ValueError("the answer was reported to end at a stop string, but has none")
        return Answer(text[: min(ends)] if ends else text, finish, len(tokens))

    def given(self, text: str) -> Answer:
        """An answer that was given as text."""
        return Answer(text, "stop", len(self._texts.encode(text, special=False)) + 1)


def make_turn_texts(model: ModelFiles) -> "TurnTexts":
    """The turns of an environment in text, made with its model's own tokenizer and chat template.

    OperatorFault: the model's tokenizer cannot be read.
    """
    from echo2d.texts.model_texts import ModelTexts
    from echo2d.texts.turns import TurnTexts

    config = json.loads(model.files.get("config.json", b"{}"))
    return TurnTexts(
        ModelTexts(model.files, model.template, day=model.day),
        options=model.options,
        end_token_ids=end_token_ids(config),
        stops=model.stops,
    )


class ServedTask:
    """See the module docstring. OperatorFault: a text task without a model."""

    def __init__(self, task: Task | TextTask, model: ModelFiles | None) -> None:
        self._task: Any = task
        self._texts: TaskTexts | None = None
        if isinstance(task, TextTask):
            if model is None:
                raise OperatorFault(f"there is no run.base_model; {NEEDS_MODEL}")
            self._texts = TaskTexts(model)
        self._prompts: dict[int, Prompt | TextPrompt] = {}
        self.concurrent = isinstance(task, TextTask) and task.concurrent

    def introduction(self) -> list[Any]:
        """[name, stop_token_ids, digest of its data, prompts of an epoch or None, concurrent, in
        text, an environment, the token that ends a turn or None].
        """
        task = self._task
        return [
            str(task.name),
            [] if self._texts else [int(token) for token in task.stop_token_ids],
            bytes(getattr(task, "digest", b"")),
            len(task) if hasattr(task, "__len__") else None,
            self.concurrent,
            self._texts is not None,
            False,
            None if self._texts is None else self._texts.turn_end(),
        ]

    def prompt(self, index: int) -> list[Any]:
        """[tokens, tags, row, attachments]. NoMorePrompts: the prompts have ended."""
        prompt = self._prompt(index)
        tokens = self._tokens(prompt)
        attached = checked_attachments(prompt.attachments)
        return [packed_tokens(tokens), checked_tags(prompt.tags), short_name(prompt.row), attached]

    def reward(self, index: int, output: bytes, finish: "Finish") -> list[Any]:
        """[value, parts]. Unjudged: the answer cannot be judged."""
        return checked_reward(self._ask(index, output, finish))

    async def reward_later(self, index: int, output: bytes, finish: "Finish") -> list[Any]:
        """`reward` of a concurrent task."""
        return checked_reward(await self._ask(index, output, finish))

    def judge(self, index: int, text: str) -> list[Any]:
        """`reward` of an answer in text, whose tokens are unknown. OperatorFault: the task is in tokens."""
        return checked_reward(self._ask_of_text(index, text))

    async def judge_later(self, index: int, text: str) -> list[Any]:
        """`judge` of a concurrent task."""
        return checked_reward(await self._ask_of_text(index, text))

    def expected(self, index: int) -> list[Any]:
        """[the expected answer or None, where the prompt is from], if the task has these."""
        prompt = self._prompt(index)
        if index == 0 and self._tokens(self._task.prompt(0)) != self._tokens(prompt):
            raise OperatorFault(
                "prompt(0) gives another prompt at each call; expected the same one: seed random choices with the index"
            )
        find = getattr(self._task, "expected", None)
        text = None if find is None or self._texts is None else getattr(find(prompt), "text", None)
        return [text if isinstance(text, str) else None, getattr(prompt, "where", "")]

    def data_caution(self) -> str:
        """The task's warning about its data; empty: none."""
        find = getattr(self._task, "data_caution", None)
        return "" if find is None else str(find())

    def where(self, request: Sequence[Any]) -> str:
        """For people: where the prompt of a request is from; empty: not known."""
        asked = self._prompts.get(request[1]) if len(request) > 1 else None
        return str(getattr(asked, "where", ""))

    def code(self, call: str) -> Any:
        """The code object of the function that makes prompts or rewards; None: it is not written in Python."""
        found = getattr(self._task, "scorer", None) or self._task.reward
        if call == "prompt":
            found = self._task.prompt
        return getattr(getattr(found, "func", found), "__code__", None)

    # --- inside

    def _tokens(self, prompt: Prompt | TextPrompt) -> Sequence[int]:
        if self._texts is not None and isinstance(prompt, TextPrompt):
            return self._texts.tokens(prompt)
        return list(prompt.tokens)  # type: ignore[union-attr] # of a task of tokens

    def _ask_of_text(self, index: int, text: str) -> Any:
        if self._texts is None:
            raise OperatorFault("this task is in tokens; it cannot judge a text")
        return self._task.reward(self._prompt(index), self._texts.given(text))

    def _ask(self, index: int, output: bytes, finish: "Finish") -> Any:
        prompt, tokens = self._prompt(index), array("i", output).tolist()
        if self._texts is None:
            return self._task.reward(prompt, tokens)
        return self._task.reward(prompt, self._texts.answer(tokens, finish))

    def _prompt(self, index: int) -> Prompt | TextPrompt:
        found = self._prompts.get(index)
        if found is None:
            found = self._task.prompt(index)
            if not isinstance(found, TextPrompt) and not hasattr(found, "tokens"):
                wanted = "Prompt" if self._texts is None else "TextPrompt"
                raise TypeError(f"expected a {wanted}; found {type(found).__name__} {found!r:.80}")
            self._prompts[index] = found
            keep_newest(self._prompts, 1024)
        return found


def packed_tokens(tokens: Sequence[int]) -> bytes:
    """Pack tokens. TypeError, OverflowError: not all of them are 32-bit integers."""
    packed = array("i", tokens)
    if any(type(token) is bool for token in tokens):
        raise TypeError("a bool is not a token")
    return packed.tobytes()


def checked_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """The tags as short texts. ValueError: there are too many, or a name is too long."""
    if len(tags) > TAGS_MAX:
        raise ValueError(f"{len(tags)} tags; at most {TAGS_MAX} are allowed")
    return {short_name(key): str(value)[:TASK_NAME_CHARS_MAX] for key, value in tags.items()}


def checked_attachments(attachments: Mapping[str, bytes]) -> dict[str, bytes]:
    """The attachments by name. ValueError: there are too many, or they are too large."""
    found = {short_name(name): bytes(content) for name, content in attachments.items()}
    size = sum(map(len, found.values()))
    if len(found) > ATTACHMENTS_MAX or size > ATTACHMENTS_BYTES_MAX:
        raise ValueError(
            f"attachments of a prompt: expected at most {ATTACHMENTS_MAX}, with at most {ATTACHMENTS_BYTES_MAX} "
            f"bytes in all; found {len(found)} with {size} bytes; make them smaller"
        )
    return found


def short_name(text: object) -> str:
    if len(name := str(text)) > TASK_NAME_CHARS_MAX:
        raise ValueError(
            f"{name[:TASK_NAME_CHARS_MAX]!r}...: at most {TASK_NAME_CHARS_MAX} characters"
        )
    return name


def _number(found: Any) -> float:
    """The value as a float. TypeError: it is not a number; a text never is, even "1.0"."""
    with suppress(TypeError):
        if not isinstance(found, str | bytes):
            return float(found)
    raise TypeError(f"expected a number or Reward; found {type(found).__name__} {found!r:.80}")


def checked_reward(found: Any) -> list[Any]:
    """[value, parts]. TypeError: it is no reward. ValueError: a number is too large or NaN, or there are too many."""
    if isinstance(found, Awaitable):
        raise TypeError("the reward is awaitable, but `reward` is not declared `async def`")
    reward = found if isinstance(found, Reward) else Reward(found)
    parts = {short_name(name): _number(value) for name, value in reward.parts.items()}
    value = _number(reward.value)
    if len(parts) > REWARD_PARTS_MAX:
        raise ValueError(f"{len(parts)} parts; at most {REWARD_PARTS_MAX} are allowed")
    for number in (value, *parts.values()):
        # NaN fails this comparison too.
        if not abs(number) <= _REWARD_MAX:
            raise ValueError(f"the reward is {number}; expected at most {_REWARD_MAX:g} either way")
    return [value, parts]
