"""How old the sampled tokens of a call are."""

import numpy as np

from echo2d.learner.tinker.datums import staleness_metrics, staleness_of
from echo2d.tinker.wire import Datum, SequenceSpan

MODEL = "5e:train:3"


def datum(*spans: SequenceSpan) -> Datum:
    return Datum(np.arange(4), {}, spans)


def sampled(sequence: str, length: int = 2) -> SequenceSpan:
    return SequenceSpan(sequence, 0, length, sampled=True)


def test_the_name_of_a_sequence_says_after_which_step_it_was_drawn() -> None:
    data = [
        datum(SequenceSpan("5e:sample:1/0/0@3.1", 0, 9, sampled=False), sampled("5e:sample:1/0/0@3.4", 3)),
        datum(sampled("5e:sample:2/7/1@3.6", 1)),
    ]  # fmt: skip
    found = staleness_of(data, MODEL, 6)
    assert found == [(2, 3), (0, 1)]
    assert staleness_metrics(found) == {"staleness:mean": 1.5, "staleness:max": 2.0}


def test_sequences_of_other_models_and_of_checkpoints_have_none() -> None:
    names = ("5e:sample:1/0/0@2.4", "aa:sample:1/0/0@3.4", "5e:sample:1/0/0", "anything", "")
    assert staleness_of([datum(*map(sampled, names))], MODEL, 6) == []
    assert staleness_metrics([]) == {}
