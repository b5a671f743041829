"""How a drafter of another vocabulary drafts for a verifier."""
