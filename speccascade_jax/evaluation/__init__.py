"""Evaluation: quality, trade-offs, few-shot tasks and timing."""
