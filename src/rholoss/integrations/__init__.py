"""Thin shells that decide where a framework's own loop calls `select`; nobody imports them."""
