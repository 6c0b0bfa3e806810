"""The task "rows": asks the questions of a data set, and scores answers by a scorer of its name.

    prompt `index` --> epoch, place --keyed permutation--> row --> messages, expected answer

Each epoch asks every row of the split once, in another order. The options alone decide which row belongs to an
index, so the order is the same after a restart.
"""

import json
from array import array
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from inspect import iscoroutinefunction, signature
from string import Formatter
from typing import Any

from echo2d.errors import OperatorFault
from echo2d.tasks.base import Answer, NoMorePrompts, Split, TextPrompt, TextTask
from echo2d.tasks.rows.files import DataRow, RowFiles, found_files
from echo2d.tasks.rows.split import row_key, rows_of
from echo2d.tasks.scorers.base import Expected, load_scorer

ROLES = ("system", "user", "assistant")
# Most rows that are checked when the task starts. Each start of a process reads them, which takes about a second.
ROWS_CHECKED_MAX = 100_000
# Parts of an assistant's message besides its text, as data sets name them.
_BESIDE_CONTENT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")


# --- the order of rows in an epoch
#
# A Feistel network of ROUNDS rounds permutes all numbers of b bits, where b is the smallest even number of bits
# that holds every row's number. A result that is no row's number is permuted again (cycle walking), on average
# four times at most. The same key, epoch and count always give the same order.

ROUNDS = 4


def permuted(place: int, count: int, *, rng_seed: int, epoch: int) -> int:
    """Which of `count` rows is at this place of the epoch; 0 <= place < count. It takes O(1) memory."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for number in range(ROUNDS):
            key = f"{rng_seed} {epoch} {number} {right}".encode()
            mixed = int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
            left, right = right, left ^ (mixed & mask)
        place = left << half | right
        if place < count:
            return place


# --- the task


@dataclass(frozen=True, slots=True)
class RowsOptions:
    """The options of `RowsTask`, which says what they mean. OperatorFault: a value has a wrong type, or is out
    of its limits.
    """

    files: Sequence[str] | str
    prompt: str = "prompt"
    messages: str = ""
    answer: str = "answer"
    answer_after: str = ""
    scorer: str = "exact"
    scorer_options: Mapping[str, Any] | None = None
    held_out: float = 0.0
    split: Split = "train"
    epochs: int = 0
    shuffle: bool = True
    rng_seed: int = 0
    tags: Sequence[str] = ()

    def __post_init__(self) -> None:
        examples = {"files": ["rows.jsonl"], "tags": ["level"], "scorer_options": {"key": 1}}
        kinds: dict[type, Any] = {list: Sequence, dict: Mapping | None, float: int | float}
        for each in fields(self):
            found, example = getattr(self, each.name), examples.get(each.name, each.default)
            texts = found if isinstance(example, list) and isinstance(found, Sequence) else ()
            right = isinstance(found, kinds.get(type(example), type(example)))
            if not right or not all(isinstance(text, str) for text in texts):
                expected = f"a value such as {json.dumps(example)}"
                raise OperatorFault(f"rows: {each.name}: expected {expected}; found {found!r}")
        if not 0 <= self.held_out < 1:
            raise OperatorFault(f"rows: held_out: expected 0 to less than 1; found {self.held_out}")
        if self.split not in ("train", "heldout"):
            raise OperatorFault(f'rows: split: expected "train" or "heldout"; found {self.split!r}')


class RowsTask(TextTask):
    """The questions of a data set, each once in every epoch, in another order.

    files: paths, patterns, or directories that `datasets` saved.
    prompt: the column with the question, or a text with columns in braces, such as "{question} Answer with a number."
    messages: the column with a list of messages, instead of `prompt`.
    answer: the column with the expected answer; it may be a path into a table, such as "reward_model.ground_truth".
    answer_after: only what comes after this text in the answer counts, such as "####".
    scorer: a name of `registry.SCORERS` or "module:function"; scorer_options: its keyword arguments.
    held_out: the share of rows that is for evaluation only. split: the side that this task asks.
    epochs: how many there are; 0: they have no end. shuffle: another order in each epoch, by rng_seed.
    tags: columns that reach the metrics.
    """

    name = "rows"
    # A task's options are its constructor's arguments. Their names are read from this signature.
    __signature__ = signature(RowsOptions)

    def __init__(self, *files: Any, **others: Any) -> None:
        options = RowsOptions(*files, **others)
        prompt, split, held_out = options.prompt, options.split, options.held_out
        self._rows = RowFiles(found_files(options.files))
        self._prompt, self._messages, self._answer = prompt, options.messages, options.answer
        self._answer_after, self._tags = options.answer_after, tuple(options.tags)
        self._columns = sorted(_columns_in(prompt)) or [prompt]
        self.scorer = load_scorer(options.scorer, options.scorer_options or {})
        self._epochs, self._shuffle = options.epochs, options.shuffle
        self._rng_seed = options.rng_seed
        self._own_scorer = ":" in options.scorer
        self._require_columns()
        self._require_secret()
        self._require_values()
        self._numbers = rows_of(split, len(self._rows), self._key, held_out=held_out)
        if not self._numbers:
            asked = len({self._key(n) for n in range(min(len(self._rows), ROWS_CHECKED_MAX))})
            raise OperatorFault(
                f"rows: the split {split!r} of {len(self._rows)} rows is empty: the number of different questions "
                f"is {asked}, and held_out = {held_out:g} divides these; add questions, or change held_out"
            )
        self.digest = self._rows.digest

    @staticmethod
    def locate(files: Sequence[str] | str, **others: Any) -> tuple[dict[str, Any], list[str]]:
        """The same options with the files' full paths, and the paths that the task reads."""
        # A folder that ".." leads through may be closed to the task. A link keeps its own name, because the
        # suffix of the name says what the file is.
        paths = [str(path.parent.resolve() / path.name) for path in found_files(files)]
        return {"files": paths, **others}, paths

    @property
    def concurrent(self) -> bool:
        return iscoroutinefunction(self.scorer)

    def __len__(self) -> int:
        """Prompts of one epoch."""
        return len(self._numbers)

    def names(self) -> Iterator[str]:
        """The names of this split's rows. The same question has the same name in every file."""
        return map(self._key, self._numbers)

    def prompt(self, index: int) -> TextPrompt:
        epoch, place = divmod(index, len(self._numbers))
        if self._epochs and epoch >= self._epochs:
            raise NoMorePrompts
        if self._shuffle:
            count = len(self._numbers)
            place = permuted(place, count, rng_seed=self._rng_seed, epoch=epoch)
        return self._prompt_of(self._numbers[place])

    def _prompt_of(self, number: int) -> TextPrompt:
        row = self._rows.row(number)
        return TextPrompt(
            self._ask(row, number),
            secret=number,
            tags={tag: str(self._value(row, tag, number)) for tag in self._tags},
            row=self._key(number),
            where=self._rows.place(number),
        )

    def reward(self, prompt: TextPrompt, answer: Answer) -> Any:
        return self.scorer(answer, self.expected(prompt))

    def expected(self, prompt: TextPrompt) -> Expected:
        """The expected answer to this prompt, with its row."""
        row = self._rows.row(prompt.secret)
        return Expected(self._expected(row, prompt.secret), _Row(row))

    def data_caution(self) -> str:
        """Say how many of this split's rows repeat the question of an earlier row and expect another answer;
        empty: none.
        """
        first: dict[int, tuple[int, str]] = {}
        unlike = []
        looked = self._numbers[:ROWS_CHECKED_MAX]
        for number in looked:
            row = self._rows.row(number)
            here = number, self._expected(row, number)
            there = first.setdefault(hash(json.dumps(self._ask(row, number))), here)
            if there[1] != here[1]:
                unlike.append((there, here))
        if not unlike:
            return ""
        both = [f"{self._rows.place(number)} {text!r:.60}" for number, text in unlike[0]]
        return (
            f"{len(unlike)} of {len(looked)} rows ask the question of another row, and expect another answer, e.g. "
            f"{' and '.join(both)}"
        )

    # --- inside

    def _key(self, number: int) -> str:
        """The hash of the row's question, which does not depend on the words that the prompt adds."""
        row = self._rows.row(number)
        if self._messages:
            asked = [each["content"] for each in self._ask(row, number) if each["role"] == "user"]
        else:
            asked = [str(self._value(row, column, number)) for column in self._columns]
        return row_key("\n".join(asked))

    def _ask(self, row: DataRow, number: int) -> list[dict[str, str]]:
        if not self._messages:
            return [{"role": "user", "content": self._question(row, number)}]
        messages = self._value(row, self._messages, number)
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise OperatorFault(
                f"rows: {self._rows.place(number)}: {self._messages}: expected a list of messages with "
                "role and content"
            )
        return [{"role": each["role"], "content": each["content"]} for each in messages]

    def _question(self, row: DataRow, number: int) -> str:
        if "{" not in self._prompt:
            return _text(self._value(row, self._prompt, number))
        values = {name: _text(self._value(row, name, number)) for name in self._columns}
        return _Filling().vformat(self._prompt, (), values)

    def _expected(self, row: DataRow, number: int) -> str:
        if not self._answer:
            return ""
        found = str(self._value(row, self._answer, number))
        if self._answer_after:
            found = found.rpartition(self._answer_after)[2]
        return found.strip()

    def _value(self, row: DataRow, column: str, number: int) -> Any:
        """The value of a column, or of a path into it: a.b or a[b]. OperatorFault: there is none."""
        try:
            found = _found(row, column)
        except KeyError:
            place = self._rows.place(number)
            hint = (
                "; the first row of CSV names the columns" if place.lower().endswith(".csv") else ""
            )
            if "{" in self._prompt:
                hint += "; braces of the text itself are doubled: {{ }}"
            elif column == self._prompt and " " in column:
                hint += "; in a text, columns are in braces, such as {question}"
            raise OperatorFault(
                f"rows: {place} has no {column!r}; its columns are {', '.join(row)}{hint}"
            ) from None
        if found is None:
            raise OperatorFault(
                f"rows: {self._rows.place(number)}: {column!r} is null; give it a value, or leave the row out"
            )
        return found

    def _require_columns(self) -> None:
        """OperatorFault: the first row lacks a column that is asked for."""
        first = self._rows.row(0)
        self._ask(first, 0)
        asked = None if self._messages else self._value(first, self._columns[0], 0)
        if isinstance(asked, list) and asked and all(map(_is_message, asked)):
            raise OperatorFault(
                f"rows: prompt: {self._columns[0]!r} holds a list of messages; name it in "
                "task.options.messages instead"
            )
        self._expected(first, 0)
        for tag in self._tags:
            self._value(first, tag, 0)

    def _require_values(self) -> None:
        """OperatorFault: a row lacks its question or its expected answer, or the latter is no text."""
        # A prompt with columns in braces may lack the values of some columns.
        filled = {self._answer, *([] if "{" in self._prompt else self._columns)}
        names = {*([self._messages] if self._messages else self._columns), self._answer} - {""}
        lacking: dict[str, list[int]] = {}
        looked = min(len(self._rows), ROWS_CHECKED_MAX)
        for number in range(looked):
            row = self._rows.row(number)
            for name in names:
                try:
                    found = _found(row, name)
                except KeyError:
                    found = None
                if found is None or (found == "" and name in filled):
                    lacking.setdefault(name, []).append(number)
                elif (
                    name == self._answer and isinstance(found, list | dict) and not self._own_scorer
                ):
                    raise OperatorFault(
                        f"rows: {self._rows.place(number)}: {name!r} holds {type(found).__name__} "
                        f"{found!r:.60}; expected a text or a number: make a column with one answer, or name a "
                        f"path into a table, such as {name}.value"
                    )
        for name, rows in sorted(lacking.items()):
            have = "has" if len(rows) == 1 else "have"
            raise OperatorFault(
                f"rows: {len(rows)} of {looked} rows {have} no {name!r}, e.g. {self._rows.place(rows[0])}: "
                "leave them out"
            )

    def _require_secret(self) -> None:
        """OperatorFault: nothing is expected, or the prompt shows it, or a table that holds it."""
        if not self._answer:
            raise OperatorFault("rows: answer: expected a column; found none")
        root = self._answer.partition(".")[0]
        shown = [self._messages] if self._messages else self._columns
        for name in shown:
            path = ".".join(_path(name))
            if path in (root, self._answer) or path.startswith(f"{self._answer}."):
                raise OperatorFault(
                    f"rows: prompt: it shows the column {name!r}, which holds the expected answer; the model "
                    "would only copy it"
                )


class Demonstrations(RowsTask):
    """The rows of the same files as conversations that end with an answer: that of the column `answer`, or, if this is
    empty, the last of `messages`. Nothing is scored, and the rows have no end.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"scorer": "exact", "scorer_options": None, "epochs": 0})

    @staticmethod
    def asked(options: Mapping[str, Any], most: int) -> set[str]:
        """The names of the rows that an evaluation with these options asks. Held-out rows count also if it asks only
        `most` of them; 0: all.
        """
        rows = Demonstrations(**{**options, "answer": "", "tags": ()})
        if options["split"] == "heldout":
            return {*rows.names()}
        return {rows.prompt(n).row for n in range(min(most or len(rows), len(rows)))}

    def leave_out(self, names: Container[str]) -> list[str]:
        """Leave out the rows with these names; return the names of those that it had. OperatorFault: no row is left."""
        named = [(number, self._key(number)) for number in self._numbers]
        self._numbers = array("L", (number for number, name in named if name not in names))
        if not self._numbers:
            raise OperatorFault(
                f"rows: each of the {len(named)} rows is asked by an [[eval]], so none is left to train on: take "
                "other rows (sft.rows.files), or change eval.options"
            )
        return [name for _, name in named if name in names]

    def conversation(self, index: int) -> TextPrompt:
        """Conversation `index`, as `prompt` counts. OperatorFault: it does not end with an answer, or one is empty."""
        return self._answered(self.prompt(index))

    def conversations(self) -> Iterator[TextPrompt]:
        """All of them once, in the order of the files. OperatorFault: as `conversation`."""
        return map(self._answered, map(self._prompt_of, sorted(self._numbers)))

    def _answered(self, prompt: TextPrompt) -> TextPrompt:
        messages, number = [*prompt.messages], prompt.secret
        given = (
            self._value(self._rows.row(number), self._messages, number) if self._messages else ()
        )
        if lost := next((name for each in given for name in _BESIDE_CONTENT if each.get(name)), ""):
            raise OperatorFault(
                f"rows: {prompt.where}: a message has {lost}, which would not be trained; write it into the "
                "content as the model writes it, or leave the row out"
            )
        if self._answer:
            messages.append({"role": "assistant", "content": self.expected(prompt).text})
        answers = [each["content"] for each in messages if each["role"] == "assistant"]
        if messages[-1]["role"] != "assistant":
            raise OperatorFault(
                f"rows: {prompt.where}: {self._messages}: the last message is the {messages[-1]['role']}'s; expected "
                "the assistant's, or the name of a column with the answer (sft.rows.answer)"
            )
        if not all(map(str.strip, answers)):
            raise OperatorFault(f"rows: {prompt.where}: an answer is empty; leave the row out")
        return replace(prompt, messages=messages)

    def _require_secret(self) -> None:
        if self._answer:
            super()._require_secret()


class _Row(dict[str, Any]):
    """A row that says which columns it has."""

    def __missing__(self, column: str) -> Any:
        raise KeyError(f"the row has no {column!r}; its columns are {', '.join(self)}")


class _Filling(Formatter):
    """Fills a prompt with the values of its columns, each under its whole name: {a}, {a.b}, {a[b]}."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:  # noqa: ARG002
        return kwargs[field_name], field_name


def _columns_in(prompt: str) -> set[str]:
    """The columns in braces. OperatorFault: a brace lacks its other half, or a name."""
    try:
        found = {name for _, name, _, _ in Formatter().parse(prompt) if name is not None}
    except ValueError as error:
        raise OperatorFault(
            f"rows: prompt {prompt!r}: {error}; braces of the text itself are doubled: {{{{ }}}}"
        ) from error
    if "" in found:
        raise OperatorFault(
            f"rows: prompt {prompt!r}: expected a column in each pair of braces; braces of the text itself "
            "are doubled: {{ }}"
        )
    return found


def _found(row: DataRow, column: str) -> Any:
    """The value of a column, or of a path into it. KeyError: there is no such column."""
    found: Any = row
    for name in [column] if column in row else _path(column):
        if not isinstance(found, Mapping):
            raise KeyError(name)
        found = found[name]
    return found


def _path(column: str) -> list[str]:
    return column.replace("[", ".").replace("]", "").split(".")


def _text(value: Any) -> str:
    """The value as a text for a prompt: tables and lists become JSON."""
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.get("role") in ROLES
        and isinstance(value.get("content"), str)
    )
