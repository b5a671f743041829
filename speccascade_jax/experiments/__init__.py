"""The experiments behind the pages of docs/results: `table.EXPERIMENTS`, run by scripts/report.py."""
