"""From texts to outputs: Cascade, input and output files, Ray jobs."""
