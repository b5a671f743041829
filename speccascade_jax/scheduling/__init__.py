"""From requests to rows: what runs on the devices, and in which order."""
