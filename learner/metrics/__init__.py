"""What a step shows: rows, boards, staleness, and how each trajectory looks to the model."""
