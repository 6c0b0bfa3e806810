"""What a step shows: its row, the boards, and its facts by staleness."""
