"""Configs for common jobs, which `echo2d init` fills in, checks and writes."""
