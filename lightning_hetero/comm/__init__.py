"""How bytes move between ranks: topology, agreement, pulses."""
