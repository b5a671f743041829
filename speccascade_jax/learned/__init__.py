"""Rules that are trained."""
