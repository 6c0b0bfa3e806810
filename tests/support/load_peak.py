"""One rank that loads a model and prints its peak of memory: `torchrun -m tests.support.load_peak MODEL OUT`."""

import json
import resource
import sys
from pathlib import Path

from echo2d.learner.config import place
from echo2d.learner.model.load import empty_model, fill
from echo2d.learner.ranks.ranks import Ranks, Rendezvous
from echo2d.learner.saving.layout import layout_of
from tests.support.learner import config_in


def memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def main(model: Path, out: Path) -> None:
    here = place()
    config = config_in(out, model)
    rendezvous = Rendezvous(here) if here.size > 1 else None
    ranks = rendezvous.join(config, lost=print) if rendezvous else Ranks()
    small = empty_model(model)
    before = memory_mb()
    layout = layout_of(small, model)
    fill(ranks.shard(small, config), model, layout, ranks.device)
    (out / f"peak-{here.rank}.json").write_text(json.dumps(memory_mb() - before))
    if rendezvous:
        rendezvous.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
