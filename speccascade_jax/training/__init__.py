"""Fine-tuning and distillation."""
