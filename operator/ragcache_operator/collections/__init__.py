"""The RagCollection's side of the operator: when to sync, the Job that does, what came of it."""
