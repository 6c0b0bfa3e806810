"""The codec in use: the best one available, another one on demand, and numpy if nothing was compiled."""

import sys
import tracemalloc
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from echo2d import native
from echo2d.core.weights.delta import encode_chunk


def test_the_best_available_codec_is_used() -> None:
    assert native.available()[0] == "numpy"
    assert native.codec() == native.available()[-1]


def test_another_codec_can_be_used_for_a_while() -> None:
    best = native.codec()
    for each in native.available():
        with native.using(each):
            assert native.codec() == each
            assert (native.loops() is None) == (each == "numpy")
        assert native.codec() == best


@pytest.mark.skipif(native.codec() == "numpy", reason="the loops are not compiled here")
def test_a_codec_level_that_the_cpu_lacks_is_refused() -> None:
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


def test_the_memory_that_a_codec_keeps_can_be_freed() -> None:
    base = bytes(1 << 20)
    for codec in native.available():
        with native.using(codec):
            tracemalloc.start()
            encode_chunk(b"\1\0" * 1000 + base[2000:], base)
            native.free_memory()
            left = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            assert left < 1 << 16


def test_the_numpy_codec_is_used_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "echo2d.native._words", None)
    monkeypatch.delattr("echo2d.native._words", raising=False)
    assert native.__file__ is not None
    # Under another name, so that everybody else keeps the module that they have.
    spec = spec_from_file_location("native_again", native.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again.available() == ("numpy",)
    assert again.codec() == "numpy"
    assert again.loops() is None
    again.free_memory()
