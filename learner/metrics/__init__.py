"""The metrics of a train step: its row, the boards, and its figures by staleness."""
