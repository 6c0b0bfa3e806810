"""Growing output becomes text piece by piece."""

from collections.abc import Sequence

import pytest

from echo2d.texts.detokenizer import UNREADABLE_TOKENS_MAX, Detokenizer, TextStream
from echo2d.texts.model_texts import ModelTexts
from tests.support.texts import bytes_tokenizer, texts


def read(made: ModelTexts, text: str, *stops: str, bundle: int = 1) -> tuple[list[str], bool, int]:
    """The pieces of text as its tokens came, whether a stop text ended them, and how many tokens that took."""
    reader, ids = Detokenizer(made, stops, special=False), made.encode(text, special=False)
    out, taken = [], 0
    for start in range(0, len(ids), bundle):
        piece = reader.put(ids[start : start + bundle])
        out.append(piece.text)
        taken += piece.tokens
        if piece.stopped:
            return out, True, taken
    return [*out, reader.end()], False, taken


@pytest.mark.parametrize("bundle", [1, 2, 5, 100])
def test_text_is_given_whole_and_never_as_half_a_character(bundle: int) -> None:
    told, stopped, taken = read(texts(), "aé漢🙂z", bundle=bundle)
    assert ("".join(told), stopped, taken) == ("aé漢🙂z", False, 11)
    assert not any("\ufffd" in part for part in told)


@pytest.mark.parametrize("bundle", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "stops", "told", "taken"),
    [
        ("one END two", ("END",), "one ", 7),
        ("one EN", ("END",), "one EN", 6),
        ("aab", ("ab",), "a", 3),
        ("x漢y", ("漢",), "x", 4),
        ("a bc", ("c", "bc"), "a ", 4),
        ("none", ("zzz", "q"), "none", 4),
    ],
)
def test_a_stop_string_ends_the_text_and_is_not_part_of_it(
    text: str, stops: tuple[str, ...], told: str, taken: int, bundle: int
) -> None:
    out, stopped, count = read(texts(), text, *stops, bundle=bundle)
    assert ("".join(out), count) == (told, taken)
    assert stopped == (told != text)


class Counted(ModelTexts):
    """It counts the tokens that it reads."""

    read = 0

    def decode(self, tokens: Sequence[int]) -> str:
        self.read += len(tokens)
        return super().decode(tokens)


def counted() -> Counted:
    tokenizer = bytes_tokenizer()
    tokenizer.add_special_tokens(["<pad>"])
    return Counted({"tokenizer.json": tokenizer.to_str().encode()})


BYTE_80, PAD = 222, 256  # of bytes_tokenizer's alphabet: never a character alone; of `counted`


@pytest.mark.parametrize("token", [PAD, BYTE_80, 9999, 65])
@pytest.mark.parametrize("special", [False, True])
def test_a_token_costs_the_same_however_many_came_before_it(token: int, special: bool) -> None:
    """Special ones, halves of characters, ids that no tokenizer knows, and letters."""
    costs = []
    for count in (100, 1000):
        made = counted()
        reader = Detokenizer(made, ("never",), special=special)
        for _ in range(count):
            reader.put([token])
        reader.end()
        costs.append(made.read)
    assert costs[1] <= 10.5 * costs[0] + 10


def test_text_goes_on_behind_tokens_that_are_no_text() -> None:
    made = counted()
    stream = TextStream(made, special=False)
    word = made.encode("a漢b", special=False)
    told = [stream.put(token) for token in (*[BYTE_80] * UNREADABLE_TOKENS_MAX, *word, PAD, *word)]
    assert "".join(told).endswith("a漢ba漢b")
    assert "<pad>" not in "".join(told)
    shown = TextStream(made, special=True)
    assert "".join(shown.put(token) for token in (*word, PAD, *word)) == "a漢b<pad>a漢b"


def test_half_a_character_at_the_end_is_shown_as_a_replacement_character() -> None:
    made = texts()
    reader = Detokenizer(made, (), special=False)
    assert reader.put(made.encode("漢", special=False)[:2]).text == ""
    assert reader.end() == "\ufffd"
