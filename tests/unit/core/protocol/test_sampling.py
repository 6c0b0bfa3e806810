"""The samplings that engines support, and their description for people."""

import math

import pytest

from echo2d.core.protocol.sampling import WHOLE, Sampling


def test_a_sampling_of_the_whole_distribution_cuts_nothing() -> None:
    assert Sampling(1.0, 1.0, 0, 0.0) == WHOLE
    assert not WHOLE.cuts
    assert not Sampling(0.3).cuts
    assert all(each.cuts for each in (Sampling(1, 0.9), Sampling(top_k=1), Sampling(min_p=0.1)))


@pytest.mark.parametrize(
    ("sampling", "fault"),
    [
        (WHOLE, ""),
        (Sampling(0.0), ""),
        (Sampling(1e-3, 1e-9, 1, 0.999), ""),
        (Sampling(1e-4), "temperature"),
        (Sampling(-1.0), "temperature"),
        (Sampling(math.nan), "temperature"),
        (Sampling(math.inf), "temperature"),
        (Sampling(top_p=0.0), "top_p"),
        (Sampling(top_p=1.1), "top_p"),
        (Sampling(top_p=math.nan), "top_p"),
        (Sampling(top_k=-1), "top_k"),
        (Sampling(min_p=1.0), "min_p"),
        (Sampling(min_p=math.nan), "min_p"),
    ],
)
def test_a_sampling_that_no_engine_can_do_is_named(sampling: Sampling, fault: str) -> None:
    assert sampling.fault.partition(" ")[0] == fault


def test_the_description_names_only_parameters_that_cut_the_distribution() -> None:
    assert str(WHOLE) == "temperature 1"
    assert str(Sampling(0.7, 0.95, 20, 0.05)) == "temperature 0.7, top_p 0.95, top_k 20, min_p 0.05"
