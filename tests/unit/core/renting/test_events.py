import pytest

from echo2d.core.renting.budget import Budget, Label, RentOffer
from echo2d.core.renting.events import RentRules

RULES = RentRules("echo2d-0a1b2c3d-", Budget(1.0, 10.0), 3600.0, 60.0, 60.0, 0.0)


def test_labels_have_the_number_of_their_box() -> None:
    label = RULES.label(RentOffer("aws", "g6", 1.0, 1.0, 1), 17)
    assert label == "echo2d-0a1b2c3d-aws-g6-17"
    assert RULES.number_of(label) == 17


@pytest.mark.parametrize(
    "label", ["echo2d-ffffffff-aws-g6-17", "echo2d-0a1b2c3d-x", "echo2d-0a1b2c3d-\u0663", "7"]
)
def test_other_labels_have_no_number(label: str) -> None:
    assert RULES.number_of(Label(label)) == 0
