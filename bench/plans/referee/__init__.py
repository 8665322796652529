"""Referees a search by a program or a person: every change is raced, and what is kept is shown to be better."""
