"""The mathematics of the models: no rank, no world size and no collective appears in this package."""
