"""Tickets of episodes cannot be invented, changed, or used in another run."""

import random

from echo2d.core.base.ids import GroupId
from echo2d.net.security.tickets import TICKET_PREFIX, make_ticket, read_ticket, ticket_key

KEY, OTHER = ticket_key(bytes(32)), ticket_key(bytes([1] * 32))


def test_a_ticket_names_its_sample() -> None:
    text, ticket = make_ticket(KEY, GroupId(1 << 40), 63)
    assert read_ticket(KEY, text) == ticket
    assert ticket.at == (1 << 40, 63)
    again, other = make_ticket(KEY, GroupId(1 << 40), 63)
    assert (again == text, other.nonce == ticket.nonce) == (False, False)
    assert read_ticket(OTHER, text) is None


def test_a_ticket_with_a_changed_text_is_refused() -> None:
    text, _ = make_ticket(KEY, GroupId(3), 1)
    rng = random.Random(5)
    signs = "ABCDEFGHabcdefgh0123456789-_+/=. é"
    for at in range(len(text)):
        for sign in rng.sample(signs, 8):
            changed = text[:at] + sign + text[at + 1 :]
            assert changed == text or read_ticket(KEY, changed) is None
    for bad in (
        "",
        TICKET_PREFIX,
        text[:-1],
        text + "A",
        text[3:],
        text.upper(),
        "ep_" + "A" * 1000,
    ):
        assert read_ticket(KEY, bad) is None
