"""Recipes for other libraries, each of them optional."""
