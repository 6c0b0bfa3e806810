"""Checkpoints, versions to publish, and the files of both."""
