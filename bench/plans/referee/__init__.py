"""A search by a program or a person, refereed: every try is raced, and what is kept is shown to be better."""
