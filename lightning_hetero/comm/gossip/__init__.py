"""Messages with deadlines between gossiping replicas, two at a time."""
