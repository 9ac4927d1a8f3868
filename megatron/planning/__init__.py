"""What a run will need, before it needs it."""
