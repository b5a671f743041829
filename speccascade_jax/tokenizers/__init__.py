"""Conversion between texts and tokens: vocabularies, special tokens, chat templates."""
