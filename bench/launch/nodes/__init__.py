"""A run over several launchers (externally launched ranks, or several nodes): how they meet, communicate and end."""
