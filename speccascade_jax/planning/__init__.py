"""Which models, thresholds and block sizes have the least predicted time."""
