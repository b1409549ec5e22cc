"""Words and pictures for people, and nothing else: progress, tables, cards, figures."""
