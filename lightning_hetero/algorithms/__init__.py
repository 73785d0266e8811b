"""Algorithms between replicas: one file per paper."""
