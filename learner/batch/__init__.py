"""Batches are fetched, checked and laid out for the model."""
