"""Measures what a refit of a SGLang server costs in each mode."""
