"""Results for people and for other programs: tables, sentences, and CSV."""
