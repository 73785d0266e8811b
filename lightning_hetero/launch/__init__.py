"""Ragged and mixed nodes: cluster environments, device and backend choice."""
