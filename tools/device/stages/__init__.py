"""Programs that ``run.py`` starts. Each prints the lines of its stages."""
