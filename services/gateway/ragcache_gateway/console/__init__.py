"""The console: a page that asks questions and shows what was reused."""
