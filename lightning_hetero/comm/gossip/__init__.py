"""How gossiping replicas reach each other: messages with a deadline, between two at a time."""
