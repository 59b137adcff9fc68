"""Plans: who owns what, what travels together, what runs when, what it needs. Values, no processes."""
