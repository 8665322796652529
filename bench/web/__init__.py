"""Renders answers: document.py has one Document per answer, with renderers for terminal, Markdown, HTML and JSON.

page.py writes the HTML of static pages, which open from a file and offline; chart.py specifies charts, which assets/
draw; forest, stairs, lanes, waterfall and heat are drawings without a script.  All text is escaped in each format.
"""
