"""State that outlives a run, and changes its world size."""
