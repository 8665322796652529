"""What a machine reaches, measured: its passports, kept with their dates, and what is read from them."""
