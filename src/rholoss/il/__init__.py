"""Irreducible losses: fitting the small model, scoring the training points, keeping the result."""
