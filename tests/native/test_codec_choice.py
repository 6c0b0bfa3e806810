"""Which codec serves: the best there is, another one on demand, and numpy where nothing was compiled."""

import sys

import pytest

from echo2d import native


def test_the_best_one_serves() -> None:
    assert native.available()[0] == "numpy"
    assert native.codec() == native.available()[-1]


def test_another_one_for_a_while() -> None:
    best = native.codec()
    for each in native.available():
        with native.using(each):
            assert native.codec() == each
            assert (native.loops() is None) == (each == "numpy")
        assert native.codec() == best


@pytest.mark.skipif(native.codec() == "numpy", reason="the loops are not compiled here")
def test_a_level_that_the_cpu_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="level"):
        native.Loops(9).decode_split(bytearray(2), bytes(68), 1)
    with pytest.raises(ValueError, match="length"):
        native.Loops(0).encode_sparse(b"ab", b"abcd", 1, split=True)
    with pytest.raises(ValueError, match="length"):
        native.Loops(0).part_planes(b"abcd", bytearray(1), bytearray(2))
    with pytest.raises(ValueError, match="length"):
        native.Loops(0).join_planes(bytearray(4), b"a", b"ab")
    with pytest.raises(TypeError, match="read-write"):
        native.Loops(0).decode_split(b"ab", bytes(68), 1)


def test_numpy_serves_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "echo2d.native")
    monkeypatch.setitem(sys.modules, "echo2d.native._words", None)
    monkeypatch.delattr("echo2d.native._words", raising=False)
    import echo2d.native as again

    assert again.available() == ("numpy",)
    assert again.codec() == "numpy"
    assert again.loops() is None
