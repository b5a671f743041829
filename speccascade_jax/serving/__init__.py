"""The HTTP server, in OpenAI's wire format, on top of the scheduler."""
