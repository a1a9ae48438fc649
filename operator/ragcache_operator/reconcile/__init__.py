"""Reconciles RagCaches: Kopf handlers, the reconcile pass, writes of children, status reports."""
