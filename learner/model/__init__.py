"""The policy under training: its weights, its logprobs, its optimizer."""
