"""Learned rules."""
