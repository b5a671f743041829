"""Quality, trade-offs, few-shot tasks, timing."""
