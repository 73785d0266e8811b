"""How processes start: ragged nodes, ranks that are watched, scripts that are run unchanged."""
