"""Ranks that die, freeze, leave and join: agreement on a view, and requests to join."""
