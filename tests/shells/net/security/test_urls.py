"""Texts that people give as a coordinator's URL."""

import pytest

from echo2d.errors import OperatorFault
from echo2d.net.security.urls import coordinator_url


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:7700", "http://127.0.0.1:7700"),
        ("https://box:7700/", "https://box:7700"),
        ("http://box.example:7700/", "http://box.example:7700"),
        ("http://[::1]:7700", "http://[::1]:7700"),
        ("http://proxy/echo2d/", "http://proxy/echo2d"),
    ],
)
def test_a_url_is_accepted_and_normalised(text: str, url: str) -> None:
    assert coordinator_url(text) == url


@pytest.mark.parametrize(
    "text",
    [
        "", "nonsense", "127.0.0.1:7700", "localhost:7700", "wss://127.0.0.1:7700", "ftp://127.0.0.1:7700", "http://",
        "http://:7700", "http://127.0.0.1:port", "http://127.0.0.1:70000", "http://[127.0.0.1", "http://a b:7700",
        "http://me:secret@box:7700", "http://box:7700?x", "http://" + "x" * 300, "http://...", "http://box\n:7700",
    ],
)  # fmt: skip
def test_a_text_that_is_no_url_is_refused(text: str) -> None:
    with pytest.raises(OperatorFault, match="is not the URL of a coordinator"):
        coordinator_url(text)
