"""What is optimized: advantages, losses and off-policy corrections, each by its paper."""
