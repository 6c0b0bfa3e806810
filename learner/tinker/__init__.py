"""Serve the training calls of the Tinker API: losses as sums, many adapters on one base model."""
