"""Answers as documents: document.py words each answer once and renders it for terminal, Markdown, a page and programs.

page.py writes the html of static pages that open from a file, offline; chart.py says what is drawn, assets/ draw it;
forest, stairs, lanes, waterfall and heat are drawings without a script.  All text is foreign: escaped in each form.
"""
