"""echo2d: bounded-staleness RL post-training with rollouts from far-away machines."""

__version__ = "0.1.0"
