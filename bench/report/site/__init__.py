"""The results site: its pages, and what stands on them."""
