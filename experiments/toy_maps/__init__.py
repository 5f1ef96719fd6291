"""What each method picks over time, on a problem that one can look at."""
