"""Decisions of a search: filters, fusion, ranking, and whether early results are final."""
