"""The results site: a results folder as static HTML pages."""
