"""What is kept: checkpoints, versions to publish, and the files of both."""
