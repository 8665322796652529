"""Code, though its folder's name is that of a folder of data."""

VAL_LOSS = 6.0
