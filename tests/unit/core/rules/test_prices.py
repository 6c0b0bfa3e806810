"""The price of a worker, by its name."""

from echo2d.core.rules.prices import NamedPrice, Price, price_of

SPOT, ANY = Price(usd_per_h=0.3), Price(usd_per_h=0.5)


def test_the_first_matching_pattern_gives_the_price_and_the_workers_claim_comes_last() -> None:
    named = (NamedPrice("spot-*", SPOT), NamedPrice("*", ANY))
    assert price_of(named, "spot-7", 0.1) == SPOT
    assert price_of(named, "box", 0.1) == ANY
    assert price_of(named[:1], "box", 0.1) == Price(usd_per_h=0.1)
    assert price_of((), "box", None) == Price()
