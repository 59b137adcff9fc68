"""Training where ranks have different amounts of data."""
