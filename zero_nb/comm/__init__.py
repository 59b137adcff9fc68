"""Ranks, agreement, collectives, objects, recording, and how n ranks are started."""
