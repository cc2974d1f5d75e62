"""Two captures of answers, compared."""
