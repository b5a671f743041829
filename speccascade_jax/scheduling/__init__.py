"""Requests into rows: what runs on the devices, and who has a turn."""
