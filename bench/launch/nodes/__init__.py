"""One run over processes that others started, or over several nodes: who they are, how they meet, how they end."""
