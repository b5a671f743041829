"""Texts into tokens and back: vocabularies, special tokens, chat templates."""
