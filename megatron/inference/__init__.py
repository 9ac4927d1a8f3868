"""Using a trained model."""
