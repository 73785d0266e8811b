"""Shares of a batch: cost model, planner, samplers, streams, timer, sample accounting."""
