"""From texts to outputs: settings, tokenizers, the scheduler, Cascade."""
