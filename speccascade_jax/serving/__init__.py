"""The HTTP server: a client of the one scheduler, in OpenAI's wire format."""
