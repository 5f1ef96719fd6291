"""Pages: self-contained HTML that opens without a network. Nobody imports this but the commands."""
