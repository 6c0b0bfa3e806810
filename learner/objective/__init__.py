"""The objective: advantages, losses and off-policy corrections, each with its paper."""
