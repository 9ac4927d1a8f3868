"""Updating the weights: rules, mixed precision, clipping, loss scale, schedules."""
