"""Pages: self-contained HTML files that open without a network. Only the commands import this."""
