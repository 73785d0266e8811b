"""Who computes how much: cost model, shares, agreed plan, samplers, timer."""
