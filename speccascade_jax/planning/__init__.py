"""Planning: the models, thresholds and block sizes with the least predicted time."""
