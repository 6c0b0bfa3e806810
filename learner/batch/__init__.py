"""What comes in: batches are fetched, checked and laid out for the model."""
