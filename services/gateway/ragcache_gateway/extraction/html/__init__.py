"""Reads the text of web pages: what a reader of the page sees, as Markdown."""
