"""The policy under training: its weights, its attention, its logprobs, its optimizer."""
