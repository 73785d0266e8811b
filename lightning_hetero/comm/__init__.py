"""How bytes move between ranks: topology, agreement, averages over replicas, parameter centers, gossip."""
