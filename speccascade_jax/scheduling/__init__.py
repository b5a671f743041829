"""Scheduling: assigns requests to batch rows, and decides what runs on the devices."""
