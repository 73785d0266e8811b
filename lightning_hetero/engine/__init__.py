"""What a strategy is made of; nothing here knows Lightning."""
