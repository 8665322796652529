"""Decides whether claims hold by the rules of their tracks, and keeps the leaderboard."""
