"""Reconciles RagCollections: schedules syncs, creates their Jobs and reports their outcome."""
