"""Communication between ranks: topology, checks of agreement, averages over replicas, parameter centers, gossip."""
